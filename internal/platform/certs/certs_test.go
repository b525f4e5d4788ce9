package certs

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

const (
	namespace  = "bwki"
	secretName = "bwki-webhook-certs"
	serverName = "bwki-webhook-svc.bwki.svc"
	mutName    = "bwki-webhook-cfg"
	valName    = "validation.bitfusion.io-cfg"
)

func TestMain(m *testing.M) {
	// The handler after the one that logs slows errors down by the time since the
	// last one, which began outside of any test's own clock.
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1] //nolint:reassign // it is there to be set
	os.Exit(m.Run())
}

// world is an API server, and what its configurations held at any time.
type world struct {
	t      testing.TB
	server *kubetest.Server
	admin  kubernetes.Interface

	mu      sync.Mutex
	bundles map[string][]bundleAt // by configuration
}

type bundleAt struct {
	at     time.Time
	bundle []byte
}

func newWorld(t testing.TB, secret *corev1.Secret) *world {
	t.Helper()
	objects := []runtime.Object{
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: mutName}, Webhooks: []admissionv1.MutatingWebhook{
			{Name: "a.bitfusion.io", MatchConditions: []admissionv1.MatchCondition{{Name: "pool", Expression: "true"}}},
			{Name: "b.bitfusion.io"}}},
		&admissionv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: valName}, Webhooks: []admissionv1.ValidatingWebhook{
			{Name: "bwkival.bitfusion.io"}}},
	}
	if secret != nil {
		objects = append(objects, secret)
	}
	server, err := kubetest.New(objects...)
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, server: server, admin: server.Client(nil), bundles: map[string][]bundleAt{}}
	server.OnWrite(func(_ string, obj runtime.Object) {
		w.mu.Lock()
		defer w.mu.Unlock()
		switch c := obj.(type) {
		case *admissionv1.MutatingWebhookConfiguration:
			w.bundles[c.Name] = append(w.bundles[c.Name], bundleAt{time.Now(), c.Webhooks[0].ClientConfig.CABundle})
		case *admissionv1.ValidatingWebhookConfiguration:
			w.bundles[c.Name] = append(w.bundles[c.Name], bundleAt{time.Now(), c.Webhooks[0].ClientConfig.CABundle})
		}
	})
	return w
}

func emptySecret() *corev1.Secret {
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: secretName}}
}

// trusted is what an API server that is behind by lag trusts.
func (w *world) trusted(name string, lag time.Duration) []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	var bundle []byte
	for _, b := range w.bundles[name] {
		if !b.at.After(time.Now().Add(-lag)) {
			bundle = b.bundle
		}
	}
	return bundle
}

func (w *world) config(client kubernetes.Interface) Config {
	return Config{
		Client: client, Namespace: namespace, Secret: secretName, Mutating: mutName, Validating: valName,
		DNSNames: []string{serverName, "bwki-webhook-svc.bwki"},
	}
}

// replica starts a Manager; change, when not nil, may change its configuration.
func (w *world) replica(client kubernetes.Interface, change func(*Config)) *Manager {
	w.t.Helper()
	m, _ := w.stoppable(client, change)
	return m
}

// stoppable starts a Manager that stop ends.
func (w *world) stoppable(client kubernetes.Interface, change func(*Config)) (m *Manager, stop func()) {
	w.t.Helper()
	c := w.config(client)
	if change != nil {
		change(&c)
	}
	m, err := New(c)
	if err != nil {
		w.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("Run: %v", err)
		}
	})
	w.t.Cleanup(stop)
	return m, stop
}

