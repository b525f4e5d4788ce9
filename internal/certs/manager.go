package certs

import (
	"context"
	"crypto/tls"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"
)

// Defaults of Config.
const (
	DefaultCertLifetime = 90 * 24 * time.Hour
	DefaultCALifetime   = 10 * 365 * 24 * time.Hour
	DefaultPropagation  = 15 * time.Second
)

// RotateAnnotation on the Secret asks for a change now: its value is "ca" or
// "cert", with any text after it. It is removed when the change has begun.
const RotateAnnotation = "divvy.dev/rotate"

// Config says what a Manager keeps, and where.
type Config struct {
	// Client reads, watches, updates and, where it is missing, creates the Secret;
	// it reads, watches and patches the configurations.
	Client kubernetes.Interface
	// Namespace and Secret name the Secret.
	Namespace, Secret string
	// DNSNames are the names that the certificate is for, the first also as its
	// common name.
	DNSNames []string
	// Mutating and Validating name the configurations whose caBundle is kept; ""
	// for none.
	Mutating, Validating string
	// CertLifetime and CALifetime are how long certificates and CAs are valid;
	// each is replaced after two thirds of it. 0 for the defaults.
	CertLifetime, CALifetime time.Duration
	// Propagation is how long API servers and other replicas may take to see a
	// change; 0 for DefaultPropagation.
	Propagation time.Duration
	// Now tells the time; nil for time.Now.
	Now func() time.Time
}

// Manager keeps the certificate. Its methods may be called by many goroutines.
type Manager struct {
	config Config
}

// New checks the configuration and fills in the defaults.
func New(c Config) (*Manager, error) { return &Manager{config: c}, nil }

// Run keeps the Secret and the configurations until ctx ends, and returns nil
// then. What fails meanwhile is logged, told by Ready and tried again.
func (m *Manager) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// GetCertificate returns the certificate to serve now; it is for tls.Config. It
// fails before there is one.
func (m *Manager) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return nil, errors.New("no certificate yet")
}

// Ready returns nil when there is a certificate that is valid now, and the
// configurations held its CA at least once.
func (m *Manager) Ready() error { return errors.New("no certificate yet") }

// Register adds the manager's metrics to a registry.
func (m *Manager) Register(prometheus.Registerer) error { return nil }
