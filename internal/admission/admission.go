package admission

import (
	"errors"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// Settings are what an administrator sets for all pods.
type Settings struct {
	// TotalMemoryMB is the memory of one GPU of the pool in MB (10^6 bytes); 0
	// when unknown, and then requests by memory are refused.
	TotalMemoryMB int64
	// ClientImage holds the clients whose catalog entry names no image.
	ClientImage string
	// ClientPullPolicy is the pull policy of that image.
	ClientPullPolicy corev1.PullPolicy
	// IgnoredNamespaces are left alone: kube-system, kube-public and Divvy's own.
	IgnoredNamespaces []string
}

// Denial is the error for a pod that is refused.
type Denial struct {
	// Problems are sentences, each naming container, key, value and what would be
	// accepted.
	Problems []string
	// Forbidden says that somebody must allow something, rather than that the pod
	// is wrong.
	Forbidden bool
}

func (d *Denial) Error() string { return "" }

// Mutate returns the pod converted, or the pod itself when there is nothing to
// do. It does not change its argument. namespace is that of the request. The
// warnings are for the user although the pod is admitted. A pod that must be
// refused gives a *Denial.
func Mutate(pod *corev1.Pod, namespace string, catalog *pool.Catalog, s Settings) (converted *corev1.Pod, warnings []string, err error) {
	return nil, nil, errors.New("not written")
}

// Cluster is what Validate asks about the cluster. Its methods answer from
// memory and may be called by many goroutines.
type Cluster interface {
	// LargestAllocatable returns, for every resource name, the largest allocatable
	// quantity of any node that is ready and not cordoned, in the resource's own
	// integer units (milli-units for cpu). It is nil when no node is known.
	LargestAllocatable() map[corev1.ResourceName]int64
	// QuotaLimits returns the hard limits on requests.bitfusion.io/gpu in a
	// namespace by the name of the ResourceQuota; scoped quotas are left out.
	QuotaLimits(namespace string) map[string]int64
	// CredentialsAllowed returns nil when the pool's secrets are or may be brought
	// to the namespace, or says what an administrator has to do.
	CredentialsAllowed(namespace string, secrets []string) error
}

// Validate refuses a pod that uses the pool in a way that cannot work. It is
// called after all mutation. Its error is a *Denial.
func Validate(pod *corev1.Pod, namespace string, catalog *pool.Catalog, s Settings, cluster Cluster) (warnings []string, err error) {
	return nil, errors.New("not written")
}

// Config is what Handler needs.
type Config struct {
	// Catalog and Settings return what holds now; they may be called at any time.
	Catalog  func() *pool.Catalog
	Settings func() Settings
	Cluster  Cluster
	// Ready returns nil when answers are right.
	Ready    func() error
	Registry prometheus.Registerer
}

// Handler serves POST /mutate and POST /validate (AdmissionReview v1 and
// v1beta1, at most MaxBody bytes), GET /healthz and GET /readyz.
func Handler(c Config) (http.Handler, error) { return nil, errors.New("not written") }

// MaxBody bounds the body of a review, in bytes. The API server takes objects of
// up to 3 MiB, and a review may hold two.
const MaxBody = 8 << 20
