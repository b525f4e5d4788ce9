//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// TestBindOverTLS asks as a kube-scheduler elsewhere does, at the Service: with the
// certificate that is published it may bind, without one it may not.
func TestBindOverTLS(t *testing.T) {
	ctx := begin(t, guide)
	service, err := lab.Client.CoreV1().Services(product.Namespace).Get(ctx, testenv.Extender, metav1.GetOptions{})
	must(t, err)
	ca, err := lab.Client.CoreV1().ConfigMaps(product.Namespace).Get(ctx, "divvy-extender-ca", metav1.GetOptions{})
	must(t, err)
	secret, err := lab.Client.CoreV1().Secrets(product.Namespace).Get(ctx, "divvy-extender-client", metav1.GetOptions{})
	must(t, err)
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	must(t, err)
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(ca.Data["ca.crt"])) {
		t.Fatalf("no CA is published: %q", ca.Data)
	}

	// Nobody but this test places the pod.
	pod := one("bound-over-tls", 4)
	pod.Spec.SchedulerName = "this-test"
	waiting := create(t, pod)[0]
	bind := func(certificates ...tls.Certificate) string {
		t.Helper()
		body, err := json.Marshal(extenderv1.ExtenderBindingArgs{
			PodName: waiting.Name, PodNamespace: waiting.Namespace, PodUID: waiting.UID, Node: layout.NodeName,
		})
		must(t, err)
		transport := &http.Transport{TLSClientConfig: &tls.Config{
			MinVersion: tls.VersionTLS12, RootCAs: roots, Certificates: certificates,
			ServerName: testenv.Extender + "." + product.Namespace + ".svc",
		}}
		defer transport.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		request, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+service.Spec.ClusterIP+":32765/gcushare-scheduler/bind",
			bytes.NewReader(body))
		must(t, err)
		request.Header.Set("Content-Type", "application/json")
		response, err := (&http.Client{Transport: transport}).Do(request)
		must(t, err)
		defer response.Body.Close() //nolint:errcheck // read to its end
		var result extenderv1.ExtenderBindingResult
		must(t, json.NewDecoder(response.Body).Decode(&result))
		return result.Error
	}
	if got := bind(); !strings.Contains(got, "bind rejected") || !strings.Contains(got, "divvy-extender-client") {
		t.Errorf("without a certificate: %q", got)
	}
	if now, err := lab.Pods.API.Get(ctx, waiting.Name, metav1.GetOptions{}); err != nil || now.Spec.NodeName != "" {
		t.Fatalf("the pod is on node %q: %v", now.Spec.NodeName, err)
	}
	if got := bind(pair); got != "" {
		t.Fatalf("with the certificate: %s", got)
	}
	running(t, waiting.Name)
	wantCards(t, map[string]int{waiting.Name: 0})
}