func (w *world) secret() *corev1.Secret {
	w.t.Helper()
	secret, err := w.admin.CoreV1().Secrets(namespace).Get(w.t.Context(), secretName, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return secret
}

func (w *world) content() content {
	w.t.Helper()
	c, err := parse(w.secret().Data)
	if err != nil {
		w.t.Fatal(err)
	}
	return c
}

// edit changes the Secret as an administrator does.
func (w *world) edit(change func(*corev1.Secret)) {
	w.t.Helper()
	secret := w.secret()
	secret.ResourceVersion = ""
	change(secret)
	if _, err := w.admin.CoreV1().Secrets(namespace).Update(w.t.Context(), secret, metav1.UpdateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) rotate(what string) {
	w.t.Helper()
	w.edit(func(s *corev1.Secret) { s.Annotations = map[string]string{RotateAnnotation: what} })
}

// setBundle changes caBundle as somebody who should not.
func (w *world) setBundle(bundle string) {
	w.t.Helper()
	value := "null"
	if bundle != "" {
		value = `"` + bundle + `"`
	}
	patch := fmt.Sprintf(`{"webhooks":[{"name":"a.bitfusion.io","clientConfig":{"caBundle":%s}}]}`, value)
	if _, err := w.admin.AdmissionregistrationV1().MutatingWebhookConfigurations().Patch(w.t.Context(), mutName,
		types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// handshake connects as an API server does whose configuration named name is
// behind by lag.
func (w *world) handshake(m *Manager, name string, lag time.Duration) error {
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(w.trusted(name, lag))
	near, far := net.Pipe()
	defer near.Close() //nolint:errcheck // a pipe
	defer far.Close()  //nolint:errcheck // a pipe
	go tls.Server(far, &tls.Config{GetCertificate: m.GetCertificate,
		MinVersion: tls.VersionTLS12}).Handshake() //nolint:errcheck // the client tells
	return tls.Client(near, &tls.Config{RootCAs: roots, ServerName: serverName, MinVersion: tls.VersionTLS12}).Handshake()
}

// load connects to all replicas, by both configurations and with several lags,
// until stop is called, which returns how many handshakes there were.
func (w *world) load(replicas ...*Manager) (stop func() int) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	count := 0
	wg.Go(func() {
		for {
			for i, m := range replicas {
				for _, lag := range []time.Duration{0, 14 * time.Second} {
					for _, name := range []string{mutName, valName} {
						count++
						if err := w.handshake(m, name, lag); err != nil {
							w.t.Errorf("%v: replica %d by %s, %v behind: %v", time.Now(), i, name, lag, err)
						}
					}
				}
			}
			select {
			case <-done:
				return
			case <-time.After(4900 * time.Millisecond):
			}
		}
	})
	return func() int { close(done); wg.Wait(); return count }
}

// settle waits until the certificates are in order, and for the slowest client.
func (w *world) settle(replicas ...*Manager) {
	w.t.Helper()
	time.Sleep(20 * time.Second)
	for i, m := range replicas {
		if err := m.Ready(); err != nil {
			w.t.Fatalf("replica %d: %v", i, err)
		}
	}
}

// oneReplica returns a world in which a replica has put all in order.
func oneReplica(t *testing.T) (*world, *Manager) {
	t.Helper()
	w := newWorld(t, emptySecret())
	m := w.replica(w.server.Client(nil), nil)
	w.settle(m)
	return w, m
}

// twoReplicas is oneReplica with two.
func twoReplicas(t *testing.T) (w *world, a, b *Manager) {
	t.Helper()
	w = newWorld(t, emptySecret())
	a, b = w.replica(w.server.Client(nil), nil), w.replica(w.server.Client(nil), nil)
	w.settle(a, b)
	return w, a, b
}

// used returns a world in which a replica has put all in order, and ended.
func used(t *testing.T, change func(*Config)) *world {
	t.Helper()
	w := newWorld(t, emptySecret())
	m, stop := w.stoppable(w.server.Client(nil), change)
	w.settle(m)
	stop()
	return w
}

func TestAnEmptySecretIsFilledOnceByTwoReplicas(t *testing.T) {
	for name, secret := range map[string]*corev1.Secret{"empty": emptySecret(), "missing": nil} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, secret)
				var leaves []string
				w.server.OnWrite(func(_ string, obj runtime.Object) {
					if s, ok := obj.(*corev1.Secret); ok {
						leaves = append(leaves, string(s.Data[certKey]))
					}
				})
				a, b := w.replica(w.server.Client(nil), nil), w.replica(w.server.Client(nil), nil)
				w.settle(a, b)
				if len(leaves) != 1 {
					t.Errorf("the Secret was written %d times, want once", len(leaves))
				}
				certA, errA := a.GetCertificate(nil)
				certB, errB := b.GetCertificate(nil)
				if errA != nil || errB != nil || !sameLeaf(certA, certB) {
					t.Errorf("the replicas serve different certificates (%v, %v)", errA, errB)
				}
				if got := time.Until(certA.Leaf.NotAfter); got < 89*24*time.Hour || got > 90*24*time.Hour {
					t.Errorf("the certificate is valid for %v", got)
				}
				for _, m := range []*Manager{a, b} {
					for _, configuration := range []string{mutName, valName} {
						if err := w.handshake(m, configuration, 0); err != nil {
							t.Error(err)
						}
					}
				}
				if n := w.server.Calls()["update secrets"] + w.server.Calls()["create secrets"]; n > 2 {
					t.Errorf("%d attempts to write the Secret, want one a replica", n)
				}
				// All of the configuration's webhooks trust it, and nothing else changed.
				c, err := w.admin.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(t.Context(), mutName, metav1.GetOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if len(c.Webhooks) != 2 || len(c.Webhooks[0].MatchConditions) != 1 || len(c.Webhooks[1].ClientConfig.CABundle) == 0 {
					t.Errorf("the configuration became %+v", c.Webhooks)
				}
			})
		})
	}
}

