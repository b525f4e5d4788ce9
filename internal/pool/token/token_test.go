package token

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/pool"
)

var now = time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)

const (
	goodClient  = "token: s3cret-of-the-pool\ncacertpath: /etc/bitfusion/tls/ca.crt\n"
	goodServers = "servers:\n- addresses:\n  - 10.202.122.248:56001\n"
)

// certificate is a ca.crt that is valid from a time on for a year.
func certificate(t testing.TB, from time.Time, isCA bool) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "pool"},
		NotBefore: from, NotAfter: from.AddDate(1, 0, 0), IsCA: isCA, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func goodToken(t testing.TB) *Token {
	t.Helper()
	return &Token{CA: certificate(t, now.AddDate(0, -1, 0), true), Client: []byte(goodClient), Servers: []byte(goodServers)}
}

func TestCheck(t *testing.T) {
	key := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: []byte("key")})
	good := goodToken(t)
	tests := map[string]struct {
		change   func(*Token)
		warnings []string // parts, in order
		errs     []string // parts
	}{
		"a good one": {},
		"text around the certificate": {change: func(k *Token) {
			k.CA = append([]byte("subject=CN = pool\n"), k.CA...)
		}},
		"expired": {change: func(k *Token) { k.CA = certificate(t, now.AddDate(-2, 0, 0), true) },
			warnings: []string{`the certificate of "CN=pool" expired on 2025-06-01T12:00:00Z: download a new token`}},
		"not valid yet": {change: func(k *Token) { k.CA = certificate(t, now.AddDate(0, 0, 1), true) },
			warnings: []string{"is not valid before 2026-06-02T12:00:00Z: check the clock"}},
		"no authority": {change: func(k *Token) { k.CA = certificate(t, now.AddDate(0, -1, 0), false) },
			warnings: []string{"is not that of an authority"}},
		"text as ca.crt": {change: func(k *Token) { k.CA = []byte("hello") },
			errs: []string{"ca.crt is not a certificate: it must contain PEM"}},
		"blanks as ca.crt": {change: func(k *Token) { k.CA = []byte(" \n") }, errs: []string{"ca.crt is empty"}},
		"a certificate that is cut off": {change: func(k *Token) { k.CA = k.CA[:len(k.CA)/2] },
			errs: []string{"ca.crt contains a PEM block that cannot be parsed, perhaps truncated"}},
		"a certificate of garbage": {change: func(k *Token) {
			k.CA = append(k.CA[:len(k.CA):len(k.CA)], pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")})...)
		}, errs: []string{"ca.crt: certificate 2 cannot be read"}},
		// It would be copied into every namespace that uses the pool.
		"a key in ca.crt": {change: func(k *Token) { k.CA = append(k.CA[:len(k.CA):len(k.CA)], key...) },
			errs: []string{`ca.crt contains a PEM block of type "EC PRIVATE KEY"`}},
		"client.yaml that is a list": {change: func(k *Token) { k.Client = []byte("- a\n") },
			errs: []string{"client.yaml must be a YAML mapping, lines of the form key: value; it is a list"}},
		"client.yaml that is text": {change: func(k *Token) { k.Client = []byte("s3cret") },
			errs: []string{"client.yaml must be a YAML mapping, lines of the form key: value; it is text"}},
		"client.yaml of comments":   {change: func(k *Token) { k.Client = []byte("# s3cret\n") }, errs: []string{"client.yaml"}},
		"client.yaml that is empty": {change: func(k *Token) { k.Client = []byte("\n") }, errs: []string{"client.yaml is empty"}},
		"client.yaml with tabs": {change: func(k *Token) { k.Client = []byte("a:\n\tb: s3cret\n") },
			errs: []string{"client.yaml is not YAML", "line 2", "it has tabs"}},
		"client.yaml with an alias": {change: func(k *Token) { k.Client = []byte("token: *s3cret\n") },
			errs: []string{"client.yaml is not YAML: it has an alias"}},
		"two documents": {change: func(k *Token) { k.Client = []byte("a: 1\n---\nb: s3cret\n") },
			errs: []string{"more than one document"}},
		"another path of the certificate": {change: func(k *Token) { k.Client = []byte("a: 1\nCAcertPath: /s3cret/ca.crt\n") },
			warnings: []string{"client.yaml, line 2: cacertpath is not /etc/bitfusion/tls/ca.crt"}},
		"an address twice": {change: func(k *Token) { k.Servers = []byte(goodServers + "- addresses: [10.202.122.248:56001]\n") },
			warnings: []string{`duplicate address "10.202.122.248:56001", in server 1 and server 2`}},
		"all of it": {change: func(k *Token) { k.CA, k.Client, k.Servers = []byte("x"), []byte("{s3cret"), []byte("x") },
			errs: []string{"ca.crt is not a certificate", "client.yaml is not YAML", "servers.conf is text"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			k := *good
			if tt.change != nil {
				tt.change(&k)
			}
			warnings, err := k.Check(now)
			if len(warnings) != len(tt.warnings) {
				t.Errorf("warnings %q, want %q", warnings, tt.warnings)
			}
			for i := range min(len(warnings), len(tt.warnings)) {
				if !strings.Contains(warnings[i], tt.warnings[i]) {
					t.Errorf("warning %q, want %q in it", warnings[i], tt.warnings[i])
				}
			}
			if (err != nil) != (len(tt.errs) > 0) {
				t.Fatalf("error %v, want %q", err, tt.errs)
			}
			for _, want := range tt.errs {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q, want %q in it", err, want)
				}
			}
			if all := fmt.Sprint(warnings, err); strings.Contains(all, "s3cret") {
				t.Errorf("a message holds what is secret: %s", all)
			}
		})
	}
}

