package pki_test

import (
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/pki"
)

func TestCertificatesVerify(t *testing.T) {
	ca, err := pki.NewAuthority("kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	server, err := ca.Issue(pki.Profile{CommonName: "kube-apiserver", Names: []string{"kubernetes.default", "10.96.0.1"}, Server: true})
	if err != nil {
		t.Fatal(err)
	}
	client, err := ca.Issue(pki.Profile{CommonName: "system:node:n", Organizations: []string{"system:nodes"}, Client: true})
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca.Certificate)
	for _, name := range []string{"kubernetes.default", "10.96.0.1"} {
		if _, err := server.Certificate.Verify(x509.VerifyOptions{Roots: roots, DNSName: name}); err != nil {
			t.Errorf("server as %s: %v", name, err)
		}
	}
	if _, err := server.Certificate.Verify(x509.VerifyOptions{Roots: roots, DNSName: "elsewhere"}); err == nil {
		t.Error("the server's certificate holds for a name that was not asked for")
	}
	asClient := x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	if _, err := client.Certificate.Verify(asClient); err != nil {
		t.Errorf("client: %v", err)
	}
	if _, err := server.Certificate.Verify(asClient); err == nil {
		t.Error("a server's certificate passes as a client's")
	}
	if s := client.Certificate.Subject; s.CommonName != "system:node:n" || len(s.Organization) != 1 || s.Organization[0] != "system:nodes" {
		t.Errorf("client is %v", s)
	}
	if client.Certificate.IsCA {
		t.Error("a client can sign")
	}
}

func TestStoreKeepsWhatFits(t *testing.T) {
	store := pki.Store{Dir: t.TempDir()}
	ca, err := store.Authority("ca", "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	profile := pki.Profile{CommonName: "kube-apiserver", Names: []string{"192.0.2.2"}, Server: true}
	first := certificate(t, store, ca, profile)
	if again := certificate(t, store, ca, profile); again != first {
		t.Error("a fitting certificate was made anew")
	}
	profile.Names = append(profile.Names, "192.0.2.3")
	moved := certificate(t, store, ca, profile)
	if moved == first {
		t.Error("a certificate was kept that lacks a name")
	}
	other, err := store.Authority("other", "kubernetes")
	if err != nil {
		t.Fatal(err)
	}
	if certificate(t, store, other, profile) == moved {
		t.Error("a certificate of another authority was kept")
	}

	same, err := store.Authority("ca", "kubernetes")
	if err != nil || same.Fingerprint() != ca.Fingerprint() {
		t.Errorf("the authority changed (%v)", err)
	}
	info, err := os.Stat(filepath.Join(store.Dir, "ca.key"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode of a key: %v, %v; want 0600", info.Mode(), err)
	}
}

func TestKeyPairIsMadeOnce(t *testing.T) {
	store := pki.Store{Dir: t.TempDir()}
	read := func() string {
		if err := store.KeyPair("sa"); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(filepath.Join(store.Dir, "sa.key"))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	if first := read(); read() != first {
		t.Error("the key pair was made anew: every token would be void")
	}
}

func TestDamagedFileIsReported(t *testing.T) {
	store := pki.Store{Dir: t.TempDir()}
	if err := os.WriteFile(filepath.Join(store.Dir, "ca.crt"), []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Authority("ca", "kubernetes"); err == nil {
		t.Error("a damaged authority was taken or replaced silently")
	}
}

func certificate(t *testing.T, store pki.Store, by *pki.Authority, p pki.Profile) string {
	t.Helper()
	a, err := store.Certificate("x/y", by, p)
	if err != nil {
		t.Fatal(err)
	}
	return a.Fingerprint()
}
