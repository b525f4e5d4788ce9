package informers

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// listWatch lists before it watches.
type listWatch struct{ *cache.ListWatch }

func (listWatch) IsWatchListSemanticsUnSupported() bool { return true }

// TestFailing: a watch that breaks after the first list is reported, until objects are read again or
// the failure is not repeated.
func TestFailing(t *testing.T) {
	before := utilruntime.ErrorHandlers
	utilruntime.ErrorHandlers = nil                       //nolint:reassign // one of them sleeps until the time at which the process began
	defer func() { utilruntime.ErrorHandlers = before }() //nolint:reassign // as it was
	synctest.Test(t, func(t *testing.T) {
		var broken atomic.Bool
		version := "1"
		events := watch.NewFake()
		refused := errors.New("forbidden")
		shared := cache.NewSharedIndexInformer(listWatch{&cache.ListWatch{
			ListWithContextFunc: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
				if broken.Load() {
					return nil, refused
				}
				return &corev1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: version},
					Items: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "a"}}}}, nil
			},
			WatchFuncWithContext: func(context.Context, metav1.ListOptions) (watch.Interface, error) {
				if broken.Load() {
					return nil, refused
				}
				return events, nil
			},
		}}, &corev1.Node{}, 0, nil)
		var group Group
		handling := make(chan struct{})
		group.Add("nodes", shared, nil, func(_, _ any) { <-handling })
		go group.Run(t.Context())
		time.Sleep(time.Second)
		synctest.Wait()
		if err := group.Synced(); !errors.Is(err, ErrNotRead) {
			t.Errorf("before the first object was handled: %v", err)
		}
		close(handling)
		time.Sleep(time.Second)
		if err := errors.Join(group.Synced(), group.Failing()); err != nil {
			t.Fatalf("after the first list: %v", err)
		}
		broken.Store(true)
		events.Stop()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if err := group.Failing(); err == nil || !strings.Contains(err.Error(), "watch nodes: ") || !errors.Is(err, refused) {
			t.Errorf("a broken watch: %v", err)
		}
		if err := group.Synced(); err != nil {
			t.Errorf("it is not synced any more: %v", err)
		}
		events = watch.NewFake()
		broken.Store(false)
		time.Sleep(lastFailure)
		if err := group.Failing(); err != nil {
			t.Errorf("90 s after the last failure: %v", err)
		}
		broken.Store(true)
		events.Stop()
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		events, version = watch.NewFake(), "2"
		broken.Store(false)
		for group.Failing() != nil && shared.LastSyncResourceVersion() != "2" {
			time.Sleep(time.Second)
		}
		if err := group.Failing(); err != nil {
			t.Errorf("after objects were read again: %v", err)
		}
	})
}
