package certs

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/informers"
)

// Defaults of Config.
const (
	DefaultCertLifetime = 90 * 24 * time.Hour
	DefaultCALifetime   = 10 * 365 * 24 * time.Hour
	DefaultPropagation  = 15 * time.Second
)

// RotateAnnotation on the Secret asks for a change now: its value is "ca" or
// "cert", with any text after it. It is removed when the change has begun; one
// for a CA waits until a change of CA under way has ended.
const RotateAnnotation = "divvy.dev/rotate"

const requestTimeout = 10 * time.Second

// Config says what a Manager keeps, and where.
type Config struct {
	// Client gets, watches, updates and, where it is missing, creates the Secret;
	// it gets, watches and patches the configurations and the ConfigMap, and gets,
	// watches and updates the Secret of the client.
	Client kubernetes.Interface
	// Namespace and Secret name the Secret.
	Namespace, Secret string
	// DNSNames are the names that the certificate is for, the first also as its
	// common name.
	DNSNames []string
	// Mutating and Validating name the configurations in which caBundle of every
	// webhook is kept; "" for none. One that does not exist holds up nothing.
	Mutating, Validating string
	// ConfigMap names a ConfigMap of Namespace whose entry ca.crt is kept at the CAs
	// to trust, for clients other than the API server; "" for none.
	ConfigMap string
	// ClientSecret names a Secret of Namespace whose entries tls.crt and tls.key are
	// kept at a client certificate of the CA, with ClientName as its common name and
	// as long a life as the CA; "" for none. Neither this nor the ConfigMap is made
	// by the Manager: one that does not exist is an error that holds up nothing.
	ClientSecret, ClientName string
	// Overlap is how much longer than Propagation, at least, the next CA is known
	// before it is used, and the previous one stays trusted after. It is for clients
	// that take up the ConfigMap and the client certificate when they can; each
	// replica adds it to the time that the Secret notes. 0 where there are none.
	Overlap time.Duration
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
	config  Config
	policy  policy
	metrics *metrics
	queue   workqueue.TypedRateLimitingInterface[struct{}]
	// making bounds how often keys are made, should two replicas with clocks far
	// apart disagree on what is valid.
	making flowcontrol.RateLimiter
	// serving is what GetCertificate returns; nil before there is anything.
	serving atomic.Pointer[served]
	// accepted is what ClientCAs returns; nil before there is anything.
	accepted atomic.Pointer[x509.CertPool]
	// showing is what ClientCertificate returns; nil before there is anything.
	showing atomic.Pointer[tls.Certificate]

	// What follows belongs to the goroutine of Run.

	watches informers.Group
	// kept are the objects that hold the CAs, client the Secret of the client, nil for none.
	kept []*target
	// client is what ClientCertificate returns; nil before there is anything.
	client  *target
	started time.Time
	// steadyKey names the state that has been seen since steadySince.
	steadyKey   string
	steadySince time.Time
	// damage is what was last said about the Secret's content, so that it is said
	// once.
	damage string

	mu sync.Mutex // guards what follows
	// problem is why the last pass failed; nil when it did not.
	problem error
	// trusted says that all configurations held the CA of the certificate once.
	trusted bool
}

