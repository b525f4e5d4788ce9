package serve

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"testing"
	"time"
)

// What a certificate proved is not asked again while it is that one, by the same CAs,
// and valid.
func TestProof(t *testing.T) {
	leaf, roots := clientCertificate(t)
	now := time.Now()
	p := prove(leaf, roots, now)
	if p.err != nil || !p.holds(leaf, roots, now) || !p.holds(leaf, roots, leaf.NotAfter.Add(-time.Second)) {
		t.Errorf("the certificate proves nothing: %+v", p)
	}
	again := *leaf
	again.Raw = append(bytes.Clone(leaf.Raw), 0)
	for name, holds := range map[string]bool{
		"another certificate":               p.holds(&again, roots, now),
		"other CAs":                         p.holds(leaf, x509.NewCertPool(), now),
		"its end":                           p.holds(leaf, roots, leaf.NotAfter.Add(time.Second)),
		"a certificate that proved nothing": prove(leaf, x509.NewCertPool(), now).holds(leaf, roots, now),
		"one that has expired":              prove(leaf, roots, leaf.NotAfter.Add(time.Second)).holds(leaf, roots, now),
	} {
		if holds {
			t.Errorf("%s: the proof holds", name)
		}
	}
}

// clientCertificate returns the certificate of a client, and its CA.
func clientCertificate(t *testing.T) (*x509.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(template, by *x509.Certificate) *x509.Certificate {
		template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(1), time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, template, by, &key.PublicKey, key)
		if err != nil {
			t.Fatal(err)
		}
		c, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	template := &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	ca := issue(template, template)
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	return issue(&x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, ca), roots
}
