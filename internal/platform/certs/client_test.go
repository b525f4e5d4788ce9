package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"
)

const (
	clientSecret = "client"
	caConfigMap  = "ca"
	clientName   = "divvy-kube-scheduler"
	// overlap is how long clients of these tests may take.
	overlap = 3 * 24 * time.Hour
)

// clientWorld is a world with a client that takes up what is published when it
// can.
type clientWorld struct {
	*world
	mu sync.Mutex
	// bundles and pairs are what was published, with the times.
	bundles []bundleAt
	pairs   []pairAt
}

type pairAt struct {
	at   time.Time
	data map[string][]byte
}

func newClientWorld(t *testing.T, without ...string) *clientWorld {
	t.Helper()
	w := &clientWorld{world: newWorld(t, emptySecret())}
	w.server.OnWrite(func(_ string, obj runtime.Object) {
		w.mu.Lock()
		defer w.mu.Unlock()
		switch o := obj.(type) {
		case *corev1.ConfigMap:
			w.bundles = append(w.bundles, bundleAt{time.Now(), []byte(o.Data[caCertKey])})
		case *corev1.Secret:
			if o.Name == clientSecret {
				w.pairs = append(w.pairs, pairAt{time.Now(), maps.Clone(o.Data)})
			}
		}
	})
	if !slices.Contains(without, caConfigMap) {
		w.makeConfigMap()
	}
	if !slices.Contains(without, clientSecret) {
		w.makeClientSecret()
	}
	return w
}

func (w *clientWorld) makeConfigMap() {
	w.t.Helper()
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: caConfigMap},
		Data: map[string]string{"note": "of somebody else's"}}
	if _, err := w.admin.CoreV1().ConfigMaps(namespace).Create(w.t.Context(), o, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *clientWorld) makeClientSecret() {
	w.t.Helper()
	o := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: clientSecret}}
	if _, err := w.admin.CoreV1().Secrets(namespace).Create(w.t.Context(), o, metav1.CreateOptions{}); err != nil {
		w.t.Fatal(err)
	}
}

// publishing is the configuration of a Manager with all that clients need.
func publishing(c *Config) {
	c.ConfigMap, c.ClientSecret, c.ClientName, c.Overlap = caConfigMap, clientSecret, clientName, overlap
	c.Propagation = time.Hour // so that weeks are not too many passes
	c.CertLifetime = 90 * 24 * time.Hour
}

func (w *clientWorld) manager() *Manager { return w.replica(w.server.Client(nil), publishing) }

// configMap and pair are what is published now.
func (w *clientWorld) configMap() *corev1.ConfigMap {
	w.t.Helper()
	o, err := w.admin.CoreV1().ConfigMaps(namespace).Get(w.t.Context(), caConfigMap, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return o
}

func (w *clientWorld) pair() *tls.Certificate {
	w.t.Helper()
	o, err := w.admin.CoreV1().Secrets(namespace).Get(w.t.Context(), clientSecret, metav1.GetOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	pair, err := parsePair(o.Data[certKey], o.Data[certKeyKey])
	if err != nil {
		w.t.Fatal(err)
	}
	return pair
}

// connect is a handshake in which both sides prove who they are, by what was
// published a while ago.
func (w *clientWorld) connect(m *Manager, lag time.Duration) error {
	w.mu.Lock()
	var bundle []byte
	var data map[string][]byte
	for _, b := range w.bundles {
		if !b.at.After(time.Now().Add(-lag)) {
			bundle = b.bundle
		}
	}
	for _, p := range w.pairs {
		if !p.at.After(time.Now().Add(-lag)) {
			data = p.data
		}
	}
	w.mu.Unlock()
	pair, err := parsePair(data[certKey], data[certKeyKey])
	if err != nil {
		return err
	}
	if pair == nil {
		return errors.New("there is no client certificate")
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(bundle)
	near, far := net.Pipe()
	defer near.Close() //nolint:errcheck // a pipe
	defer far.Close()  //nolint:errcheck // a pipe
	served := make(chan error, 1)
	go func() {
		server := tls.Server(far, &tls.Config{
			GetCertificate: m.GetCertificate, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: m.ClientCAs(),
			MinVersion: tls.VersionTLS12, MaxVersion: tls.VersionTLS12,
		})
		served <- server.Handshake()
	}()
	client := tls.Client(near, &tls.Config{
		RootCAs: roots, ServerName: serverName, MinVersion: tls.VersionTLS12, MaxVersion: tls.VersionTLS12,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return pair, nil },
	})
	return errors.Join(client.Handshake(), <-served)
}

// settled waits until all is in order.
func (w *clientWorld) settled(replicas ...*Manager) {
	w.t.Helper()
	time.Sleep(65 * time.Minute)
	for i, m := range replicas {
		if err := m.Ready(); err != nil {
			w.t.Fatalf("replica %d: %v", i, err)
		}
		if err := w.connect(m, 0); err != nil {
			w.t.Fatalf("replica %d: %v", i, err)
		}
	}
}

func TestTheCAAndAClientCertificateArePublishedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newClientWorld(t)
		a, b := w.manager(), w.manager()
		w.settled(a, b)
		if len(w.pairs) != 2 || len(w.bundles) != 2 { // each was made empty
			t.Errorf("the client certificate was written %d times and the CA %d times, want once", len(w.pairs)-1, len(w.bundles)-1)
		}
		c, now := w.content(), w.configMap()
		if !holds([]byte(now.Data[caCertKey]), c.trusted()) || now.Data["note"] == "" {
			t.Error("the ConfigMap does not hold the CA, or nothing else any more")
		}
		client := w.pair().Leaf
		if client.Subject.CommonName != clientName || !client.NotAfter.Equal(c.ca.cert.NotAfter) || len(client.DNSNames) > 0 {
			t.Errorf("client certificate of %s until %v, and the CA until %v", client.Subject, client.NotAfter, c.ca.cert.NotAfter)
		}
		if !slices.Equal(client.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}) {
			t.Errorf("it is for %v", client.ExtKeyUsage)
		}
		// It is as good for nothing else as the server's for a client.
		if a.policy.signed(c.ca.cert, w.pair(), time.Now()) || a.policy.signedClient(c.ca.cert, c.leaf, time.Now()) {
			t.Error("a certificate of one side is good for the other")
		}
	})
}