// New checks the configuration and fills in the defaults.
func New(c Config) (*Manager, error) {
	c.CertLifetime, c.CALifetime = cmp.Or(c.CertLifetime, DefaultCertLifetime), cmp.Or(c.CALifetime, DefaultCALifetime)
	c.Propagation = cmp.Or(c.Propagation, DefaultPropagation)
	if c.Now == nil {
		c.Now = time.Now
	}
	var errs []error
	if c.Client == nil {
		errs = append(errs, errors.New("certificates: no client of the API server"))
	}
	if c.Namespace == "" || c.Secret == "" {
		errs = append(errs, fmt.Errorf("certificates: want the Secret's namespace and name, got %q and %q", c.Namespace, c.Secret))
	}
	if len(c.DNSNames) == 0 {
		errs = append(errs, errors.New("certificates: want at least one DNS name"))
	}
	if c.CertLifetime < 0 || c.CertLifetime > c.CALifetime {
		errs = append(errs, fmt.Errorf("certificates: the lifetime %v of a certificate exceeds that of its CA, %v", c.CertLifetime,
			c.CALifetime))
	}
	if c.Propagation < 0 || 10*c.Propagation > c.CertLifetime {
		errs = append(errs, fmt.Errorf("certificates: %v for a change to be observed is more than a tenth of a certificate's "+
			"lifetime of %v", c.Propagation, c.CertLifetime))
	}
	if c.ClientSecret != "" && c.ClientName == "" {
		errs = append(errs, errors.New("certificates: the client certificate has no name"))
	}
	if c.Overlap < 0 || 10*c.Overlap > c.CALifetime {
		errs = append(errs, fmt.Errorf("certificates: %v for clients to follow is more than a tenth of a CA's lifetime of %v", c.Overlap,
			c.CALifetime))
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return &Manager{
		config: c,
		policy: policy{
			issuer:      issuer{dnsNames: c.DNSNames, clientName: c.ClientName, certLifetime: c.CertLifetime, caLifetime: c.CALifetime},
			propagation: c.Propagation,
			overlap:     c.Overlap,
		},
		metrics: newMetrics(),
		making:  flowcontrol.NewTokenBucketRateLimiter(0.2, 10),
		problem: errors.New("the Secret has not been read yet"),
	}, nil
}

// Run keeps the Secret and the configurations until ctx ends, and returns nil
// then. What fails meanwhile is logged, told by Ready and tried again. It is
// called once.
func (m *Manager) Run(ctx context.Context) error {
	m.queue = workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[struct{}](100*time.Millisecond,
		5*time.Second))
	m.started = m.config.Now()
	m.watch(func() { m.queue.Add(struct{}{}) })
	var parts sync.WaitGroup
	parts.Go(func() { m.watches.Run(ctx) })
	parts.Go(func() {
		<-ctx.Done()
		m.queue.ShutDown()
	})
	m.queue.Add(struct{}{})
	for {
		item, stop := m.queue.Get()
		if stop {
			break
		}
		m.pass(ctx)
		m.queue.Done(item)
	}
	parts.Wait()
	return nil
}

// pass does what is to be done now, and sees to the next time.
func (m *Manager) pass(ctx context.Context) {
	wait, err := m.reconcile(ctx)
	m.mu.Lock()
	m.problem = err
	m.mu.Unlock()
	switch {
	case ctx.Err() != nil:
	case errors.Is(err, informers.ErrNotRead):
		m.queue.AddAfter(struct{}{}, 50*time.Millisecond)
	case err != nil:
		if !isConflict(err) {
			m.metrics.failures.Inc()
			klog.FromContext(ctx).Error(err, "Could not reconcile the certificates; retrying")
		}
		m.queue.AddRateLimited(struct{}{})
	default:
		m.queue.Forget(struct{}{})
		// A watch that hangs tells nothing, so the Secret is read now and then.
		m.queue.AddAfter(struct{}{}, max(time.Millisecond, min(wait, m.config.Propagation/3)))
	}
}

// isConflict reports whether another replica was quicker.
func isConflict(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }

// state is the Secret and the configurations as they were read.
type state struct {
	secret         *corev1.Secret // nil when it does not exist
	content        content
	configurations []configuration
}

func (s state) bundled() bool {
	trusted := s.content.trusted()
	for _, c := range s.configurations {
		if !c.holds(trusted) {
			return false
		}
	}
	return true
}

// key names the state for steady; "" when the configurations do not hold what
// the Secret says.
func (s state) key() string {
	if s.secret == nil || !s.bundled() {
		return ""
	}
	var key strings.Builder
	for _, cert := range s.content.trusted() {
		fmt.Fprintf(&key, "%x ", cert.SerialNumber)
	}
	if s.content.leaf != nil {
		fmt.Fprintf(&key, "%x ", s.content.leaf.Leaf.SerialNumber)
	}
	for _, c := range s.configurations {
		fmt.Fprintf(&key, "%s=%s ", c.name, c.version)
	}
	return key.String()
}

