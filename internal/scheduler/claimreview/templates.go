package claimreview

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	coreinformers "k8s.io/client-go/informers/core/v1"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/informers"
)

const (
	// lookEvery is how often templates are compared with the pods, besides each change.
	lookEvery = 5 * time.Second
	// linger is how long a template stays that no pod names: a Deployment may come back to it.
	linger = 10 * time.Minute
	// writeTimeout bounds one request.
	writeTimeout = 5 * time.Second
)

// Templates makes the ResourceClaimTemplates that translated pods name, and deletes those that no pod
// has named for a while. A pod that names one that is missing gets it, however it came to be missing.
type Templates struct {
	client  kubernetes.Interface
	leading func() bool
	now     func() time.Time
	changed chan struct{}

	mu sync.Mutex // guards what follows
	// wanted are the templates that pods name, users the pods that do, and made the UIDs of those
	// that exist. unused is since when no pod has named one.
	wanted map[types.NamespacedName]*Translation
	users  map[types.NamespacedName]map[types.UID]struct{}
	made   map[types.NamespacedName]types.UID
	unused map[types.NamespacedName]time.Time
}

// NewTemplates returns Templates that write while leading is true.
func NewTemplates(client kubernetes.Interface, leading func() bool, now func() time.Time) *Templates {
	return &Templates{
		client: client, leading: leading, now: now, changed: make(chan struct{}, 1),
		wanted: map[types.NamespacedName]*Translation{}, users: map[types.NamespacedName]map[types.UID]struct{}{},
		made: map[types.NamespacedName]types.UID{}, unused: map[types.NamespacedName]time.Time{},
	}
}

// watch adds what is followed to a group.
func (t *Templates) watch(group *informers.Group) {
	labelled := func(o *metav1.ListOptions) { o.LabelSelector = wire.UnitsLabel + "=" + wire.UnitsAsClaims }
	group.Add("translated pods", coreinformers.NewFilteredPodInformer(t.client, metav1.NamespaceAll, 0, nil, labelled), trimPod,
		func(before, after any) {
			pod, _ := before.(*corev1.Pod)
			now, _ := after.(*corev1.Pod)
			t.pod(pod, now)
		})
	group.Add("templates", resourceinformers.NewFilteredResourceClaimTemplateInformer(t.client, metav1.NamespaceAll, 0, nil, labelled), nil,
		func(before, after any) {
			template, _ := before.(*resourceapi.ResourceClaimTemplate)
			now, _ := after.(*resourceapi.ResourceClaimTemplate)
			t.template(template, now)
		})
}

// trimPod keeps what says which templates a pod names.
func trimPod(obj any) (any, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return obj, nil
	}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		ResourceVersion: pod.ResourceVersion,
		Annotations:     map[string]string{wire.UnitsAnnotation: pod.Annotations[wire.UnitsAnnotation]}}}, nil
}

// pod takes up a change of a pod; either may be nil.
func (t *Templates) pod(before, after *corev1.Pod) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, pod := range []*corev1.Pod{before, after} {
		if pod == nil {
			continue
		}
		all, err := Translations(pod.Annotations)
		if err != nil { // a user wrote it
			klog.Background().V(2).Info("Ignored a pod's annotation", "pod", klog.KObj(pod), "reason", err.Error())
		}
		for i := range all {
			key := types.NamespacedName{Namespace: pod.Namespace, Name: all[i].Template}
			if pod == before {
				if delete(t.users[key], pod.UID); len(t.users[key]) == 0 {
					delete(t.users, key)
					delete(t.wanted, key)
				}
				continue
			}
			if t.users[key] == nil {
				t.users[key] = map[types.UID]struct{}{}
			}
			t.users[key][pod.UID] = struct{}{}
			t.wanted[key] = &all[i]
		}
	}
	t.look()
}

// template takes up a change of a template; either may be nil.
func (t *Templates) template(before, after *resourceapi.ResourceClaimTemplate) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if before != nil {
		delete(t.made, types.NamespacedName{Namespace: before.Namespace, Name: before.Name})
	}
	if after != nil {
		t.made[types.NamespacedName{Namespace: after.Namespace, Name: after.Name}] = after.UID
	}
	t.look()
}

func (t *Templates) look() {
	select {
	case t.changed <- struct{}{}:
	default:
	}
}

// run keeps the templates until ctx ends.
func (t *Templates) run(ctx context.Context, synced func() error) {
	if !cache.WaitForCacheSync(ctx.Done(), func() bool { return synced() == nil }) {
		return
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		if t.leading() {
			if err := t.pass(ctx); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Could not keep the templates of translated pods; retrying")
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-t.changed:
		case <-tick.C:
		}
	}
}

// due returns which templates are to be made and deleted now.
func (t *Templates) due() (missing map[types.NamespacedName]*Translation, old map[types.NamespacedName]types.UID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	missing, old = map[types.NamespacedName]*Translation{}, map[types.NamespacedName]types.UID{}
	for key := range t.users {
		delete(t.unused, key)
		if _, there := t.made[key]; !there {
			missing[key] = t.wanted[key]
		}
	}
	maps.DeleteFunc(t.unused, func(key types.NamespacedName, _ time.Time) bool { _, there := t.made[key]; return !there })
	for key, uid := range t.made {
		if len(t.users[key]) > 0 {
			continue
		}
		since, known := t.unused[key]
		if !known {
			t.unused[key] = t.now()
		} else if t.now().Sub(since) >= linger {
			old[key] = uid
		}
	}
	return missing, old
}

// pass makes what is missing and deletes what is old.
func (t *Templates) pass(ctx context.Context) error {
	missing, old := t.due()
	var errs []error
	for key, translation := range missing {
		made, err := t.write(ctx, func(ctx context.Context) (types.UID, error) {
			made, err := t.client.ResourceV1().ResourceClaimTemplates(key.Namespace).Create(ctx, template(key.Namespace, translation),
				metav1.CreateOptions{})
			if err != nil {
				return "", err
			}
			return made.UID, nil
		})
		switch {
		case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause), apierrors.IsAlreadyExists(err):
			continue // its pods end soon; or it was just made and is not seen yet, or a user made it
		case err != nil:
			errs = append(errs, fmt.Errorf("create ResourceClaimTemplate %s: %w", key, err))
			continue
		}
		t.mu.Lock()
		if _, seen := t.made[key]; !seen {
			t.made[key] = made
		}
		t.mu.Unlock()
	}
	for key, uid := range old {
		_, err := t.write(ctx, func(ctx context.Context) (types.UID, error) {
			return "", t.client.ResourceV1().ResourceClaimTemplates(key.Namespace).Delete(ctx, key.Name,
				*metav1.NewPreconditionDeleteOptions(string(uid)))
		})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			errs = append(errs, fmt.Errorf("delete ResourceClaimTemplate %s: %w", key, err))
			continue
		}
		t.mu.Lock()
		delete(t.made, key)
		delete(t.unused, key)
		t.mu.Unlock()
	}
	return errors.Join(errs...)
}

func (t *Templates) write(ctx context.Context, do func(context.Context) (types.UID, error)) (types.UID, error) {
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	return do(ctx)
}
