package secrets

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/retry"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/informers"
	"github.com/divvy-gpu/divvy/internal/pool"
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

const (
	requestTimeout = 10 * time.Second
	// workers look after namespaces at once.
	workers = 4
	// newNamespaceWait is how long Allowed waits for a namespace that it has not
	// heard of: it was made just now, or there would be no pod in it.
	newNamespaceWait = time.Second
	// shownWait is how long the watch may take to show a copy that was made, until it is
	// tried again.
	shownWait = 5 * time.Second
)

// secretNames are the secrets that may be copied.
var secretNames = []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret}

// Config says what a Keeper brings where.
type Config struct {
	// Client lists and watches pods, namespaces and the four secrets; it gets,
	// creates, updates and deletes those secrets, and creates events.
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
	config    Config
	metrics   *metrics
	queue     workqueue.TypedRateLimitingInterface[string] // of namespaces
	stores    stores
	informers informers.Group
	events    flowcontrol.RateLimiter

	mu sync.Mutex // guards what follows
	// unused says since when nobody has used a copy, by namespace/name.
	unused map[string]time.Time
	// made says when copies were made that the watch has not shown yet, by
	// namespace/name: otherwise each pod that comes until then would lead to a request.
	made map[string]time.Time
	// told holds what pods have been told, by UID.
	told map[string]map[string]bool
}

// New returns a Keeper that does nothing until Run.
func New(c Config) *Keeper {
	c.SourceNamespace, c.Linger = cmp.Or(c.SourceNamespace, DefaultSourceNamespace), cmp.Or(c.Linger, DefaultLinger)
	if c.Selector == nil {
		c.Selector = labels.Nothing()
	}
	k := &Keeper{
		config: c,
		events: flowcontrol.NewTokenBucketRateLimiter(5, 50),
		unused: map[string]time.Time{},
		made:   map[string]time.Time{},
		told:   map[string]map[string]bool{},
	}
	k.stores = newStores(c)
	k.watch()
	k.metrics = newMetrics(k.copies)
	return k
}

// Run keeps the copies until ctx ends, and returns nil then. What fails
// meanwhile is logged, counted, told to the pods that wait, and tried again. It
// is called once.
func (k *Keeper) Run(ctx context.Context) error {
	k.queue = workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](200*time.Millisecond,
		30*time.Second))
	var parts sync.WaitGroup
	parts.Go(func() { k.informers.Run(ctx) })
	parts.Go(func() {
		<-ctx.Done()
		k.queue.ShutDown()
	})
	for range workers {
		parts.Go(func() {
			if !cache.WaitForCacheSync(ctx.Done(), func() bool { return k.Ready() == nil }) {
				return
			}
			for k.work(ctx) {
			}
		})
	}
	parts.Wait()
	return nil
}

// work looks after one namespace; it returns false when there will be no more.
func (k *Keeper) work(ctx context.Context) bool {
	namespace, stop := k.queue.Get()
	if stop {
		return false
	}
	defer k.queue.Done(namespace)
	again, err := k.reconcile(ctx, namespace)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		klog.FromContext(ctx).Error(err, "Could not reconcile the credentials; retrying", "namespace", namespace)
		k.queue.AddRateLimited(namespace)
	default:
		k.queue.Forget(namespace)
		if again > 0 {
			k.queue.AddAfter(namespace, again)
		}
	}
	return true
}

// reconcile makes, updates and removes the copies in a namespace. It returns
// after how long to look again; 0 when something has to change first.
func (k *Keeper) reconcile(ctx context.Context, namespace string) (again time.Duration, err error) {
	if namespace == k.config.SourceNamespace {
		return 0, nil
	}
	ns := k.stores.namespace(namespace)
	if ns == nil || ns.terminating {
		k.forget(namespace)
		return 0, nil
	}
	allowed := k.config.Selector.Matches(labels.Set(ns.labels))
	pods := k.stores.podsOf(namespace)
	var errs []error
	for _, name := range secretNames {
		var users []*pod
		for _, p := range pods {
			if !p.ended && slices.Contains(p.secrets, name) {
				users = append(users, p)
			}
		}
		wait, err := k.keep(ctx, namespace, name, users, allowed)
		if err != nil {
			errs = append(errs, err)
		}
		if wait > 0 && (again == 0 || wait < again) {
			again = wait
		}
	}
	return again, errors.Join(errs...)
}

