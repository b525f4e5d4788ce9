package dra

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

// settleInterval is the pause between two looks at what containers use.
const settleInterval = 5 * time.Second

// rememberedFor is how long what the containers of a pod use is remembered from the Prepare on: a watch that
// is later than that delivers nothing at all.
const rememberedFor = time.Minute

// writer makes containers get what claims of a vendor hold, by CDI specifications. It is safe for
// concurrent use.
type writer struct {
	specs   specs
	keeper  Keeper
	vendor  string
	misused func(Use, error)

	mu sync.Mutex // held while it changes what containers get
	// prepared are the pods, by UID, whose claims were prepared lately; guarded by mu. The pods that others
	// have read just before may not have them, and their claims would be arranged as if no one used them.
	prepared map[string]preparedPod
}

// preparedPod is what the containers of a pod use of claims that were prepared at that time.
type preparedPod struct {
	uses []Use
	at   time.Time
}

// remember notes what the containers of these pods use. The caller holds mu.
func (w *writer) remember(uses []Use, pods []string) {
	if w.prepared == nil {
		w.prepared = map[string]preparedPod{}
	}
	for _, uid := range pods {
		w.prepared[uid] = preparedPod{slices.DeleteFunc(slices.Clone(uses), func(u Use) bool { return u.PodUID != uid }), time.Now()}
	}
}

// withPrepared returns the uses, and those of the pods among them that were prepared lately and are missing. The
// caller holds mu.
func (w *writer) withPrepared(uses []Use) []Use {
	maps.DeleteFunc(w.prepared, func(_ string, p preparedPod) bool { return time.Since(p.at) >= rememberedFor })
	for uid, p := range w.prepared {
		if !slices.ContainsFunc(uses, func(u Use) bool { return u.PodUID == uid }) {
			uses = append(uses, p.uses...)
		}
	}
	return uses
}

// forgetUsers drops what is remembered of the pods that use a claim. The caller holds mu.
func (w *writer) forgetUsers(key alloc.ClaimKey) {
	for _, claim := range w.keeper.Claims(w.vendor) {
		if claim.Key() != key {
			continue
		}
		maps.DeleteFunc(w.prepared, func(_ string, p preparedPod) bool {
			return slices.ContainsFunc(p.uses, func(u Use) bool {
				return u.Namespace == claim.Namespace &&
					slices.ContainsFunc(u.Requests, func(r UsedRequest) bool { return r.Claim == claim.Name })
			})
		})
	}
}

// describeAll writes the specifications of the claims that were prepared: containers that start
// again need them. One that cannot be written stays as it is.
func (w *writer) describeAll(ctx context.Context) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, claim := range w.keeper.Claims(w.vendor) {
		if !claim.Prepared {
			continue
		}
		if err := w.describe(&claim); err != nil {
			klog.FromContext(ctx).Error(err, "Could not rewrite the CDI specification of a claim", "claim", klog.KRef(claim.Namespace,
				claim.Name))
		}
	}
}

// describe writes the CDI specification of a claim.
func (w *writer) describe(claim *alloc.Claim) error {
	spec, err := Spec(claim, func(own, all []alloc.Portion) (cdispecs.ContainerEdits, error) {
		return w.keeper.Edits(claim.Vendor, own, all)
	})
	if err != nil {
		return err
	}
	return w.specs.write(claim.Key(), spec)
}

