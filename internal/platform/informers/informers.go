// Package informers runs shared informers together, and says which of them have not read what they
// watch yet, and why.
package informers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/cache"
)

// ErrNotRead says that an informer has not read its first list.
var ErrNotRead = errors.New("not read yet")

// Group is informers that run together. The zero value has none.
type Group struct {
	all []*informer
	err error // of Add
}

// lastFailure is how long a failure counts if there is no other sign: client-go tries again after up
// to 60 s.
const lastFailure = 90 * time.Second

type informer struct {
	cache.SharedIndexInformer
	what string
	err  atomic.Value // the last failure, as watchError
	// handled says whether changed was called for all of the first list.
	handled cache.ResourceEventHandlerRegistration
}

// watchError is an error of a list or a watch, when it happened, and what had been read then.
type watchError struct {
	error
	at      time.Time
	version string
}

// Add adds an informer, which is not run yet; what names its objects in errors. Objects are reduced
// by trim, unless that is nil, and changed is called with the object before and after each change,
// nil where there is none.
func (g *Group) Add(what string, shared cache.SharedIndexInformer, trim cache.TransformFunc, changed func(before, after any)) {
	one := &informer{SharedIndexInformer: shared, what: what}
	g.all = append(g.all, one)
	err := shared.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		one.err.Store(watchError{err, time.Now(), shared.LastSyncResourceVersion()})
		cache.DefaultWatchErrorHandler(ctx, r, err)
	})
	var handlerErr error
	one.handled, handlerErr = shared.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { changed(nil, obj) },
		UpdateFunc: changed,
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			changed(obj, nil)
		},
	})
	g.err = errors.Join(g.err, err, handlerErr, shared.SetTransform(trim)) // of informers that run already
}

// Run runs all until ctx ends.
func (g *Group) Run(ctx context.Context) {
	var running sync.WaitGroup
	for _, one := range g.all {
		running.Go(func() { one.RunWithContext(ctx) })
	}
	running.Wait()
}

// Synced returns nil once all have read their first list, and changed was called for the objects in it.
// Otherwise it says which has not, and why: the error of the last failure, or ErrNotRead.
func (g *Group) Synced() error {
	if g.err != nil {
		return g.err
	}
	for _, one := range g.all {
		if one.handled.HasSynced() {
			continue
		}
		if failed, ok := one.err.Load().(watchError); ok {
			return fmt.Errorf("watch %s: %w", one.what, failed.error)
		}
		return fmt.Errorf("%w: %s", ErrNotRead, one.what)
	}
	return nil
}

// Failing returns why what was read may be old, nil if it is not: the error of an informer that has read
// nothing since its last failure. Failures are repeated, so one that is older than 90 s is over.
func (g *Group) Failing() error {
	for _, one := range g.all {
		failed, ok := one.err.Load().(watchError)
		if ok && time.Since(failed.at) < lastFailure && failed.version == one.LastSyncResourceVersion() {
			return fmt.Errorf("watch %s: %w", one.what, failed.error)
		}
	}
	return nil
}

// ByName selects the objects of one name.
func ByName(name string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	}
}
