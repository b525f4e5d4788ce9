package kube

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// Clients are the clients of one program, made from one configuration.
type Clients struct {
	Kubernetes kubernetes.Interface
	Metadata   metadata.Interface
	// Requests counts what the clients ask, for the program's metrics; nil where
	// nobody counts.
	Requests *metrics.API
}

// Connect makes clients from a kubeconfig file, or from the service account of
// the pod when the path is "". It does not contact the API server.
func Connect(kubeconfig, userAgent string) (Clients, error) {
	// BuildConfigFromFlags would do both, with a warning in every pod's log.
	load := rest.InClusterConfig
	if kubeconfig != "" {
		load = func() (*rest.Config, error) { return clientcmd.BuildConfigFromFlags("", kubeconfig) }
	}
	config, err := load()
	if err != nil {
		return Clients{}, fmt.Errorf("configuration of the Kubernetes client: %w", err)
	}
	return NewClients(config, userAgent)
}

// NewClients makes clients from a configuration. They speak protobuf, a third
// of JSON's size, and do not limit their own rate: a bind is one request, the
// scheduler decides how many there are, and the API server has its own means
// to say that they are too many. Nothing is compressed: the API server would compress
// each event of a watch on its own, which costs both sides more than it saves.
func NewClients(config *rest.Config, userAgent string) (Clients, error) {
	config = rest.CopyConfig(config)
	rest.AddUserAgent(config, userAgent)
	config.QPS = -1
	config.DisableCompression = true
	requests := metrics.NewAPI()
	config.Wrap(requests.Wrap)
	config.Wrap(withDeadline)

	meta, err := metadata.NewForConfig(config)
	if err != nil {
		return Clients{}, fmt.Errorf("client of node metadata: %w", err)
	}
	typed := rest.CopyConfig(config)
	typed.ContentType = runtime.ContentTypeProtobuf
	typed.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	client, err := kubernetes.NewForConfig(typed)
	if err != nil {
		return Clients{}, fmt.Errorf("client of the API server: %w", err)
	}
	return Clients{Kubernetes: client, Metadata: meta, Requests: requests}, nil
}