// Guards P5 and P6: certificates are renewed, served without a restart, and no
// client is cut off meanwhile.
func TestNoHandshakeFailsWhileCertificateAndCAChange(t *testing.T) {
	for name, flaky := range map[string]bool{"all is well": false, "every third request of one replica fails": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, emptySecret())
				var running atomic.Bool
				n := 0 // guarded by the client's lock
				before := func(clienttesting.Action) error {
					if n++; flaky && running.Load() && n%3 == 0 {
						return errors.New("connection reset")
					}
					return nil
				}
				a, b := w.replica(w.server.Client(nil), nil), w.replica(w.server.Client(before), nil)
				w.settle(a, b)
				running.Store(true)
				stop := w.load(a, b)
				first := w.content()

				w.rotate("cert, please")
				time.Sleep(20 * time.Second)
				second := w.content()
				if sameLeaf(first.leaf, second.leaf) || !first.ca.same(second.ca) {
					t.Error("want another certificate of the same CA")
				}

				w.rotate("ca-2")
				time.Sleep(5 * time.Second)
				during := w.content()
				if during.next == nil || !during.ca.same(second.ca) {
					t.Fatal("the next CA does not stand beside the present one")
				}
				if !holds(w.trusted(valName, 0), during.trusted()) || len(during.trusted()) != 2 {
					t.Error("the configurations do not hold both CAs")
				}
				time.Sleep(2 * time.Minute)
				third := w.content()
				if third.next != nil || third.previous != nil || !third.ca.cert.Equal(during.next.cert) || third.ca.key == nil {
					t.Error("the change of CA did not come to its end")
				}
				if !a.policy.signed(third.ca.cert, third.leaf, time.Now()) || !holds(w.trusted(mutName, 0), third.trusted()) {
					t.Error("the certificate is not of the new CA, or the configurations hold more than it")
				}
				if n := stop(); n < 200 {
					t.Errorf("only %d handshakes", n)
				}
				if value, ok := w.secret().Annotations[RotateAnnotation]; ok {
					t.Errorf("annotation %s=%s is still there", RotateAnnotation, value)
				}
				got := testutil.ToFloat64(a.metrics.rotations.WithLabelValues(kindCA)) +
					testutil.ToFloat64(b.metrics.rotations.WithLabelValues(kindCA))
				if got != 1 {
					t.Errorf("the replicas count %v changes of CA", got)
				}
			})
		})
	}
}