// A client that is days behind, as a control-plane node that was switched off, is
// not cut off by a change of CA, whichever of both it has.
func TestAClientThatIsDaysBehindIsNotCutOffByAChangeOfCA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newClientWorld(t)
		m, stop := w.stoppable(w.server.Client(nil), publishing)
		w.settled(m)
		time.Sleep(overlap) // so that the slowest has the first ones
		first, firstClient := w.content(), w.pair()
		w.rotate("ca")
		check := func() {
			t.Helper()
			for _, lag := range []time.Duration{0, time.Hour, overlap / 2, overlap - time.Hour} {
				if err := w.connect(m, lag); err != nil {
					t.Fatalf("%v behind: %v", lag, err)
				}
			}
		}
		var began, used, ended time.Time
		for range 10 * 24 {
			time.Sleep(time.Hour)
			check()
			c := w.content()
			if began.IsZero() && c.next != nil {
				began = time.Now()
				// One restart for the client: it gets the CA and a certificate of it at once.
				time.Sleep(2 * time.Hour)
				if !m.policy.signedClient(c.next.cert, w.pair(), time.Now()) {
					t.Error("the client certificate is not of the next CA")
				}
			}
			if used.IsZero() && !c.ca.cert.Equal(first.ca.cert) {
				used = time.Now()
				// A replica that starts anew goes by what was noted.
				time.Sleep(time.Minute) // the stand-in's watches end when nothing is on its way
				stop()
				m, stop = w.stoppable(w.server.Client(nil), publishing)
				time.Sleep(time.Hour)
			}
			if !used.IsZero() && c.previous == nil {
				ended = time.Now()
				break
			}
		}
		if used.Sub(began) < overlap-time.Hour || ended.Sub(used) < overlap-time.Hour || ended.Sub(used) > overlap+3*time.Hour {
			t.Errorf("announced at %v, used at %v, ended at %v", began, used, ended)
		}
		if len(w.pairs) != 3 {
			t.Errorf("the client certificate was written %d times, want twice", len(w.pairs)-1)
		}
		if m.policy.signedClient(w.content().ca.cert, firstClient, time.Now()) || w.content().since != (time.Time{}) {
			t.Error("the change did not come to its end")
		}
		// What was given out before is worth nothing now.
		if _, err := firstClient.Leaf.Verify(x509.VerifyOptions{Roots: m.ClientCAs(),
			KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err == nil {
			t.Error("the first client certificate is accepted still")
		}
		time.Sleep(time.Minute) // as above
		stop()
	})
}

// Replicas that start every day come to the end of a change all the same: since
// when it is where it is is in the Secret.
func TestReplicasThatAreRestartedEveryDayFinishAChangeOfCA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newClientWorld(t)
		m, stop := w.stoppable(w.server.Client(nil), publishing)
		w.settled(m)
		first := w.content()
		w.rotate("ca")
		for range 8 {
			time.Sleep(23*time.Hour + time.Minute)
			stop()
			m, stop = w.stoppable(w.server.Client(nil), publishing)
			time.Sleep(time.Hour)
			if err := w.connect(m, 12*time.Hour); err != nil && len(w.pairs) > 2 {
				t.Fatal(err)
			}
		}
		if c := w.content(); c.ca.cert.Equal(first.ca.cert) || c.next != nil || c.previous != nil {
			t.Error("the change of CA did not come to its end in a week")
		}
		time.Sleep(time.Minute) // as above
		stop()
	})
}

