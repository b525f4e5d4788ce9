package certs

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"time"
)

// maxBackdate is how far back the validity of what is made begins, for clients
// whose clocks are behind.
const maxBackdate = time.Hour

type issuer struct {
	dnsNames []string
	// clientName is the common name of client certificates; "" for none.
	clientName               string
	certLifetime, caLifetime time.Duration
}

func backdated(now time.Time, life time.Duration) time.Time {
	return now.Add(-min(maxBackdate, life/20))
}

func (i issuer) newAuthority(now time.Time) (*authority, error) {
	// The name tells people one CA from another; keys tell programs.
	cert, key, err := sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: "divvy webhook CA " + now.UTC().Format(time.RFC3339)},
		NotBefore:             backdated(now, i.caLifetime),
		NotAfter:              now.Add(i.caLifetime),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}, nil)
	if err != nil {
		return nil, fmt.Errorf("create CA: %w", err)
	}
	return &authority{cert: cert, key: key}, nil
}

func (i issuer) newLeaf(ca *authority, now time.Time) (*tls.Certificate, error) {
	end := now.Add(i.certLifetime)
	if end.After(ca.cert.NotAfter) {
		end = ca.cert.NotAfter
	}
	cert, key, err := sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: i.dnsNames[0]},
		DNSNames:              i.dnsNames,
		NotBefore:             backdated(now, end.Sub(now)),
		NotAfter:              end,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}, ca)
	if err != nil {
		return nil, fmt.Errorf("create certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}, nil
}

// newClient makes a client certificate, which is valid as long as its CA:
// whoever gets it may have to be restarted to take up another.
func (i issuer) newClient(ca *authority, now time.Time) (*tls.Certificate, error) {
	cert, key, err := sign(&x509.Certificate{
		Subject:               pkix.Name{CommonName: i.clientName},
		NotBefore:             backdated(now, ca.cert.NotAfter.Sub(now)),
		NotAfter:              ca.cert.NotAfter,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true,
	}, ca)
	if err != nil {
		return nil, fmt.Errorf("create client certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}, nil
}

// sign completes a certificate with a key of its own; parent is nil for one that
// signs itself.
func sign(template *x509.Certificate, parent *authority) (*x509.Certificate, crypto.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	if template.SerialNumber, err = rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)); err != nil {
		return nil, nil, err
	}
	signer, signerKey := template, crypto.PrivateKey(key)
	if parent != nil {
		signer, signerKey = parent.cert, parent.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, signer, key.Public(), signerKey)
	if err != nil {
		return nil, nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return cert, key, err
}

// validAt reports whether a certificate is neither expired nor not valid yet.
func validAt(cert *x509.Certificate, now time.Time) bool {
	return !now.Before(cert.NotBefore) && now.Before(cert.NotAfter)
}

// renewAt is when two thirds of a certificate's life are over.
func renewAt(cert *x509.Certificate) time.Time {
	return cert.NotBefore.Add(cert.NotAfter.Sub(cert.NotBefore) / 3 * 2)
}

// signed reports whether ca signed a leaf such that a client at now accepts it
// for every name.
func (i issuer) signed(ca *x509.Certificate, leaf *tls.Certificate, now time.Time) bool {
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	for _, name := range i.dnsNames {
		if _, err := leaf.Leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: roots, CurrentTime: now}); err != nil {
			return false
		}
	}
	return true
}

// signedClient reports whether ca signed a client certificate such that a server
// at now accepts it.
func (i issuer) signedClient(ca *x509.Certificate, client *tls.Certificate, now time.Time) bool {
	if client == nil || client.Leaf.Subject.CommonName != i.clientName {
		return false
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	_, err := client.Leaf.Verify(x509.VerifyOptions{
		Roots: roots, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	return err == nil
}
