// Package pki makes the keys and certificates of a cluster, under the names
// that kubeadm gives them.
package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// Lifetime is how long a certificate is valid. A lab lives for hours; ten
// years spares everybody a renewal.
const Lifetime = 10 * 365 * 24 * time.Hour

// Authority is a certificate with its key; a self-signed one can sign others.
type Authority struct {
	Certificate *x509.Certificate
	Key         *ecdsa.PrivateKey
}

// Profile says what a certificate is for.
type Profile struct {
	// CommonName and Organizations are the user and groups of a client.
	CommonName    string
	Organizations []string
	// Names are DNS names and IP addresses that a server answers to.
	Names []string
	// Server and Client say which uses the certificate allows.
	Server, Client bool
}

// NewAuthority makes a self-signed certificate that signs others.
func NewAuthority(commonName string) (*Authority, error) {
	return issue(Profile{CommonName: commonName}, nil)
}

// Issue signs a certificate with a new key.
func (a *Authority) Issue(p Profile) (*Authority, error) { return issue(p, a) }

func issue(p Profile, parent *Authority) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key for %s: %w", p.CommonName, err)
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, fmt.Errorf("make a serial number for %s: %w", p.CommonName, err)
	}
	keyID, err := keyIdentifier(key.Public())
	if err != nil {
		return nil, fmt.Errorf("identify the key of %s: %w", p.CommonName, err)
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: p.CommonName, Organization: p.Organizations},
		// A little in the past: clocks of machines that were suspended jump.
		NotBefore:             now.Add(-time.Hour),
		NotAfter:              now.Add(Lifetime),
		SubjectKeyId:          keyID,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
	}
	if p.Server {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	if p.Client {
		template.ExtKeyUsage = append(template.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	}
	for _, name := range p.Names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	signer, signerKey := template, key
	if parent == nil {
		template.IsCA = true
		template.KeyUsage |= x509.KeyUsageCertSign
	} else {
		signer, signerKey = parent.Certificate, parent.Key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, signer, key.Public(), signerKey)
	if err != nil {
		return nil, fmt.Errorf("sign the certificate of %s: %w", p.CommonName, err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read the certificate of %s back: %w", p.CommonName, err)
	}
	return &Authority{Certificate: certificate, Key: key}, nil
}

func keyIdentifier(key crypto.PublicKey) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(key)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(der)
	return sum[:20], nil
}

// CertificatePEM returns the certificate as a PEM block.
func (a *Authority) CertificatePEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate.Raw})
}

// KeyPEM returns the private key as a PEM block.
func (a *Authority) KeyPEM() ([]byte, error) {
	der, err := x509.MarshalECPrivateKey(a.Key)
	if err != nil {
		return nil, fmt.Errorf("encode a key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}), nil
}

// PublicKeyPEM returns the public key as a PEM block.
func (a *Authority) PublicKeyPEM() ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(a.Key.Public())
	if err != nil {
		return nil, fmt.Errorf("encode a public key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), nil
}

// Fingerprint returns the first characters of the certificate's SHA-256.
func (a *Authority) Fingerprint() string {
	sum := sha256.Sum256(a.Certificate.Raw)
	return hex.EncodeToString(sum[:8])
}

// Store is a folder of certificates. What exists in it is kept, so that a
// cluster that comes up again is the same one.
type Store struct {
	// Dir is the folder; names given to methods are relative to it and carry
	// no extension: NAME.crt is the certificate, NAME.key its key.
	Dir string
}

// Authority returns the authority stored under name and makes it when missing.
func (s Store) Authority(name, commonName string) (*Authority, error) {
	return s.ensure(name, func() (*Authority, error) { return NewAuthority(commonName) }, nil)
}

// Certificate returns the certificate stored under name when it fits the
// profile and was signed by the authority, and makes it otherwise.
func (s Store) Certificate(name string, by *Authority, p Profile) (*Authority, error) {
	fits := func(a *Authority) bool {
		c := a.Certificate
		if c.CheckSignatureFrom(by.Certificate) != nil || c.Subject.CommonName != p.CommonName {
			return false
		}
		for _, n := range p.Names {
			if c.VerifyHostname(n) != nil {
				return false
			}
		}
		return true
	}
	return s.ensure(name, func() (*Authority, error) { return by.Issue(p) }, fits)
}

// KeyPair makes NAME.key and NAME.pub when they are missing: the pair that
// signs service account tokens.
func (s Store) KeyPair(name string) error {
	pub := filepath.Join(s.Dir, name+".pub")
	if _, err := os.Stat(pub); err == nil {
		return nil
	}
	pair, err := NewAuthority(name)
	if err != nil {
		return err
	}
	private, err := pair.KeyPEM()
	if err != nil {
		return err
	}
	public, err := pair.PublicKeyPEM()
	if err != nil {
		return err
	}
	if err := write(filepath.Join(s.Dir, name+".key"), private, 0o600); err != nil {
		return err
	}
	return write(pub, public, 0o644)
}

func (s Store) ensure(name string, create func() (*Authority, error), fits func(*Authority) bool) (*Authority, error) {
	a, err := s.load(name)
	switch {
	case err == nil && (fits == nil || fits(a)) && time.Now().Before(a.Certificate.NotAfter):
		return a, nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	if a, err = create(); err != nil {
		return nil, err
	}
	key, err := a.KeyPEM()
	if err != nil {
		return nil, err
	}
	// The certificate last: it is what says that the pair is complete.
	if err := write(filepath.Join(s.Dir, name+".key"), key, 0o600); err != nil {
		return nil, err
	}
	if err := write(filepath.Join(s.Dir, name+".crt"), a.CertificatePEM(), 0o644); err != nil {
		return nil, err
	}
	return a, nil
}

func (s Store) load(name string) (*Authority, error) {
	path := filepath.Join(s.Dir, name)
	certificateDER, err := readPEM(path + ".crt")
	if err != nil {
		return nil, err
	}
	keyDER, err := readPEM(path + ".key")
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(certificateDER)
	if err != nil {
		return nil, fmt.Errorf("%s.crt: %w", path, err)
	}
	key, err := x509.ParseECPrivateKey(keyDER)
	if err != nil {
		return nil, fmt.Errorf("%s.key: %w", path, err)
	}
	return &Authority{Certificate: certificate, Key: key}, nil
}

func readPEM(path string) ([]byte, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return nil, fmt.Errorf("%s holds no PEM block", path)
	}
	return block.Bytes, nil
}

func write(path string, data []byte, mode fs.FileMode) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("make the folder of %s: %w", path, err)
	}
	temporary := path + ".tmp"
	if err := os.WriteFile(temporary, data, mode); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(temporary, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