// reconcile compares, decides and takes one step. It returns how long nothing
// more is to be done.
func (m *Manager) reconcile(ctx context.Context) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*requestTimeout)
	defer cancel()
	now := m.config.Now()

	secret, err := m.getSecret(ctx)
	if err != nil {
		return 0, err
	}
	if err := m.watches.Synced(); err != nil {
		m.follow(ctx, m.read(ctx, secret), now)
		return 0, err
	}
	st := state{secret: secret, content: m.read(ctx, secret)}
	if st.configurations, err = configurations(m.kept, func(t *target) (any, error) { return t.cached(), nil }); err != nil {
		return 0, err
	}
	m.follow(ctx, st.content, now)
	m.note(st, now)
	next, wait, err := m.decide(st, now)
	if err != nil {
		return 0, err
	}
	if next == nil && st.bundled() {
		return wait, m.publish(ctx, st, now)
	}

	// Something is to be written: look again at what really is. The Secret comes
	// last, so what a configuration holds is never newer than what the Secret
	// says, and a replica that is behind cannot take a CA away again: the
	// configuration would have changed, and the patch fails.
	if st.configurations, err = m.getConfigurations(ctx); err != nil {
		return 0, err
	}
	if st.secret, err = m.getSecret(ctx); err != nil {
		return 0, err
	}
	st.content = m.read(ctx, st.secret)
	m.follow(ctx, st.content, now)
	if next, wait, err = m.decide(st, now); err != nil {
		return 0, err
	}
	if next != nil {
		return m.take(ctx, st, *next, now)
	}
	return wait, m.distribute(ctx, st)
}

// note remembers since when things are as they are.
func (m *Manager) note(st state, now time.Time) {
	if key := st.key(); key != m.steadyKey {
		m.steadyKey, m.steadySince = key, now
	}
	if m.steadyKey != "" {
		m.mu.Lock()
		m.trusted = true
		m.mu.Unlock()
	}
}

// steady is for how long things have been as st says, as far as is known.
func (m *Manager) steady(st state, now time.Time) time.Duration {
	if key := st.key(); key != "" && key == m.steadyKey {
		return now.Sub(m.steadySince)
	}
	return 0
}

func (m *Manager) decide(st state, now time.Time) (*step, time.Duration, error) {
	s := situation{now: now, secret: st.content, remembered: m.serving.Load(), steady: m.steady(st, now)}
	for _, c := range st.configurations {
		s.inBundles = append(s.inBundles, c.certs()...)
	}
	if st.secret != nil {
		request := st.secret.Annotations[RotateAnnotation]
		s.rotateCert = strings.HasPrefix(request, "cert")
		s.rotateCA = strings.HasPrefix(request, "ca")
	}
	next, wait, err := m.policy.decide(s)
	if next != nil && next.abrupt && s.remembered == nil && len(s.inBundles) > 0 {
		// Somebody was trusted before. Another replica may still have what the
		// Secret lost, and can replace it without a break.
		if early := m.policy.propagation/3 - now.Sub(m.started); early > 0 {
			return nil, early, nil
		}
	}
	return next, wait, err
}