func TestThePreviousCAStaysUntilEveryClientHasTheNext(t *testing.T) {
	// The order of what the configurations hold is the promise to every client.
	synctest.Test(t, func(t *testing.T) {
		w, _ := oneReplica(t)
		old := w.content()
		w.rotate("ca")
		var switched, began time.Time
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			now := w.content()
			if began.IsZero() && holds(w.trusted(mutName, 0), now.trusted()) && now.next != nil {
				began = time.Now()
			}
			if switched.IsZero() && !old.ca.cert.Equal(now.ca.cert) {
				switched = time.Now()
				if got := switched.Sub(began); got < DefaultPropagation-200*time.Millisecond {
					t.Errorf("certificates of the next CA %v after it was made known", got)
				}
			}
			if !switched.IsZero() && now.previous == nil {
				if got := time.Since(switched); got < DefaultPropagation-200*time.Millisecond {
					t.Errorf("the previous CA left after %v", got)
				}
				return
			}
		}
		t.Error("the change of CA did not come to its end in a minute")
	})
}

func TestTheWaitBeginsAgainWhenSomebodyEmptiesTheBundle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _ := oneReplica(t)
		old := w.content()
		w.rotate("ca")
		time.Sleep(10 * time.Second)
		w.setBundle("")
		time.Sleep(10 * time.Second)
		if now := w.content(); !old.ca.cert.Equal(now.ca.cert) {
			t.Error("the next CA signs although its way into the configurations was interrupted")
		}
		if !holds(w.trusted(mutName, 0), w.content().trusted()) {
			t.Error("the bundle was not repaired")
		}
		time.Sleep(time.Minute)
		if now := w.content(); old.ca.cert.Equal(now.ca.cert) || now.previous != nil {
			t.Error("the change did not come to its end")
		}
	})
}

func TestABundleThatSomebodyChangedIsRepaired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, a, _ := twoReplicas(t)
		before := w.content()
		for _, bundle := range []string{"", "Z2FyYmFnZQ=="} {
			w.setBundle(bundle)
			time.Sleep(time.Second)
			if err := w.handshake(a, mutName, 0); err != nil {
				t.Errorf("caBundle %q: %v", bundle, err)
			}
			if err := a.Ready(); err != nil {
				t.Errorf("caBundle %q: %v", bundle, err)
			}
		}
		if !before.same(w.content()) {
			t.Error("the Secret changed")
		}
	})
}

func TestAConfigurationThatIsMadeLaterIsFilled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, emptySecret())
		configurations := w.admin.AdmissionregistrationV1().ValidatingWebhookConfigurations()
		c, err := configurations.Get(t.Context(), valName, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := configurations.Delete(t.Context(), valName, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		m := w.replica(w.server.Client(nil), nil)
		w.settle(m)
		// A configuration that is not there does not hold up a change of CA.
		w.rotate("ca")
		time.Sleep(time.Minute)
		if now := w.content(); now.next != nil || now.previous != nil {
			t.Error("the change of CA did not come to its end")
		}
		c.ResourceVersion, c.UID = "", ""
		if _, err := configurations.Create(t.Context(), c, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if err := w.handshake(m, valName, 0); err != nil {
			t.Error(err)
		}
	})
}

