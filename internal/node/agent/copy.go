package agent

import (
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// objects is a copy of some of the API server's objects, as a reflector keeps
// it. It is safe for concurrent use.
type objects struct {
	cache.Store
	// strip drops what nobody here reads.
	strip cache.TransformFunc
	// changed is called after each change.
	changed func()
	// gone, when not nil, is told of each object that is gone, as it was last.
	gone func(any)
	// synced is true once a whole list was taken in.
	synced atomic.Bool
}

func newObjects(strip cache.TransformFunc, changed func()) *objects {
	return &objects{Store: cache.NewStore(cache.MetaNamespaceKeyFunc), strip: strip, changed: changed}
}

// Transformer lets the reflector strip what it collects before it is stored.
func (o *objects) Transformer() cache.TransformFunc { return o.strip }

// Add takes in a new object.
func (o *objects) Add(obj any) error { return o.Update(obj) }

// Update takes in a changed object.
func (o *objects) Update(obj any) error {
	kept, err := o.strip(obj)
	if err != nil {
		return err
	}
	defer o.changed()
	return o.Store.Update(kept)
}

// Delete takes out an object that is gone.
func (o *objects) Delete(obj any) error {
	defer o.changed()
	if o.gone != nil {
		o.gone(obj)
	}
	return o.Store.Delete(obj)
}

// Replace takes in a whole list.
func (o *objects) Replace(list []any, version string) error {
	kept := make([]any, 0, len(list))
	for _, obj := range list {
		one, err := o.strip(obj)
		if err != nil {
			return err
		}
		kept = append(kept, one)
	}
	defer o.changed()
	defer o.synced.Store(true)
	o.missing(kept)
	return o.Store.Replace(kept, version)
}

// missing tells of the objects that are not in a whole list.
func (o *objects) missing(list []any) {
	if o.gone == nil {
		return
	}
	listed := make(map[types.UID]bool, len(list))
	for _, obj := range list {
		if one, err := meta.Accessor(obj); err == nil {
			listed[one.GetUID()] = true
		}
	}
	for _, obj := range o.List() {
		if one, err := meta.Accessor(obj); err == nil && !listed[one.GetUID()] {
			o.gone(obj)
		}
	}
}
