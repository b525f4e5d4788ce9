package kube

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
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
