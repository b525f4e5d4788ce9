// Package informers runs shared informers together, and says which of them have not read what they
// watch yet, and why.
package informers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

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

type informer struct {
	cache.SharedIndexInformer
	what string
	err  atomic.Value // the error of the last failure, as watchError
}

type watchError struct{ error }

// Add adds an informer, which is not run yet; what names its objects in errors. Objects are reduced
// by trim, unless that is nil, and changed is called with the object before and after each change,
// nil where there is none.
func (g *Group) Add(what string, shared cache.SharedIndexInformer, trim cache.TransformFunc, changed func(before, after any)) {
	one := &informer{SharedIndexInformer: shared, what: what}
	g.all = append(g.all, one)
	err := shared.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		one.err.Store(watchError{err})
		cache.DefaultWatchErrorHandler(ctx, r, err)
	})
	_, handlerErr := shared.AddEventHandler(cache.ResourceEventHandlerFuncs{
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

// Synced returns nil once all have read their first list. Otherwise it says which has not, and why: the
// error of the last failure, or ErrNotRead.
func (g *Group) Synced() error {
	if g.err != nil {
		return g.err
	}
	for _, one := range g.all {
		if one.HasSynced() {
			continue
		}
		if failed, ok := one.err.Load().(watchError); ok {
			return fmt.Errorf("watch %s: %w", one.what, failed.error)
		}
		return fmt.Errorf("%w: %s", ErrNotRead, one.what)
	}
	return nil
}

// ByName selects the objects of one name.
func ByName(name string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
	}
}
