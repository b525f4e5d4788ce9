package credentials

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
)

// Defaults of Config.
const (
	DefaultSourceNamespace = "kube-system"
	DefaultLinger          = 30 * time.Second
)

// Marks of copies.
const (
	ManagedByLabel = "divvy.dev/managed-by"
	ManagedBy      = "divvy-pool"
	// SourceAnnotation is namespace/name of the secret that was copied.
	SourceAnnotation = "divvy.dev/pool-source"
	// SourceVersionAnnotation is the resourceVersion of the source when its data
	// was copied last.
	SourceVersionAnnotation = "divvy.dev/pool-source-version"
	// SourceHashAnnotation is the SHA-256 of type and data of the source.
	SourceHashAnnotation = "divvy.dev/pool-source-hash"
)

// Config says what a Keeper brings where.
type Config struct {
	// Client reads and watches pods, namespaces and the four secrets, creates,
	// updates and deletes those secrets, and creates events.
	Client kubernetes.Interface
	// SourceNamespace holds the secrets to copy; "" for DefaultSourceNamespace.
	SourceNamespace string
	// Selector selects the namespaces that may get copies, by their labels; nil
	// for none, labels.Everything() for all.
	Selector labels.Selector
	// Linger is how long a copy stays after the last pod that used it; 0 for
	// DefaultLinger.
	Linger time.Duration
}

// Keeper brings secrets to namespaces. Its methods may be called by many
// goroutines.
type Keeper struct {
	config Config
}

// New returns a Keeper that does nothing until Run.
func New(c Config) *Keeper { return &Keeper{config: c} }

// Run keeps the copies until ctx ends, and returns nil then. What fails
// meanwhile is logged, counted, told to the pods that wait, and tried again.
func (k *Keeper) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Ready returns nil once pods, namespaces and secrets have been read.
func (k *Keeper) Ready() error { return errors.New("pods, namespaces and secrets are not read yet") }

// Allowed returns nil when the secrets are in the namespace or may be brought
// there, or says what an administrator has to do. It answers from memory.
func (k *Keeper) Allowed(namespace string, secrets []string) error {
	return errors.New("pods, namespaces and secrets are not read yet")
}

// Register adds the keeper's metrics to a registry.
func (k *Keeper) Register(prometheus.Registerer) error { return nil }