// The note may be lost or nonsense; then the wait begins anew, and no client is
// cut off.
func TestWhatIsNotedOfAChangeIsMended(t *testing.T) {
	for name, note := range map[string][]byte{"lost": nil, "nonsense": []byte("yesterday")} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newClientWorld(t)
				m := w.manager()
				w.settled(m)
				w.rotate("ca")
				time.Sleep(overlap / 2)
				damaged := time.Now()
				w.edit(func(s *corev1.Secret) {
					if s.Data[sinceKey] = note; note == nil {
						delete(s.Data, sinceKey)
					}
				})
				time.Sleep(2 * time.Hour)
				c := w.content()
				if c.next == nil || c.since.Before(damaged.Truncate(time.Second)) {
					t.Errorf("since %v", c.since)
				}
				time.Sleep(overlap - 3*time.Hour)
				if w.content().next == nil {
					t.Error("the wait did not begin anew")
				}
				time.Sleep(3 * time.Hour)
				if w.content().next != nil {
					t.Error("the change of CA does not go on")
				}
			})
		})
	}
}

// A certificate that cannot wait for the end of the overlap, as the key of its CA
// is lost, gets a new one in time.
func TestALostKeyDoesNotLetTheCertificateExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newClientWorld(t)
		m := w.replica(w.server.Client(nil), func(c *Config) {
			publishing(c)
			c.CertLifetime = 4 * 24 * time.Hour // two thirds of it end before the overlap
		})
		time.Sleep(3 * time.Hour)
		w.edit(func(s *corev1.Secret) { delete(s.Data, caKeyKey) })
		for range 30 {
			time.Sleep(6 * time.Hour)
			if err := w.connect(m, 0); err != nil {
				t.Fatal(err)
			}
			if left := time.Until(w.content().leaf.Leaf.NotAfter); left < 24*time.Hour {
				t.Fatalf("the certificate has %v left", left)
			}
		}
		if c := w.content(); c.ca.key == nil || c.next != nil || c.previous != nil {
			t.Error("the CA was not replaced")
		}
	})
}

// What somebody does to what is published is put right.
func TestWhatIsPublishedIsKept(t *testing.T) {
	for name, damage := range map[string]func(w *clientWorld) error{
		"the CA is emptied": func(w *clientWorld) error {
			c := w.configMap()
			c.Data[caCertKey], c.ResourceVersion = "", ""
			_, err := w.admin.CoreV1().ConfigMaps(namespace).Update(w.t.Context(), c, metav1.UpdateOptions{})
			return err
		},
		"the CA is another": func(w *clientWorld) error {
			c := w.configMap()
			c.Data[caCertKey], c.ResourceVersion = string(encodeCerts(w.pair().Leaf)), ""
			_, err := w.admin.CoreV1().ConfigMaps(namespace).Update(w.t.Context(), c, metav1.UpdateOptions{})
			return err
		},
		"the client certificate is emptied": func(w *clientWorld) error {
			return w.editClient(func(s *corev1.Secret) { s.Data = nil })
		},
		"the client's key is gone": func(w *clientWorld) error {
			return w.editClient(func(s *corev1.Secret) { delete(s.Data, certKeyKey) })
		},
		"the client certificate is nonsense": func(w *clientWorld) error {
			return w.editClient(func(s *corev1.Secret) { s.Data = nonsense() })
		},
		"it is that of a server": func(w *clientWorld) error {
			data := w.secret().Data
			return w.editClient(func(s *corev1.Secret) { s.Data[certKey], s.Data[certKeyKey] = data[certKey], data[certKeyKey] })
		},
		"both are deleted and made anew": func(w *clientWorld) error {
			err := errors.Join(w.admin.CoreV1().ConfigMaps(namespace).Delete(w.t.Context(), caConfigMap, metav1.DeleteOptions{}),
				w.admin.CoreV1().Secrets(namespace).Delete(w.t.Context(), clientSecret, metav1.DeleteOptions{}))
			time.Sleep(time.Minute)
			w.makeConfigMap()
			w.makeClientSecret()
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newClientWorld(t)
				a, b := w.manager(), w.manager()
				w.settled(a, b)
				before := w.content()
				if err := damage(w); err != nil {
					t.Fatal(err)
				}
				w.settled(a, b)
				if !before.same(w.content()) {
					t.Error("the certificates of the server changed")
				}
				if !a.policy.signedClient(before.ca.cert, w.pair(), time.Now()) {
					t.Error("the client certificate is not of the CA")
				}
			})
		})
	}
}