// W35: nothing that prints or logs a token shows what is in it.
func TestTokenIsNeverPrinted(t *testing.T) {
	k := goodToken(t)
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("token", "pointer", k, "value", *k, "inside", map[string]any{"token": k})
	body, err := json.Marshal(map[string]any{"a": k, "b": *k})
	if err != nil {
		t.Fatal(err)
	}
	encoded := fmt.Sprintf("%x", []byte("s3cret-of-the-pool"))
	for _, text := range []string{log.String(), string(body), fmt.Sprintf("%v %+v %#v %s %x %q %d", k, *k, *k, k, *k, k, *k),
		fmt.Sprint(k, *k)} {
		for _, secret := range []string{"s3cret", encoded, "czNjcmV0", "115 51"} {
			if strings.Contains(text, secret) {
				t.Errorf("%s is in %s", secret, text)
			}
		}
	}
}

func TestReadFolder(t *testing.T) {
	write := func(t *testing.T, folder string, files map[string]string) string {
		t.Helper()
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return folder
	}
	full := map[string]string{"ca.crt": "ca", "client.yaml": "client", "servers.conf": "servers", "README": "more"}

	t.Run("files", func(t *testing.T) {
		got, err := Read(write(t, t.TempDir(), full))
		if err != nil || string(got.CA) != "ca" || string(got.Client) != "client" || string(got.Servers) != "servers" {
			t.Errorf("read %q %q %q: %v", got.CA, got.Client, got.Servers, err)
		}
	})
	t.Run("links inside, as kubelet mounts secrets", func(t *testing.T) {
		folder := t.TempDir()
		if err := os.Mkdir(filepath.Join(folder, "..data"), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(folder, "..data"), full)
		for _, name := range Names() {
			if err := os.Symlink(filepath.Join("..data", name), filepath.Join(folder, name)); err != nil {
				t.Fatal(err)
			}
		}
		if got, err := Read(folder); err != nil || string(got.Client) != "client" {
			t.Errorf("read: %v", err)
		}
	})
	for name, tt := range map[string]struct {
		prepare func(t *testing.T, folder string)
		want    []string
	}{
		"nothing": {func(*testing.T, string) {}, []string{"ca.crt is missing", "client.yaml is missing", "servers.conf is missing"}},
		"an empty": {func(t *testing.T, f string) {
			t.Helper()
			write(t, f, map[string]string{"ca.crt": ""})
		}, []string{"ca.crt is empty"}},
		"too large": {func(t *testing.T, f string) {
			t.Helper()
			write(t, f, map[string]string{"ca.crt": strings.Repeat("x", maxFile+1)})
		}, []string{"ca.crt is larger than 256 KiB"}},
		"a folder": {func(t *testing.T, f string) {
			t.Helper()
			if err := os.Mkdir(filepath.Join(f, "ca.crt"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, []string{"ca.crt is a folder: it must be a regular file"}},
		"a link out of it": {func(t *testing.T, f string) {
			t.Helper()
			if err := os.Symlink("/etc/hostname", filepath.Join(f, "ca.crt")); err != nil {
				t.Fatal(err)
			}
		}, []string{"ca.crt", "escapes"}},
	} {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			tt.prepare(t, folder)
			_, err := Read(folder)
			for _, want := range tt.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v, want %q in it", err, want)
				}
			}
		})
	}
	if _, err := Read(filepath.Join(t.TempDir(), "none.tar")); err == nil || !strings.Contains(err.Error(), "none.tar") {
		t.Errorf("error %v, want the name in it", err)
	}
}

func TestSecrets(t *testing.T) {
	k := &Token{CA: []byte("a"), Client: []byte("b"), Servers: []byte("c")}
	want := map[string]map[string][]byte{
		"bitfusion-client-secret-ca.crt":       {"ca.crt": []byte("a")},
		"bitfusion-client-secret-client.yml":   {"client.yaml": []byte("b")},
		"bitfusion-client-secret-servers.conf": {"servers.conf": []byte("c")},
		"bitfusion-secret":                     {"ca.crt": []byte("a"), "client.yaml": []byte("b"), "servers.conf": []byte("c")},
	}
	if diff := cmp.Diff(want, k.Secrets()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if k.Set("other", nil) || !k.Set(pool.ServersKey, []byte("d")) || string(k.Servers) != "d" {
		t.Error("the names of the files are not those of the keys")
	}
}
