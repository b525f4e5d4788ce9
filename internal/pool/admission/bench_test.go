package admission

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// BenchmarkAdmission measures reviews as the API server sees them: over TLS on
// loopback, several at once over connections that are kept, from sending the
// review to the last byte of the answer. Server and clients share the machine
// and the process, so the server alone does more than is reported here.
func BenchmarkAdmission(b *testing.B) {
	review := benchReview(b, guidePod())
	converted, _, err := Mutate(guidePod(), testNamespace, pool.DefaultCatalog(), testSettings())
	if err != nil {
		b.Fatal(err)
	}
	other := poolPod(container("a", corev1.ResourceRequirements{}))
	other.Annotations = nil
	for _, kind := range []struct {
		name, path string
		body       []byte
		http2      bool
	}{
		{"mutate/http2", "/mutate", review, true},
		{"mutate/http1", "/mutate", review, false},
		{"validate/http2", "/validate", benchReview(b, converted), true},
		{"unrelated/http2", "/mutate", benchReview(b, other), true},
	} {
		b.Run(kind.name, func(b *testing.B) {
			client, url := benchServer(b, kind.http2)
			var mu sync.Mutex
			var took []time.Duration
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				var own []time.Duration
				for pb.Next() {
					start := time.Now()
					if err := ask(client, url+kind.path, kind.body); err != nil {
						b.Error(err)
						return
					}
					own = append(own, time.Since(start))
				}
				mu.Lock()
				defer mu.Unlock()
				took = append(took, own...)
			})
			b.StopTimer()
			if len(took) == 0 {
				return
			}
			slices.Sort(took)
			b.ReportMetric(float64(len(took))/b.Elapsed().Seconds(), "reviews/s")
			b.ReportMetric(took[len(took)/2].Seconds()*1e3, "p50-ms")
			b.ReportMetric(took[len(took)*99/100].Seconds()*1e3, "p99-ms")
		})
	}
	// The heap after 10 000 reviews and after 100 000.
	b.Run("memory", func(b *testing.B) {
		client, url := benchServer(b, true)
		for b.Loop() {
			askMany(b, client, url+"/mutate", review, 10_000)
			early := heapMB()
			askMany(b, client, url+"/mutate", review, 90_000)
			late := heapMB()
			b.ReportMetric(early, "heap-MB-after-10k")
			b.ReportMetric(late, "heap-MB-after-100k")
			if late > early+4 {
				b.Errorf("the heap grows: %.1f MB after 10 000 reviews, %.1f MB after 100 000", early, late)
			}
		}
	})
}

// Memory does not grow with the number of reviews. The benchmark does the same
// for longer.
func TestMemoryIsFlat(t *testing.T) {
	client, url := benchServer(t, true)
	review := benchReview(t, guidePod())
	askMany(t, client, url+"/mutate", review, 200)
	early := heapMB()
	askMany(t, client, url+"/mutate", review, 1000)
	// One review of them has some 20 KB, so keeping any part of each would be seen.
	if late := heapMB(); late > early+4 {
		t.Errorf("the heap grows: %.1f MB after 200 reviews, %.1f MB after 1200", early, late)
	}
}

func heapMB() float64 {
	runtime.GC()
	runtime.GC() // what pools hold goes with the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc) / (1 << 20)
}

// benchServer serves a handler over TLS with a certificate of its own, and
// returns a client that trusts it.
func benchServer(b testing.TB, http2 bool) (client *http.Client, url string) {
	b.Helper()
	catalog, settings := pool.DefaultCatalog(), testSettings()
	handler, err := Handler(Config{
		Catalog: func() *pool.Catalog { return catalog }, Settings: func() Settings { return settings },
		Cluster: readyCluster(), Ready: func() error { return nil },
	})
	if err != nil {
		b.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(w, r.WithContext(klog.NewContext(r.Context(), logr.Discard())))
	}))
	server.EnableHTTP2 = http2
	server.TLS = &tls.Config{Certificates: []tls.Certificate{selfSigned(b)}, MinVersion: tls.VersionTLS12}
	server.StartTLS()
	b.Cleanup(server.Close)
	roots := x509.NewCertPool()
	roots.AddCert(server.Certificate())
	transport := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2: http2, MaxIdleConnsPerHost: 64,
	}
	b.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport}, server.URL
}

// selfSigned makes a certificate of the kind that the program makes.
func selfSigned(b testing.TB) tls.Certificate {
	b.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		b.Fatal(err)
	}
	template := x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(24 * time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, IsCA: true, BasicConstraintsValid: true,
	}
	certificate, err := x509.CreateCertificate(rand.Reader, &template, &template, key.Public(), key)
	if err != nil {
		b.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{certificate}, PrivateKey: key}
}

func benchReview(b testing.TB, pod *corev1.Pod) []byte {
	b.Helper()
	body, err := json.Marshal(reviewOf(podRequest(b, pod)))
	if err != nil {
		b.Fatal(err)
	}
	return body
}

// ask sends one review, which must be allowed.
func ask(client *http.Client, url string, body []byte) error {
	resp, err := client.Post(url, "application/json", bytes.NewReader(body)) //nolint:noctx // measured
	if err != nil {
		return err
	}
	answer, err := io.ReadAll(resp.Body)
	if err := errors.Join(err, resp.Body.Close()); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK || !bytes.Contains(answer, []byte(`"allowed":true`)) {
		return fmt.Errorf("status %d: %s", resp.StatusCode, answer)
	}
	return nil
}

func askMany(b testing.TB, client *http.Client, url string, body []byte, n int) {
	b.Helper()
	var all sync.WaitGroup
	workers := runtime.GOMAXPROCS(0) * 2
	for range workers {
		all.Go(func() {
			for range n / workers {
				if err := ask(client, url, body); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
}

// BenchmarkMutate measures the parts of a review of a pool pod.
func BenchmarkMutate(b *testing.B) {
	pod, catalog, settings := guidePod(), pool.DefaultCatalog(), testSettings()
	converted, _, err := Mutate(pod, testNamespace, catalog, settings)
	if err != nil {
		b.Fatal(err)
	}
	request := podRequest(b, pod)
	for name, part := range map[string]func() error{
		"decode": func() error { _, err := decodePod(request); return err },
		"decide": func() error { _, _, err := Mutate(pod, testNamespace, catalog, settings); return err },
		"patch":  func() error { _, err := makePatch(pod, converted); return err },
		"encode": func() error {
			_, err := json.Marshal(&admissionv1.AdmissionReview{Response: &admissionv1.AdmissionResponse{Patch: make([]byte, 4096)}})
			return err
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := part(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
