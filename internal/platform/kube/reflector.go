package kube

import (
	"context"
	"reflect"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// maxBackoff bounds the time between two attempts to reach the API server. The
// usual 30 s would leave the ledger behind for that long after it came back; the
// API server defends itself against too many by its own means.
const maxBackoff = 2 * time.Second

// NewReflector returns a reflector that writes what lw delivers into store and
// is back within maxBackoff of the API server's return. A shared informer would
// take up to half a minute, and its own reflector cannot be told otherwise.
func NewReflector(name string, example runtime.Object, store cache.ReflectorStore, lw cache.ListerWatcher) *cache.Reflector {
	o := cache.ReflectorOptions{Name: name}
	// The libraries of Kubernetes 1.35 do not have the field, and wait up to half a minute.
	if field := reflect.ValueOf(&o).Elem().FieldByName("Backoff"); field.IsValid() {
		field.Set(reflect.ValueOf(&wait.Backoff{
			Duration: 200 * time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 5, Cap: maxBackoff,
		}))
	}
	return cache.NewReflectorWithOptions(lw, example, store, o)
}

// ListWatch is what a reflector reads by: the methods of a client for one kind of
// objects, of which the field selector chooses some, or all when it is empty.
func ListWatch[L runtime.Object](client any, selector string,
	list func(context.Context, metav1.ListOptions) (L, error),
	follow func(context.Context, metav1.ListOptions) (watch.Interface, error),
) cache.ListerWatcher {
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = selector
			return list(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = selector
			return follow(ctx, o)
		},
	}, client)
}
