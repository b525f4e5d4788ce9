package claimreview

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// reservationTime is how long a claim that was admitted counts before it is seen. A request of the API
// server that takes longer fails as a rule.
const reservationTime = 30 * time.Second

// amounts are units by resource.
type amounts map[accel.Resource]int64

// heldClaim is what a claim counts as.
type heldClaim struct {
	types.NamespacedName
	amounts amounts
}

// controllers are the users that create the claims of pods from templates: kube-controller-manager with
// an account for each of its controllers, or with one for all.
var controllers = []string{"system:serviceaccount:kube-system:resource-claim-controller", "system:kube-controller-manager"}

// podClaimOf returns what a claim is made for, where the user is one whose word counts.
func podClaimOf(claim *resourceapi.ResourceClaim, user string) kube.PodClaim {
	if !slices.Contains(controllers, user) {
		return kube.PodClaim{}
	}
	return kube.PodClaimOf(claim)
}

// pendingClaim is a claim that was admitted and not seen yet.
type pendingClaim struct {
	until time.Time // it counts
	of    kube.PodClaim
}

// heldQuota is the limits of a ResourceQuota, and what of them pods use by units.
type heldQuota struct{ hard, used amounts }

// Quotas bounds the memory of the claims of each namespace by the ResourceQuotas for units. It is safe
// for concurrent use.
type Quotas struct {
	units []Unit
	now   func() time.Time

	mu     sync.Mutex // guards what follows
	claims map[types.UID]heldClaim
	// names are the claims by name: no other of the same name is created beside them.
	names   map[types.NamespacedName]types.UID
	pending map[types.UID]pendingClaim
	sums    map[string]amounts              // of claims, by namespace
	quotas  map[string]map[string]heldQuota // by namespace and name
}

// NewQuotas returns Quotas that know no object yet.
func NewQuotas(units []Unit, now func() time.Time) *Quotas {
	return &Quotas{
		units: units, now: now,
		claims: map[types.UID]heldClaim{}, names: map[types.NamespacedName]types.UID{}, pending: map[types.UID]pendingClaim{},
		sums: map[string]amounts{}, quotas: map[string]map[string]heldQuota{},
	}
}

// need returns how many units a claim counts as. The error says which requests have no amount.
func (u Unit) need(devices *resourceapi.DeviceClaim) (sum int64, err error) {
	most := map[string]int64{} // of the alternatives of a request
	var errs field.ErrorList
	for path, r := range requestsOf(field.NewPath("spec", "devices"), devices) {
		if vendorOf(r.class) != u.Vendor || !hasMemory(r.class) || r.admin {
			continue
		}
		bytes, named := memoryOf(r)
		switch {
		case !named:
			errs = append(errs, field.Required(path.Child("capacity", "requests").Key(wire.MemoryCapacity), fmt.Sprintf(
				"the namespace has a ResourceQuota for %s, so each claim of %s must say how much memory it needs", u.Resource, r.class)))
		case r.mode == resourceapi.DeviceAllocationModeAll:
			errs = append(errs, field.Invalid(path.Child("allocationMode"), r.mode, fmt.Sprintf(
				"the namespace has a ResourceQuota for %s, so each claim must say how many devices it needs; use ExactCount", u.Resource)))
		}
		mib := (bytes + wire.MemoryStep - 1) / wire.MemoryStep
		count := min(max(r.count, 1), resourceapi.AllocationResultsMaxSize)
		most[r.name] = max(most[r.name], u.Units(mib)*count)
	}
	for _, n := range most {
		sum += n
	}
	return sum, errs.ToAggregate()
}

// memoryOf returns the bytes that a request names for each device; false if it names none.
func memoryOf(r deviceRequest) (int64, bool) {
	if r.capacity == nil {
		return 0, false
	}
	amount, named := r.capacity.Requests[wire.MemoryCapacity]
	// Beyond any device, and far from an overflow of sums.
	return min(max(amount.Value(), 0), 1<<50), named
}

// Claim takes up a change of a claim; either may be nil.
func (q *Quotas) Claim(before, after *resourceapi.ResourceClaim) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if before != nil {
		q.drop(before.UID)
	}
	if after != nil {
		q.hold(after)
	}
}

// hold counts a claim, whatever it was counted as before.
func (q *Quotas) hold(claim *resourceapi.ResourceClaim) {
	q.drop(claim.UID)
	counted := amounts{}
	for _, u := range q.units {
		// A request without an amount was made before there was a quota.
		if n, _ := u.need(&claim.Spec.Devices); n > 0 {
			counted[u.Resource] = n
		}
	}
	if len(counted) == 0 {
		return
	}
	key := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
	q.claims[claim.UID], q.names[key] = heldClaim{key, counted}, claim.UID
	if q.sums[claim.Namespace] == nil {
		q.sums[claim.Namespace] = amounts{}
	}
	for r, n := range counted {
		q.sums[claim.Namespace][r] += n
	}
}