// keep sees to one secret in a namespace.
func (k *Keeper) keep(ctx context.Context, namespace, name string, users []*pod, allowed bool) (again time.Duration, err error) {
	wait := k.unshown(namespace, name) // before looking, as the watch may show it just now
	have := k.stores.secret(name, namespace)
	if have != nil && !have.ours {
		k.setUnused(namespace, name, false)
		return 0, nil // It is somebody else's, and what pods get.
	}
	if !allowed {
		k.setUnused(namespace, name, false)
		if have != nil {
			return 0, k.remove(ctx, have, "the namespace is not allowed to use the pool")
		}
		return k.tell(ctx, users, events.PoolNotAllowed, name,
			fmt.Sprintf("Secret %s is not copied to this namespace: %v", name, k.notAllowed(namespace, []string{name})))
	}
	if len(users) == 0 {
		if have == nil {
			k.setUnused(namespace, name, false)
			return 0, nil
		}
		if left := k.config.Linger - time.Since(k.setUnused(namespace, name, true)); left > 0 {
			return left, nil
		}
		if err := k.remove(ctx, have, "no pod uses it any longer"); err != nil {
			return 0, err
		}
		k.setUnused(namespace, name, false)
		return 0, nil
	}

	k.setUnused(namespace, name, false)
	source := k.stores.secret(name, k.config.SourceNamespace)
	switch {
	case source == nil:
		// A copy stays: pods may be mounting it, and tokens are replaced by deleting
		// the secret and making it again.
		if have != nil {
			return 0, nil
		}
		return k.tell(ctx, users, events.PoolCredentialsMissing, name, fmt.Sprintf(
			"Secret %s/%s does not exist, so it cannot be copied to this namespace; create it from the pool's token with: kubectl divvy "+
				"pool import TOKEN.tar -n %s",
			k.config.SourceNamespace, name, k.config.SourceNamespace))
	case have == nil && wait > 0:
		return wait, nil
	case have == nil:
		err = k.create(ctx, source, namespace)
	case have.hash != source.hash || have.annotations[SourceHashAnnotation] != source.hash:
		err = k.update(ctx, source, have)
	}
	if err == nil {
		return 0, nil
	}
	_, tellErr := k.tell(ctx, users, events.PoolCredentialsFailed, name, fmt.Sprintf("Secret %s cannot be copied to this namespace: %v",
		name, err))
	return 0, errors.Join(err, tellErr)
}

func (k *Keeper) create(ctx context.Context, source *secret, namespace string) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	k.setMade(namespace, source.name, true) // before the watch can show it
	_, err := k.config.Client.CoreV1().Secrets(namespace).Create(ctx, k.copyOf(source, namespace), metav1.CreateOptions{})
	switch {
	case err == nil:
		k.metrics.copies.WithLabelValues(resultMade).Inc()
		klog.FromContext(ctx).Info("Copied a secret to a namespace", "namespace", namespace, "secret", source.name)
		return nil
	case apierrors.IsAlreadyExists(err):
		return nil // The watch will show what there is instead.
	}
	k.setMade(namespace, source.name, false)
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) || isNamespaceGone(err, namespace) {
		return nil // The watch will show that.
	}
	k.metrics.copies.WithLabelValues(resultFailed).Inc()
	return fmt.Errorf("create secret %s/%s: %w", namespace, source.name, err)
}

// isNamespaceGone reports whether the API server said that there is no such
// namespace.
func isNamespaceGone(err error, namespace string) bool {
	var status apierrors.APIStatus
	return apierrors.IsNotFound(err) && errors.As(err, &status) && status.Status().Details != nil &&
		status.Status().Details.Kind == "namespaces" && status.Status().Details.Name == namespace
}

// update writes the source's data into a copy.
func (k *Keeper) update(ctx context.Context, source, have *secret) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	api := k.config.Client.CoreV1().Secrets(have.namespace)
	changed, replace := false, false
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		changed, replace = false, false
		now, err := api.Get(ctx, have.name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil // The watch will tell, and a new one is made.
		}
		if err != nil {
			return err
		}
		if !k.ours(now) || hashOf(now) == source.hash && now.Annotations[SourceHashAnnotation] == source.hash {
			return nil
		}
		want := k.copyOf(source, have.namespace)
		if copyType(now.Type) != want.Type || now.Immutable != nil && *now.Immutable {
			replace = true // Neither can be changed.
			return api.Delete(ctx, now.Name, precisely(now.UID, now.ResourceVersion))
		}
		now.Data = want.Data
		for key, value := range want.Annotations {
			now.Annotations[key] = value
		}
		_, err = api.Update(ctx, now, metav1.UpdateOptions{})
		changed = err == nil
		return err
	})
	if err != nil {
		k.metrics.copies.WithLabelValues(resultFailed).Inc()
		return fmt.Errorf("update secret %s/%s: %w", have.namespace, have.name, err)
	}
	if replace {
		return k.create(ctx, source, have.namespace)
	}
	if changed {
		k.metrics.copies.WithLabelValues(resultUpdated).Inc()
		klog.FromContext(ctx).Info("Updated a secret from its source", "namespace", have.namespace, "secret", have.name)
	}
	return nil
}