// take writes a step into the Secret.
func (m *Manager) take(ctx context.Context, st state, next step, now time.Time) (time.Duration, error) {
	if !m.making.TryAccept() {
		return 5 * time.Second, nil
	}
	secret := st.secret
	create := secret == nil
	if create {
		secret = &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: m.config.Namespace, Name: m.config.Secret},
			Type: corev1.SecretTypeOpaque}
	} else {
		secret = secret.DeepCopy()
	}
	replaced := len(secret.Data[certKey]) > 0
	var err error
	if secret.Data, err = next.content.encode(secret.Data); err != nil {
		return 0, err
	}
	if request := secret.Annotations[RotateAnnotation]; next.doneCert && strings.HasPrefix(request, "cert") || next.doneCA &&
		strings.HasPrefix(request, "ca") {
		delete(secret.Annotations, RotateAnnotation)
	}
	secrets := m.config.Client.CoreV1().Secrets(m.config.Namespace)
	if create {
		_, err = secrets.Create(ctx, secret, metav1.CreateOptions{})
	} else {
		_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{})
	}
	if err != nil {
		return 0, fmt.Errorf("write Secret %s/%s: %w", m.config.Namespace, m.config.Secret, err)
	}
	klog.FromContext(ctx).Info("Changed the certificates of the webhooks", "why", next.why,
		"ca", next.content.ca.cert.Subject.CommonName, "changingCA", next.content.next != nil || next.content.previous != nil,
		"expires", next.content.leaf.Leaf.NotAfter)
	if replaced && !sameLeaf(st.content.leaf, next.content.leaf) {
		m.metrics.rotations.WithLabelValues(kindCertificate).Inc()
	}
	if replaced && (st.content.ca == nil || !st.content.ca.cert.Equal(next.content.ca.cert)) {
		m.metrics.rotations.WithLabelValues(kindCA).Inc()
	}
	m.follow(ctx, next.content, now)
	return 0, nil
}

// publish keeps the client certificate, and says what lacks for it and the CAs to
// be published. The Secret has a CA, and the configurations hold it.
func (m *Manager) publish(ctx context.Context, st state, now time.Time) error {
	var errs []error
	for _, t := range append(slices.Clone(m.kept), m.client) {
		if t != nil && t.namespace != "" && t.cached() == nil {
			errs = append(errs, fmt.Errorf("%s does not exist; it is created by the chart, not by this program", t))
		}
	}
	if m.client != nil {
		if secret, ok := m.client.cached().(*corev1.Secret); ok {
			errs = append(errs, m.publishClient(ctx, st, secret, now))
		}
	}
	return errors.Join(errs...)
}

// publishClient writes a client certificate into the Secret as it was last seen,
// where that holds none that is good. Somebody else may have been quicker: then
// this fails, and is tried again.
func (m *Manager) publishClient(ctx context.Context, st state, secret *corev1.Secret, now time.Time) error {
	present, err := parsePair(secret.Data[certKey], secret.Data[certKeyKey])
	if err != nil {
		klog.FromContext(ctx).Error(err, "The client certificate is invalid", "namespace", secret.Namespace, "secret", secret.Name)
	}
	next, err := m.policy.client(st.content, present, now, m.steady(st, now))
	if present != nil {
		m.showing.Store(present) // also while it is about to be replaced
	}
	if next == nil || err != nil || !m.making.TryAccept() {
		return err
	}
	key, err := encodeKey(next.PrivateKey)
	if err != nil {
		return err
	}
	secret = secret.DeepCopy()
	if secret.Data == nil {
		secret.Data = map[string][]byte{}
	}
	secret.Data[certKey], secret.Data[certKeyKey] = encodeCerts(next.Leaf), key
	if _, err := m.config.Client.CoreV1().Secrets(secret.Namespace).Update(ctx, secret, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("write Secret %s/%s: %w", secret.Namespace, secret.Name, err)
	}
	m.showing.Store(next)
	klog.FromContext(ctx).Info("Created a client certificate", "name", m.config.ClientName, "secret", klog.KObj(secret),
		"expires", next.Leaf.NotAfter)
	return nil
}

// follow serves what the Secret holds, if clients can trust it, and accepts
// clients of its CAs.
func (m *Manager) follow(ctx context.Context, c content, now time.Time) {
	defer m.accept(c)
	if c.leaf == nil {
		return
	}
	old := m.serving.Load()
	for _, a := range []*authority{c.ca, c.previous} {
		if a == nil || !m.policy.signed(a.cert, c.leaf, now) {
			continue
		}
		if old == nil || !sameLeaf(old.leaf, c.leaf) {
			klog.FromContext(ctx).Info("Serving a certificate", "serial", c.leaf.Leaf.SerialNumber.Text(16),
				"ca", a.cert.Subject.CommonName, "expires", c.leaf.Leaf.NotAfter)
		}
		m.serving.Store(&served{leaf: c.leaf, ca: a.cert})
		m.metrics.expiry.WithLabelValues(kindCertificate).Set(float64(c.leaf.Leaf.NotAfter.Unix()))
		m.metrics.expiry.WithLabelValues(kindCA).Set(float64(a.cert.NotAfter.Unix()))
		return
	}
}