// damages are what can happen to the Secret, and whether replicas that ran
// before must carry on without a failed handshake.
var damages = map[string]func(*corev1.Secret){
	"all data gone":            func(s *corev1.Secret) { s.Data = nil },
	"certificate gone":         func(s *corev1.Secret) { delete(s.Data, certKey) },
	"certificate's key gone":   func(s *corev1.Secret) { delete(s.Data, certKeyKey) },
	"CA's key gone":            func(s *corev1.Secret) { delete(s.Data, caKeyKey) },
	"both keys gone":           func(s *corev1.Secret) { delete(s.Data, caKeyKey); delete(s.Data, certKeyKey) },
	"CA gone":                  func(s *corev1.Secret) { delete(s.Data, caCertKey) },
	"CA and its key gone":      func(s *corev1.Secret) { delete(s.Data, caCertKey); delete(s.Data, caKeyKey) },
	"CA is not PEM":            func(s *corev1.Secret) { s.Data[caCertKey] = []byte("nonsense") },
	"CA's key is another's":    func(s *corev1.Secret) { s.Data[caKeyKey] = s.Data[certKeyKey] },
	"CA is no CA":              func(s *corev1.Secret) { s.Data[caCertKey], s.Data[caKeyKey] = s.Data[certKey], s.Data[certKeyKey] },
	"everything is nonsense":   func(s *corev1.Secret) { s.Data = nonsense() },
	"certificate cut in half":  func(s *corev1.Secret) { s.Data[certKey] = s.Data[certKey][:len(s.Data[certKey])/2] },
	"a next CA without a key":  func(s *corev1.Secret) { s.Data[nextCertKey] = s.Data[caCertKey] },
	"a next CA that is broken": func(s *corev1.Secret) { s.Data[nextCertKey], s.Data[nextKeyKey] = []byte("x"), []byte("y") },
	"an old CA that is broken": func(s *corev1.Secret) { s.Data[previousCertKey] = []byte("x") },
}

func nonsense() map[string][]byte {
	out := map[string][]byte{}
	for _, key := range ownKeys {
		out[key] = []byte("-----BEGIN CERTIFICATE-----\nbm9uc2Vuc2U=\n-----END CERTIFICATE-----\n")
	}
	return out
}

// whole reports what is wrong with the Secret once all is in order.
func (w *world) whole(m *Manager) {
	w.t.Helper()
	c := w.content()
	if c.ca == nil || c.ca.key == nil || c.leaf == nil || c.next != nil || c.previous != nil {
		w.t.Fatalf("the Secret is not whole: %d keys", len(w.secret().Data))
	}
	if !m.policy.signed(c.ca.cert, c.leaf, time.Now()) {
		w.t.Error("the certificate is not of the CA")
	}
	for _, name := range []string{mutName, valName} {
		if err := w.handshake(m, name, 0); err != nil {
			w.t.Error(err)
		}
	}
}

func TestADamagedSecretIsMadeAnewWithoutAFailedHandshake(t *testing.T) {
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, a, b := twoReplicas(t)
				stop := w.load(a, b)
				w.edit(damage)
				time.Sleep(time.Minute)
				stop()
				w.whole(a)
			})
		})
	}
}

func TestADeletedSecretIsMadeAnewWithoutAFailedHandshake(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, a, b := twoReplicas(t)
		stop := w.load(a, b)
		before := w.content()
		if err := w.admin.CoreV1().Secrets(namespace).Delete(t.Context(), secretName, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		stop()
		w.whole(a)
		if now := w.content(); now.ca.cert.Equal(before.ca.cert) || sameLeaf(now.leaf, before.leaf) {
			t.Error("a Secret that was deleted came back with the old keys")
		}
	})
}

func TestADamagedSecretIsMadeAnewByReplicasThatJustStarted(t *testing.T) {
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := used(t, nil)
				w.edit(damage)
				a, b := w.replica(w.server.Client(nil), nil), w.replica(w.server.Client(nil), nil)
				time.Sleep(time.Minute)
				w.settle(a, b)
				w.whole(a)
				w.whole(b)
			})
		})
	}
}

func TestAReplicaThatRanSavesTheOthersFromAnAbruptChange(t *testing.T) {
	// A new replica meets a Secret that lost everything; the old one, a moment
	// behind, still knows what clients trust.
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, emptySecret())
		var deaf atomic.Bool
		a := w.replica(w.server.Client(func(clienttesting.Action) error {
			if deaf.Load() {
				return errors.New("connection refused")
			}
			return nil
		}), nil)
		w.settle(a)
		stop := w.load(a)
		deaf.Store(true)
		w.edit(damages["all data gone"])
		w.replica(w.server.Client(nil), nil)
		time.Sleep(500 * time.Millisecond)
		deaf.Store(false)
		time.Sleep(time.Minute)
		stop()
		w.whole(a)
	})
}