func (w *clientWorld) editClient(change func(*corev1.Secret)) error {
	secrets := w.admin.CoreV1().Secrets(namespace)
	s, err := secrets.Get(w.t.Context(), clientSecret, metav1.GetOptions{})
	if err != nil {
		return err
	}
	change(s)
	s.ResourceVersion = ""
	_, err = secrets.Update(w.t.Context(), s, metav1.UpdateOptions{})
	return err
}

// Clients whose CA the server's Secret lost are accepted without a break.
func TestClientsAreAcceptedWhileTheSecretIsDamaged(t *testing.T) {
	for name, damage := range damages {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newClientWorld(t)
				a, b := w.manager(), w.manager()
				w.settled(a, b)
				before := time.Now()
				w.edit(damage)
				for i := range 8 {
					for n, m := range []*Manager{a, b} {
						if err := w.connect(m, time.Since(before)); err != nil {
							t.Fatalf("replica %d, %v later, with what was published before: %v", n, time.Since(before), err)
						}
						if err := w.connect(m, 0); err != nil {
							t.Fatalf("replica %d, %v later: %v", n, time.Since(before), err)
						}
					}
					time.Sleep(time.Duration(1+i*i*i/4) * time.Minute) // closely at first, an hour at the end
				}
			})
		})
	}
}

// What cannot be published is told and holds up neither the certificate nor what
// else is published; uninstalling deletes it, and nobody makes it anew.
func TestWhatIsNotThereToBePublishedHoldsUpNothing(t *testing.T) {
	for _, missing := range []string{caConfigMap, clientSecret} {
		t.Run(missing, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newClientWorld(t, missing)
				m := w.manager()
				time.Sleep(65 * time.Minute)
				if err := m.Ready(); err != nil {
					t.Errorf("Ready: %v", err)
				}
				if err := w.handshake(m, valName, 0); err != nil {
					t.Error(err)
				}
				if err := m.trouble(); !strings.Contains(err.Error(), namespace+"/"+missing+" does not exist") {
					t.Errorf("it says %v", err)
				}
				if missing == caConfigMap && w.pair() == nil {
					t.Error("without a ConfigMap there is no client certificate")
				}
				if missing == clientSecret && !holds([]byte(w.configMap().Data[caCertKey]), w.content().trusted()) {
					t.Error("without a Secret the CA is not published")
				}
				if n := w.server.Calls(); n["create configmaps"] > 1 || n["create secrets"] > 1 {
					t.Errorf("somebody makes them: %v", n)
				}
				if missing == caConfigMap {
					w.makeConfigMap()
				} else {
					w.makeClientSecret()
				}
				w.settled(m)
			})
		})
	}
}

// Rights that are missing are told, and tried again.
func TestTroubleWithPublishingIsToldAndTriedAgain(t *testing.T) {
	for resource, verb := range map[string]string{"configmaps": "patch", "secrets": "update"} {
		t.Run(verb+" "+resource, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newClientWorld(t)
				var mu sync.Mutex
				mended := false
				m := w.replica(w.server.Client(func(a clienttesting.Action) error {
					mu.Lock()
					defer mu.Unlock()
					name := ""
					if u, ok := a.(clienttesting.UpdateAction); ok {
						if s, ok := u.GetObject().(*corev1.Secret); ok {
							name = s.Name
						}
					}
					if mended || a.GetVerb() != verb || a.GetResource().Resource != resource || resource == "secrets" &&
						name != clientSecret {
						return nil
					}
					return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "x", errors.New("no such rule"))
				}), publishing)
				time.Sleep(65 * time.Minute)
				if err := m.trouble(); !strings.Contains(err.Error(), resource) || !strings.Contains(err.Error(), "forbidden") {
					t.Errorf("it says %v", err)
				}
				mu.Lock()
				mended = true
				mu.Unlock()
				w.settled(m)
			})
		})
	}
}

// Before there is a CA, nobody is accepted.
func TestNobodyIsAcceptedBeforeThereIsACA(t *testing.T) {
	w := newWorld(t, emptySecret())
	c := w.config(w.admin)
	publishing(&c)
	m, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	if pool := m.ClientCAs(); pool == nil || !pool.Equal(x509.NewCertPool()) {
		t.Error("a pool of no CA is expected: none at all would mean those of the system")
	}
}

func TestNewChecksWhatIsPublished(t *testing.T) {
	w := newWorld(t, emptySecret())
	c := w.config(w.admin)
	c.ClientSecret, c.Overlap = clientSecret, 2*365*24*time.Hour
	_, err := New(c)
	if err == nil || !strings.Contains(err.Error(), "the client certificate has no name") ||
		!strings.Contains(err.Error(), "more than a tenth of a CA's life") {
		t.Errorf("error %v", err)
	}
}
