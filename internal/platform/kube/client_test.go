package kube

import (
	"context"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

func TestConnect(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := Connect("", "test"); err == nil || !strings.Contains(err.Error(), "configuration of the Kubernetes client") {
		t.Errorf("outside a cluster: %v", err)
	}
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if _, err := Connect(file, "test"); err == nil {
		t.Error("a missing file was taken")
	}
	content := `{"clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}],"contexts":[{"name":"x","context":{"cluster":"c"}}],` +
		`"current-context":"x"}`
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	clients, err := Connect(file, "test")
	if err != nil || clients.Kubernetes == nil || clients.Metadata == nil {
		t.Errorf("Connect = %+v, %v", clients, err)
	}
}

// One configuration may serve several programs' clients.
func TestNewClientsLeavesConfigAlone(t *testing.T) {
	config := &rest.Config{Host: "http://127.0.0.1:1", QPS: 7}
	if _, err := NewClients(config, "test"); err != nil {
		t.Fatal(err)
	}
	if config.QPS != 7 || config.ContentType != "" || config.UserAgent != "" {
		t.Errorf("the configuration was changed: %+v", config)
	}
	if _, err := NewClients(&rest.Config{Host: "://"}, "test"); err == nil {
		t.Error("a host that is none was taken")
	}
}

// The API server would compress each event of a watch on its own.
func TestNothingIsCompressed(t *testing.T) {
	var encodings []string
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		encodings = r.Header.Values("Accept-Encoding")
		w.WriteHeader(http.StatusTeapot)
	}))
	defer server.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	clients, err := NewClients(&rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAData: ca}}, "test")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := clients.Kubernetes.CoreV1().Pods("").Watch(t.Context(), metav1.ListOptions{}); err == nil ||
		!strings.Contains(err.Error(), "418") {
		t.Errorf("the watch did not reach the server: %v", err)
	}
	for _, encoding := range encodings {
		if encoding != "identity" {
			t.Errorf("the server may answer in encoding %q", encoding)
		}
	}
}

// An option reaches the connections, and clients work with it.
func TestCorked(t *testing.T) {
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":"one","namespace":"team","uid":"u"}}`))
	}))
	defer server.Close()
	config := clientcmdapi.NewConfig()
	config.Clusters["c"] = &clientcmdapi.Cluster{Server: server.URL,
		CertificateAuthorityData: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})}
	config.Contexts["x"] = &clientcmdapi.Context{Cluster: "c"}
	config.CurrentContext = "x"
	file := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, file); err != nil {
		t.Fatal(err)
	}
	dials := 0
	counted := func(config *rest.Config) {
		dial := config.Dial
		config.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			dials++
			return dial(ctx, network, address)
		}
	}
	clients, err := Connect(file, "test", Corked, counted)
	if err != nil {
		t.Fatal(err)
	}
	pod, err := clients.Kubernetes.CoreV1().Pods("team").Get(t.Context(), "one", metav1.GetOptions{})
	if err != nil || pod.UID != "u" || dials != 1 {
		t.Errorf("pod %+v, %v, over %d connections of ours", pod, err, dials)
	}
}