func TestCertificatesAreRenewedForYears(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, emptySecret())
		change := func(c *Config) {
			c.CertLifetime, c.CALifetime = 90*time.Hour, 365*time.Hour
			c.Propagation = time.Hour // So that a year is not too many passes.
		}
		m := w.replica(w.server.Client(nil), change)
		w.settle(m)
		leaves, cas := map[string]bool{}, map[string]bool{}
		for hour := range 2 * 365 {
			time.Sleep(time.Hour)
			name := []string{mutName, valName}[hour%2] // they have one certificate
			if err := w.handshake(m, name, 55*time.Minute); err != nil {
				t.Fatalf("%v: %v", time.Now(), err)
			}
			cert, err := m.GetCertificate(nil)
			if err != nil {
				t.Fatal(err)
			}
			if left := time.Until(cert.Leaf.NotAfter); left < 25*time.Hour {
				t.Fatalf("a certificate with %v left", left)
			}
			leaves[cert.Leaf.SerialNumber.String()] = true
			cas[string(cert.Leaf.AuthorityKeyId)] = true
		}
		if len(leaves) < 12 || len(cas) < 3 {
			t.Errorf("%d certificates of %d CAs in two lives of a CA", len(leaves), len(cas))
		}
	})
}

func TestExpiryWhileNobodyRan(t *testing.T) {
	for name, down := range map[string]time.Duration{
		"certificate due":     70 * 24 * time.Hour,
		"certificate expired": 100 * 24 * time.Hour,
		"CA due":              7 * 365 * 24 * time.Hour,
		"CA expired":          11 * 365 * 24 * time.Hour,
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := used(t, nil)
				before := w.content()
				time.Sleep(down)
				a, b := w.replica(w.server.Client(nil), nil), w.replica(w.server.Client(nil), nil)
				time.Sleep(time.Minute)
				w.settle(a, b)
				w.whole(a)
				w.whole(b)
				if sameLeaf(before.leaf, w.content().leaf) {
					t.Error("the certificate is still the old one")
				}
				if changed := !before.ca.cert.Equal(w.content().ca.cert); changed != strings.HasPrefix(name, "CA") {
					t.Errorf("the CA changed: %v", changed)
				}
			})
		})
	}
}

func TestExpiryWhileTheAPIServerIsAwayIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, emptySecret())
		var away sync.Map
		client := w.server.Client(func(clienttesting.Action) error {
			if _, ok := away.Load("away"); ok {
				return errors.New("connection refused")
			}
			return nil
		})
		m := w.replica(client, func(c *Config) { c.CertLifetime = 30 * time.Minute })
		w.settle(m)
		away.Store("away", true)
		time.Sleep(25 * time.Minute)
		if err := m.Ready(); err != nil {
			t.Errorf("a valid certificate is served, yet %v", err)
		}
		time.Sleep(6 * time.Minute)
		if err := m.Ready(); err == nil || !strings.Contains(err.Error(), "expired") ||
			!strings.Contains(err.Error(), "connection refused") {
			t.Errorf("Ready: %v", err)
		}
		if got := testutil.ToFloat64(m.metrics.failures); got < 10 || got > 2000 {
			t.Errorf("%v failures counted", got)
		}
		away.Delete("away")
		time.Sleep(time.Minute)
		w.settle(m)
		w.whole(m)
	})
}

func TestAnotherServiceNameGetsAnotherCertificate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := used(t, func(c *Config) { c.DNSNames = []string{"other.bwki.svc"} })
		before := w.content()
		m := w.replica(w.server.Client(nil), nil)
		w.settle(m)
		w.whole(m)
		if !before.ca.same(w.content().ca) {
			t.Error("the CA changed as well")
		}
	})
}

func TestACAOfTheAdministratorIsTakenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := oneReplica(t)
		stop := w.load(m)
		own, err := m.policy.newAuthority(time.Now())
		if err != nil {
			t.Fatal(err)
		}
		data, err := content{ca: own}.encode(nil)
		if err != nil {
			t.Fatal(err)
		}
		w.edit(func(s *corev1.Secret) { s.Data[caCertKey], s.Data[caKeyKey] = data[caCertKey], data[caKeyKey] })
		time.Sleep(time.Minute)
		stop()
		w.whole(m)
		if !w.content().ca.cert.Equal(own.cert) {
			t.Error("the certificate is of another CA")
		}
	})
}

func TestARequestOfACAWaitsForTheOneUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := oneReplica(t)
		stop := w.load(m)
		w.rotate("ca")
		time.Sleep(2 * time.Second)
		next := w.content().next
		w.rotate("ca again")
		time.Sleep(2 * time.Minute)
		stop()
		w.whole(m)
		if w.content().ca.same(next) || len(w.secret().Annotations) != 0 {
			t.Error("the second request was not answered")
		}
	})
}

func TestARequestThatIsNotUnderstoodChangesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, m := oneReplica(t)
		before := w.content()
		w.rotate("everything")
		time.Sleep(time.Minute)
		if !before.same(w.content()) {
			t.Error("the Secret changed")
		}
		w.settle(m)
	})
}

func TestTroubleWithTheAPIServerIsToldAndTriedAgain(t *testing.T) {
	for resource, verb := range map[string]string{"secrets": "get", "mutatingwebhookconfigurations": "list",
		"validatingwebhookconfigurations": "patch"} {
		t.Run(verb+" "+resource, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, emptySecret())
				var mended sync.Map
				client := w.server.Client(func(a clienttesting.Action) error {
					if _, ok := mended.Load("mended"); ok || a.GetVerb() != verb || a.GetResource().Resource != resource {
						return nil
					}
					return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "x", errors.New("no such rule"))
				})
				m := w.replica(client, nil)
				time.Sleep(time.Minute)
				if err := m.Ready(); err == nil || !strings.Contains(err.Error(), resource) || !strings.Contains(err.Error(), "forbidden") {
					t.Errorf("Ready: %v", err)
				}
				mended.Store("mended", true)
				time.Sleep(2 * time.Minute) // An informer waits up to a minute between attempts.
				w.settle(m)
				w.whole(m)
			})
		})
	}
}

func TestInOrderNothingIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, _, _ := twoReplicas(t)
		before := w.server.Calls()
		time.Sleep(10 * time.Minute)
		for call, n := range w.server.Calls() {
			limit := 0
			if call == "get secrets" {
				limit = 2 * 10 * 60 / 5 // two replicas, every 5 s
			}
			if got := n - before[call]; got > limit {
				t.Errorf("%d times %s in ten minutes", got, call)
			}
		}
	})
}

func TestClocksFarApartDoNotWearTheAPIServerOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, emptySecret())
		w.replica(w.server.Client(nil), nil)
		w.replica(w.server.Client(nil), func(c *Config) {
			c.Now = func() time.Time { return time.Now().Add(20 * 365 * 24 * time.Hour) }
		})
		time.Sleep(3 * time.Minute)
		if n := w.server.Calls()["update secrets"]; n > 2*(10+3*60/5) {
			t.Errorf("the Secret was written %d times in three minutes", n)
		}
	})
}

