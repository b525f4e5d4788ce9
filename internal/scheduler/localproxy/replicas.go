package localproxy

import (
	"cmp"
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"slices"
	"strconv"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
)

// httpsPort is the name of the port of the Service that is served over TLS.
const httpsPort = "https"

// Endpoints are the replicas behind a Service, as the API server lists them. While it
// is away, they are those that it listed last.
type Endpoints struct {
	factory informers.SharedInformerFactory
	lister  discoverylisters.EndpointSliceLister
}

// NewEndpoints returns the replicas of which nothing is known until Run.
func NewEndpoints(client kubernetes.Interface, namespace, service string) *Endpoints {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.LabelSelector = labels.Set{discoveryv1.LabelServiceName: service}.String()
		}))
	return &Endpoints{factory: factory, lister: factory.Discovery().V1().EndpointSlices().Lister()}
}

// Run follows the API server until ctx ends.
func (e *Endpoints) Run(ctx context.Context) {
	e.factory.Start(ctx.Done())
	<-ctx.Done()
	e.factory.Shutdown()
}

// Addresses returns host:port of the replicas, those first that are not about to end.
// Whether one is ready does not matter: a replica that follows is not while there is no
// leader, and holds binds until there is one.
func (e *Endpoints) Addresses() []string {
	found, err := e.lister.List(labels.Everything())
	if err != nil {
		return nil // a lister of a cache has no errors
	}
	type endpoint struct {
		address string
		ending  bool
	}
	var all []endpoint
	for _, slice := range found {
		at := slices.IndexFunc(slice.Ports, func(p discoveryv1.EndpointPort) bool {
			return ptr.Deref(p.Name, "") == httpsPort && p.Port != nil
		})
		if at < 0 {
			continue
		}
		port := strconv.Itoa(int(*slice.Ports[at].Port))
		for _, one := range slice.Endpoints {
			for _, host := range one.Addresses {
				all = append(all, endpoint{net.JoinHostPort(host, port), ptr.Deref(one.Conditions.Terminating, false)})
			}
		}
	}
	slices.SortFunc(all, func(a, b endpoint) int {
		if a.ending == b.ending {
			return cmp.Compare(a.address, b.address)
		}
		if a.ending {
			return 1
		}
		return -1
	})
	var out []string
	for _, one := range all {
		if !slices.Contains(out, one.address) { // two slices may list one while it moves
			out = append(out, one.address)
		}
	}
	return out
}

// NewProbe returns a function that asks a replica whether it answers, and leads. An
// answer of any status is one: a replica whose memory is used up by other clients
// answers them with 503, and kube-scheduler, which has a reserve, as before. It
// proves nothing of the replica, since no more than a connection of kube-scheduler's
// depends on it, and kube-scheduler checks the certificate itself.
func NewProbe() func(ctx context.Context, address string) (bool, error) {
	transport := &http.Transport{
		TLSClientConfig:     &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true}, //nolint:gosec // see above
		MaxIdleConnsPerHost: 1,
		DisableCompression:  true,
	}
	return func(ctx context.Context, address string) (bool, error) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+"/healthz", http.NoBody)
		if err != nil {
			return false, err
		}
		response, err := transport.RoundTrip(request)
		if err != nil {
			return false, err
		}
		defer response.Body.Close() //nolint:errcheck // nothing of it matters
		return response.Header.Get(extender.LeaderHeader) != "", nil
	}
}
