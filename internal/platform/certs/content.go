package certs

import (
	"bytes"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Keys of the Secret's data. The next and the previous CA are there only while
// the CA changes, and so is since.
const (
	caCertKey       = "ca.crt"
	caKeyKey        = "ca.key"
	certKey         = "tls.crt"
	certKeyKey      = "tls.key"
	nextCertKey     = "next-ca.crt"
	nextKeyKey      = "next-ca.key"
	previousCertKey = "previous-ca.crt"
	sinceKey        = "changing-since"
)

var ownKeys = []string{caCertKey, caKeyKey, certKey, certKeyKey, nextCertKey, nextKeyKey, previousCertKey, sinceKey}

// authority is a CA. Its key is nil when nobody has it, or when it signs no more.
type authority struct {
	cert *x509.Certificate
	key  crypto.PrivateKey
}

func (a *authority) same(b *authority) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.cert.Equal(b.cert) && (a.key == nil) == (b.key == nil)
}

// content is what the Secret holds, as far as it can be used.
type content struct {
	ca, next, previous *authority
	leaf               *tls.Certificate
	// since is when the change of CA came to where it is; zero when none is under
	// way, or nobody needs to know.
	since time.Time
	// broken says that there is something else, which cannot be read.
	broken bool
}

// same reports whether both say the same, but for keys that differ although
// their certificates do not.
func (c content) same(d content) bool {
	return c.ca.same(d.ca) && c.next.same(d.next) && c.previous.same(d.previous) && sameLeaf(c.leaf, d.leaf) &&
		c.since.Equal(d.since) && c.broken == d.broken
}

func sameLeaf(a, b *tls.Certificate) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Leaf.Equal(b.Leaf)
}

// trusted are the CAs that configurations must hold.
func (c content) trusted() []*x509.Certificate {
	var certs []*x509.Certificate
	for _, a := range []*authority{c.ca, c.next, c.previous} {
		if a != nil && !slices.ContainsFunc(certs, a.cert.Equal) {
			certs = append(certs, a.cert)
		}
	}
	return certs
}

// parse reads the data of the Secret. What cannot be read is left out; the error
// says what that is and never holds any of it.
func parse(data map[string][]byte) (content, error) {
	var c content
	var errs []error
	read := func(key string, err error) {
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", key, err))
		}
	}
	var err error
	c.ca, err = parseAuthority(data[caCertKey], data[caKeyKey])
	read(caCertKey, err)
	c.next, err = parseAuthority(data[nextCertKey], data[nextKeyKey])
	read(nextCertKey, err)
	c.previous, err = parseAuthority(data[previousCertKey], nil)
	read(previousCertKey, err)
	c.leaf, err = parsePair(data[certKey], data[certKeyKey])
	read(certKey, err)
	if text := data[sinceKey]; len(text) > 0 {
		// The parser's error would hold what it read.
		if c.since, err = time.Parse(time.RFC3339, string(text)); err != nil {
			read(sinceKey, errors.New("want a time such as 2026-01-02T15:04:05Z"))
		}
	}
	c.broken = len(errs) > 0
	return c, errors.Join(errs...)
}

// parsePair reads a certificate and its key, nil when both are empty.
func parsePair(certPEM, keyPEM []byte) (*tls.Certificate, error) {
	if len(certPEM) == 0 && len(keyPEM) == 0 {
		return nil, nil //nolint:nilnil // nothing there is nothing wrong
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		// The parsers' errors name kinds of blocks and keys, not their content.
		return nil, fmt.Errorf("want a certificate and its key in PEM: %w", err)
	}
	return &pair, nil
}

// parseAuthority reads a CA, nil when there is none. One whose key cannot be
// used is returned without it, and with an error.
func parseAuthority(certPEM, keyPEM []byte) (*authority, error) {
	if len(certPEM) == 0 {
		return nil, nil //nolint:nilnil // as parsePair
	}
	certs, err := parseBundle(certPEM)
	if err != nil {
		return nil, err
	}
	a := &authority{cert: certs[0]}
	if !a.cert.IsCA {
		return nil, errors.New("the certificate is not that of a CA")
	}
	if len(keyPEM) == 0 {
		return a, nil
	}
	pair, err := parsePair(certPEM, keyPEM)
	if err != nil {
		return a, err
	}
	a.key = pair.PrivateKey
	return a, nil
}

// parseBundle reads certificates in PEM; it fails when there is none or any part
// cannot be read.
func parseBundle(bundle []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	for rest := bytes.TrimSpace(bundle); len(rest) > 0; rest = bytes.TrimSpace(rest) {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil || block.Type != "CERTIFICATE" {
			return certs, errors.New("want certificates in PEM")
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return certs, err
		}
		certs = append(certs, cert)
	}
	if len(certs) == 0 {
		return nil, errors.New("no certificate in it")
	}
	return certs, nil
}

// encode returns data with this content in it. Keys that are not ours stay.
func (c content) encode(data map[string][]byte) (map[string][]byte, error) {
	out := maps.Clone(data)
	if out == nil {
		out = map[string][]byte{}
	}
	for _, key := range ownKeys {
		delete(out, key)
	}
	put := func(certName, keyName string, cert *x509.Certificate, key crypto.PrivateKey) error {
		out[certName] = encodeCerts(cert)
		if key == nil {
			return nil
		}
		var err error
		out[keyName], err = encodeKey(key)
		return err
	}
	var errs []error
	if c.ca != nil {
		errs = append(errs, put(caCertKey, caKeyKey, c.ca.cert, c.ca.key))
	}
	if c.next != nil {
		errs = append(errs, put(nextCertKey, nextKeyKey, c.next.cert, c.next.key))
	}
	if c.previous != nil {
		errs = append(errs, put(previousCertKey, "", c.previous.cert, nil))
	}
	if c.leaf != nil {
		errs = append(errs, put(certKey, certKeyKey, c.leaf.Leaf, c.leaf.PrivateKey))
	}
	if !c.since.IsZero() {
		out[sinceKey] = []byte(c.since.UTC().Format(time.RFC3339))
	}
	return out, errors.Join(errs...)
}

func encodeKey(key crypto.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func encodeCerts(certs ...*x509.Certificate) []byte {
	var out []byte
	for _, cert := range certs {
		out = append(out, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})...)
	}
	return out
}

// holds reports whether a caBundle says the same as certs, in any order.
func holds(bundle []byte, certs []*x509.Certificate) bool {
	got, err := parseBundle(bundle)
	if err != nil || len(got) != len(certs) {
		return false
	}
	for _, cert := range certs {
		if !slices.ContainsFunc(got, cert.Equal) {
			return false
		}
	}
	return true
}