func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, emptySecret())
		m := w.replica(w.server.Client(nil), nil)
		registry := prometheus.NewPedanticRegistry()
		if err := m.Register(registry); err != nil {
			t.Fatal(err)
		}
		w.settle(m)
		w.rotate("cert")
		time.Sleep(time.Second)
		cert, err := m.GetCertificate(nil)
		if err != nil {
			t.Fatal(err)
		}
		want := fmt.Sprintf(`
# HELP divvy_certificate_expiry_timestamp_seconds When what is served expires, in seconds since 1970.
# TYPE divvy_certificate_expiry_timestamp_seconds gauge
divvy_certificate_expiry_timestamp_seconds{kind="ca"} %d
divvy_certificate_expiry_timestamp_seconds{kind="certificate"} %d
# HELP divvy_certificate_rotations_total Certificates and CAs that this replica put in the place of others.
# TYPE divvy_certificate_rotations_total counter
divvy_certificate_rotations_total{kind="ca"} 0
divvy_certificate_rotations_total{kind="certificate"} 1
`, w.content().ca.cert.NotAfter.Unix(), cert.Leaf.NotAfter.Unix())
		if err := testutil.GatherAndCompare(registry, strings.NewReader(want),
			"divvy_certificate_expiry_timestamp_seconds", "divvy_certificate_rotations_total"); err != nil {
			t.Error(err)
		}
	})
}

func TestNewSaysAllThatIsWrong(t *testing.T) {
	_, err := New(Config{CertLifetime: 20 * 365 * 24 * time.Hour, Propagation: -time.Second})
	if err == nil {
		t.Fatal("an empty configuration was taken")
	}
	for _, want := range []string{"client", "Secret", "DNS name", "its CA", "a tenth"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v: nothing about %q", err, want)
		}
	}
}

func TestGetCertificateBeforeThereIsOne(t *testing.T) {
	w := newWorld(t, emptySecret())
	m, err := New(w.config(w.admin))
	if err != nil {
		t.Fatal(err)
	}
	if cert, err := m.GetCertificate(nil); err == nil || cert != nil {
		t.Errorf("got %v, %v", cert, err)
	}
	if err := m.Ready(); err == nil {
		t.Error("ready without a certificate")
	}
}

// TestTheRealThing does what the tests above do in real time and over TCP.
func TestTheRealThing(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a few seconds")
	}
	const propagation = 4 * time.Second
	w := newWorld(t, emptySecret())
	change := func(c *Config) { c.Propagation = propagation }
	replicas := []*Manager{w.replica(w.server.Client(nil), change), w.replica(w.server.Client(nil), change)}
	addresses := make([]string, len(replicas))
	for i, m := range replicas {
		listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{GetCertificate: m.GetCertificate, MinVersion: tls.VersionTLS13})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { listener.Close() }) //nolint:errcheck // the test is over
		addresses[i] = listener.Addr().String()
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				go func() {
					defer conn.Close()          //nolint:errcheck // the client tells
					conn.Write([]byte("hello")) //nolint:errcheck // as above
				}()
			}
		}()
	}
	eventually(t, "both replicas are ready", func() bool { return replicas[0].Ready() == nil && replicas[1].Ready() == nil })
	first := w.content()
	time.Sleep(time.Second) // The clients are behind.

	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var mu sync.Mutex
	count := 0
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				roots := x509.NewCertPool()
				roots.AppendCertsFromPEM(w.trusted([]string{mutName, valName}[rand.IntN(2)], 200*time.Millisecond))
				conn, err := tls.Dial("tcp", addresses[rand.IntN(2)], &tls.Config{RootCAs: roots, ServerName: serverName,
					MinVersion: tls.VersionTLS13})
				if err != nil {
					t.Errorf("handshake: %v", err)
					return
				}
				conn.Close() //nolint:errcheck // it was only for the handshake
				mu.Lock()
				count++
				mu.Unlock()
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	w.rotate("cert")
	eventually(t, "another certificate", func() bool { return !sameLeaf(first.leaf, w.content().leaf) })
	w.rotate("ca")
	eventually(t, "another CA alone", func() bool {
		now := w.content()
		return !first.ca.cert.Equal(now.ca.cert) && now.previous == nil
	})
	stop()
	wg.Wait()
	t.Logf("%d handshakes, none failed", count)
	if count < 20 {
		t.Errorf("only %d handshakes", count)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited a minute for: %s", what)
		}
	}
}