// accept accepts clients of the CAs in the Secret, and of that of the certificate
// that is served: a Secret that lost something is about to be mended.
func (m *Manager) accept(c content) {
	cas := c.trusted()
	if s := m.serving.Load(); s != nil {
		cas = append(cas, s.ca)
	}
	if len(cas) == 0 {
		return
	}
	pool := x509.NewCertPool()
	for _, ca := range cas {
		pool.AddCert(ca)
	}
	m.accepted.Store(pool)
}

// read parses the Secret and says once what is wrong with it.
func (m *Manager) read(ctx context.Context, secret *corev1.Secret) content {
	if secret == nil {
		return content{}
	}
	c, err := parse(secret.Data)
	damage := ""
	if err != nil {
		damage = err.Error()
	}
	if request := secret.Annotations[RotateAnnotation]; request != "" && !strings.HasPrefix(request, "ca") &&
		!strings.HasPrefix(request, "cert") {
		err = errors.Join(err, fmt.Errorf("annotation %s is %q, want ca or cert", RotateAnnotation, request))
		damage = err.Error()
	}
	if damage != m.damage {
		m.damage = damage
		if err != nil {
			klog.FromContext(ctx).Error(err, "The Secret contains invalid data", "namespace", secret.Namespace, "secret", secret.Name)
		}
	}
	return c
}

// getSecret reads the Secret from the API server; nil when it does not exist.
func (m *Manager) getSecret(ctx context.Context) (*corev1.Secret, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	secret, err := m.config.Client.CoreV1().Secrets(m.config.Namespace).Get(ctx, m.config.Secret, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil //nolint:nilnil // documented
	}
	if err != nil {
		return nil, fmt.Errorf("read Secret %s/%s: %w", m.config.Namespace, m.config.Secret, err)
	}
	return secret, nil
}

// GetCertificate returns the certificate to serve now; it is for tls.Config. It
// fails before there is one.
func (m *Manager) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if s := m.serving.Load(); s != nil {
		return s.leaf, nil
	}
	return nil, fmt.Errorf("no certificate yet: %w", m.trouble())
}

// ClientCAs returns the CAs whose client certificates are accepted now; it is for
// tls.Config. None before the Secret was read.
func (m *Manager) ClientCAs() *x509.CertPool {
	if pool := m.accepted.Load(); pool != nil {
		return pool
	}
	return x509.NewCertPool()
}

// ClientCertificate returns the client certificate that is published, for programs
// that reach another replica with it. It fails before there is one.
func (m *Manager) ClientCertificate() (*tls.Certificate, error) {
	if c := m.showing.Load(); c != nil {
		return c, nil
	}
	return nil, fmt.Errorf("no client certificate yet: %w", m.trouble())
}

// Ready returns nil when there is a certificate that is valid now, and the
// configurations have held its CA at least once.
func (m *Manager) Ready() error {
	s := m.serving.Load()
	if s == nil {
		return fmt.Errorf("no certificate yet: %w", m.trouble())
	}
	if !validAt(s.leaf.Leaf, m.config.Now()) {
		return fmt.Errorf("the certificate expired at %v and cannot be renewed: %w", s.leaf.Leaf.NotAfter, m.trouble())
	}
	m.mu.Lock()
	trusted := m.trusted
	m.mu.Unlock()
	if !trusted {
		return fmt.Errorf("the webhook configurations do not contain the CA yet: %w", m.trouble())
	}
	return nil
}

func (m *Manager) trouble() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.problem == nil {
		return errors.New("in progress")
	}
	return m.problem
}

// Register adds the manager's metrics to a registry.
func (m *Manager) Register(r prometheus.Registerer) error { return m.metrics.register(r) }