// arrange makes containers get what the claims hold, which were recorded for them, beside what they
// have of other claims.
func (w *writer) arrange(ctx context.Context, held []alloc.Claim) error {
	fresh := map[alloc.ClaimKey]bool{}
	var pods []string
	for i := range held {
		fresh[held[i].Key()] = !held[i].Prepared
		pods = append(pods, held[i].Pods...)
	}
	uses, err := w.keeper.Uses(ctx, pods...)
	if err != nil {
		return fmt.Errorf("find out which containers use %s: %w", names(held), err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	uses = w.withPrepared(uses)
	claims := slices.DeleteFunc(w.keeper.Claims(w.vendor), func(c alloc.Claim) bool { return !c.Prepared && !fresh[c.Key()] })
	sized := w.keeper.Sized(w.vendor)
	a := arrange(claims, uses, sized)
	for i := range a.wrong {
		if a.uses(&a.wrong[i].use, fresh) {
			return a.wrong[i].Error(wire.Driver(w.vendor))
		}
	}
	for i := range uses {
		if a.uses(&uses[i], fresh) {
			if err := a.rejects(&uses[i], sized); err != nil {
				return err
			}
		}
	}
	if err := w.apply(ctx, a); err != nil {
		return fmt.Errorf("%s: %w", names(held), err)
	}
	w.remember(uses, pods)
	for i := range held {
		if held[i].Prepared && !w.specs.exists(held[i].Key()) {
			if err := w.describe(&held[i]); err != nil {
				return fmt.Errorf("%s: %w", names(held[i:i+1]), err)
			}
		}
	}
	return nil
}

// names names claims in errors.
func names(claims []alloc.Claim) string {
	var out []string
	for i := range claims {
		out = append(out, "claim "+claims[i].Namespace+"/"+claims[i].Name)
	}
	return strings.Join(out, ", ")
}

// apply makes containers get what was arranged. If it fails, those with claims that were prepared
// before get what they got. The caller holds mu.
func (w *writer) apply(ctx context.Context, a *arrangement) error {
	changed := a.changed()
	if len(changed) == 0 {
		return nil
	}
	var err error
	for i := 0; i < len(changed) && err == nil; i++ {
		err = w.describe(&changed[i])
	}
	if err == nil {
		err = w.keeper.Prepared(ctx, changed)
	}
	if err == nil {
		return nil
	}
	failed := []error{err}
	var before []alloc.Claim
	for i := range a.claims {
		c := &a.claims[i]
		if c.Prepared && slices.ContainsFunc(changed, func(other alloc.Claim) bool { return other.Key() == c.Key() }) {
			before = append(before, *c)
			failed = append(failed, w.describe(c))
		}
	}
	if len(before) > 0 {
		failed = append(failed, w.keeper.Prepared(ctx, before))
	}
	return errors.Join(failed...)
}

// settleAlways arranges again what containers get with claims that are prepared, every few seconds:
// kubelet does not ask when a pod uses claims that are prepared for another one.
func (w *writer) settleAlways(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(settleInterval):
		}
		if len(w.keeper.Claims(w.vendor)) == 0 {
			continue
		}
		if err := w.settle(ctx); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Could not rewrite the CDI specifications of claims")
		}
	}
}

func (w *writer) settle(ctx context.Context) error {
	uses, err := w.keeper.Uses(ctx)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	claims := slices.DeleteFunc(w.keeper.Claims(w.vendor), func(c alloc.Claim) bool { return !c.Prepared })
	a := arrange(claims, w.withPrepared(uses), w.keeper.Sized(w.vendor))
	for i := range a.wrong {
		if w.misused != nil {
			w.misused(a.wrong[i].use, a.wrong[i].Error(wire.Driver(w.vendor)))
		}
	}
	return w.apply(ctx, a)
}

// undo takes back what a Prepare that failed has done. A claim that was prepared before stays
// recorded: containers may have its devices.
func (w *writer) undo(ctx context.Context, held []alloc.Claim) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	var failed []error
	for i := range held {
		if !held[i].Prepared {
			failed = append(failed, w.specs.remove(held[i].Key()), w.keeper.Release(ctx, held[i].Key()))
		}
	}
	return errors.Join(failed...)
}

// forget removes what is known of a claim.
func (w *writer) forget(ctx context.Context, key alloc.ClaimKey) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.specs.remove(key); err != nil {
		return err
	}
	w.forgetUsers(key)
	return w.keeper.Release(ctx, key)
}