func (q *Quotas) drop(uid types.UID) {
	delete(q.pending, uid)
	c := q.claims[uid]
	delete(q.claims, uid)
	if q.names[c.NamespacedName] == uid {
		delete(q.names, c.NamespacedName)
	}
	for r, n := range c.amounts {
		q.sums[c.Namespace][r] -= n
	}
}

// Quota takes up a change of a ResourceQuota; either may be nil. One for some pods alone, by scopes,
// does not count: claims have no scope.
func (q *Quotas) Quota(before, after *corev1.ResourceQuota) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if before != nil {
		delete(q.quotas[before.Namespace], before.Name)
	}
	if after == nil || len(after.Spec.Scopes) > 0 || after.Spec.ScopeSelector != nil {
		return
	}
	held := heldQuota{amounts{}, amounts{}}
	for _, u := range q.units {
		name := corev1.ResourceName("requests." + string(u.Resource))
		if hard, ok := after.Spec.Hard[name]; ok {
			used := after.Status.Used[name]
			held.hard[u.Resource], held.used[u.Resource] = hard.Value(), used.Value()
		}
	}
	if len(held.hard) == 0 {
		return
	}
	if q.quotas[after.Namespace] == nil {
		q.quotas[after.Namespace] = map[string]heldQuota{}
	}
	q.quotas[after.Namespace][after.Name] = held
}

// Admit returns why a new claim of a user does not fit the quotas of its namespace. Otherwise it counts from
// then on, but for a dry run: until it is seen, not seen within reservationTime, or created again for the same pod.
func (q *Quotas) Admit(claim *resourceapi.ResourceClaim, user string, dryRun bool) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	_, known := q.claims[claim.UID]
	if known {
		return nil // the review is repeated
	}
	of := podClaimOf(claim, user)
	if of != (kube.PodClaim{}) && !dryRun {
		for uid, p := range q.pending {
			if p.of == of {
				q.drop(uid) // something else rejected it: each attempt has a UID of its own
			}
		}
	}
	need := func(u Unit) (int64, error) { return u.need(&claim.Spec.Devices) }
	if err := q.within(claim.Namespace, "the claim", need); err != nil || dryRun || claim.UID == "" {
		return err
	}
	if _, exists := q.names[types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}]; exists {
		return nil // it fails, or is counted when it is seen: attempts that are repeated must not fill the quota
	}
	q.hold(claim)
	q.pending[claim.UID] = pendingClaim{q.now().Add(reservationTime), of}
	return nil
}

// AdmitPod returns why a pod's units do not fit the quotas of its namespace beside the claims there.
// Without claims it is Kubernetes' own ResourceQuota that says so.
func (q *Quotas) AdmitPod(pod *corev1.Pod) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.within(pod.Namespace, "the pod", func(u Unit) (int64, error) {
		if q.sums[pod.Namespace][u.Resource] == 0 {
			return 0, nil
		}
		return int64(kube.RequestOf(pod, u.Resource).Peak()), nil
	})
}

// within compares the need of something new with each quota of the namespace.
func (q *Quotas) within(namespace, what string, need func(Unit) (int64, error)) error {
	for uid, p := range q.pending {
		if q.now().After(p.until) {
			q.drop(uid) // it was never created
		}
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(q.quotas[namespace])) {
		quota := q.quotas[namespace][name]
		for _, u := range q.units {
			hard, limited := quota.hard[u.Resource]
			if !limited {
				continue
			}
			n, err := need(u)
			if err != nil {
				errs = append(errs, fmt.Errorf("quota %s: %w", name, err))
				continue
			}
			claims, pods := q.sums[namespace][u.Resource], quota.used[u.Resource]
			free := max(hard-claims-pods, 0)
			if n <= free {
				continue
			}
			rest := u.MiB(min(accel.Units(free), accel.MaxUnits))
			errs = append(errs, fmt.Errorf("exceeded quota %s: %s needs %d units of %s (%s), and of %d units %d are used, %d by "+
				"claims and %d by pods; request at most %d units (%dMi), delete claims or pods, or ask an administrator for a larger quota",
				name, what, n, u.Resource, accel.UnitName(u.Size), hard, claims+pods, claims, pods, free, rest))
		}
	}
	return errors.Join(errs...)
}