// remove deletes a copy, and nothing that took its place meanwhile.
func (k *Keeper) remove(ctx context.Context, have *secret, why string) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	err := k.config.Client.CoreV1().Secrets(have.namespace).Delete(ctx, have.name, precisely(have.uid, have.resourceVersion))
	switch {
	case err == nil:
		k.metrics.copies.WithLabelValues(resultRemoved).Inc()
		klog.FromContext(ctx).Info("Removed a secret from a namespace", "namespace", have.namespace, "secret", have.name, "why", why)
		return nil
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return nil // The watch will show what there is instead.
	}
	k.metrics.copies.WithLabelValues(resultFailed).Inc()
	return fmt.Errorf("delete secret %s/%s: %w", have.namespace, have.name, err)
}

// setUnused notes whether a copy is without users, and returns since when.
func (k *Keeper) setUnused(namespace, name string, unused bool) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	key := namespace + "/" + name
	if !unused {
		delete(k.unused, key)
		return time.Time{}
	}
	if _, ok := k.unused[key]; !ok {
		k.unused[key] = time.Now()
	}
	return k.unused[key]
}

// setMade notes whether there is a copy that the watch has not shown yet.
func (k *Keeper) setMade(namespace, name string, made bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if made {
		k.made[namespace+"/"+name] = time.Now()
	} else {
		delete(k.made, namespace+"/"+name)
	}
}

// unshown is how much longer the watch may take to show a copy that was made; 0 or
// less when none is expected.
func (k *Keeper) unshown(namespace, name string) time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	return time.Until(k.made[namespace+"/"+name].Add(shownWait))
}

func (k *Keeper) forget(namespace string) {
	for _, name := range secretNames {
		k.setUnused(namespace, name, false)
		k.setMade(namespace, name, false)
	}
}

// Ready returns nil once pods, namespaces and secrets have been read.
func (k *Keeper) Ready() error {
	if err := k.informers.Synced(); err != nil {
		return fmt.Errorf("credentials: %w", err)
	}
	return nil
}

// Allowed returns nil when the secrets are in the namespace or may be brought
// there, or says what an administrator has to do. It answers from memory; about
// a namespace it has not heard of it waits up to a second to hear.
func (k *Keeper) Allowed(namespace string, secrets []string) error {
	if err := k.Ready(); err != nil {
		return err
	}
	if namespace == k.config.SourceNamespace {
		return nil
	}
	var missing []string
	for _, name := range secrets {
		if have := k.stores.secret(name, namespace); have == nil || have.ours {
			missing = append(missing, name)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	ns := k.stores.namespace(namespace)
	for deadline := time.Now().Add(newNamespaceWait); ns == nil && time.Now().Before(deadline); ns = k.stores.namespace(namespace) {
		<-time.After(10 * time.Millisecond)
	}
	if ns == nil {
		return fmt.Errorf("namespace %q is unknown", namespace)
	}
	if k.config.Selector.Matches(labels.Set(ns.labels)) {
		return nil
	}
	return k.notAllowed(namespace, missing)
}

// notAllowed is the error about a namespace that the selector does not match.
func (k *Keeper) notAllowed(namespace string, missing []string) error {
	what := fmt.Sprintf("namespace %q is not allowed to use the pool, so its credentials (%s) are not copied there", namespace,
		strings.Join(missing, ", "))
	requirements, selectable := k.config.Selector.Requirements()
	if !selectable {
		return fmt.Errorf("%s: the configuration allows no namespace; an administrator can create the secrets there", what)
	}
	command := "kubectl label namespace " + namespace
	for _, r := range requirements {
		switch {
		case (r.Operator() == selection.Equals || r.Operator() == selection.DoubleEquals || r.Operator() == selection.In) &&
			r.Values().Len() > 0:
			command += " " + r.Key() + "=" + r.Values().List()[0]
		default:
			return fmt.Errorf("%s: an administrator must label it so that %q matches", what, k.config.Selector.String())
		}
	}
	return fmt.Errorf("%s; an administrator can allow it with: %s", what, command)
}

// Register adds the keeper's metrics to a registry.
func (k *Keeper) Register(r prometheus.Registerer) error { return k.metrics.register(r) }
