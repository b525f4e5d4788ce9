package claimreview

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// quotaOf limits resources written as name=hard, or name=hard/used.
func quotaOf(name string, limits ...string) *corev1.ResourceQuota {
	q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}}
	q.Spec.Hard, q.Status.Used = corev1.ResourceList{}, corev1.ResourceList{}
	for _, l := range limits {
		name, amount, _ := strings.Cut(l, "=")
		hard, used, _ := strings.Cut(amount, "/")
		q.Spec.Hard[corev1.ResourceName("requests."+name)] = resource.MustParse(hard)
		if used != "" {
			q.Status.Used[corev1.ResourceName("requests."+name)] = resource.MustParse(used)
		}
	}
	return q
}

// memory is a claim for so much memory of count devices of a class.
func memory(t testing.TB, uid, class, amount string, count int) *resourceapi.ResourceClaim {
	t.Helper()
	return claim(t, uid, fmt.Sprintf("requests: [{name: m, exactly: {deviceClassName: %s, count: %d, capacity: {requests: {memory: %s}}}}]",
		class, count, amount))
}

const gcus, gpus = "gcu.enflame.divvy.dev", "gpu.nvidia.divvy.dev"

func TestQuotas(t *testing.T) {
	whole := func(class string) *resourceapi.ResourceClaim {
		return claim(t, "new", "requests: [{name: m, exactly: {deviceClassName: "+class+"}}]")
	}
	scoped := quotaOf("q", string(gcu)+"=1")
	scoped.Spec.Scopes = []corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeBestEffort}
	elsewhere := memory(t, "there", gcus, "30Gi", 1)
	elsewhere.Namespace = "other"
	tests := map[string]struct {
		quotas []*corev1.ResourceQuota
		there  []*resourceapi.ResourceClaim
		claim  *resourceapi.ResourceClaim
		want   string
	}{
		"no quota":  {nil, nil, memory(t, "new", gcus, "100Gi", 1), ""},
		"all of it": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=40")}, nil, memory(t, "new", gcus, "40Gi", 1), ""},
		"more than all": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=40")}, nil, memory(t, "new", gcus, "40961Mi", 1),
			"exceeded quota q: the claim needs 41 units"},
		"beside claims and pods": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=40/8")}, []*resourceapi.ResourceClaim{
			memory(t, "a", gcus, "10Gi", 2), elsewhere}, memory(t, "new", gcus, "13Gi", 1),
			"exceeded quota q: the claim needs 13 units of enflame.com/gcu-memory (1 GB), and of 40 units 28 are used, 20 by claims and " +
				"8 by pods; request at most 12 units (12288Mi), delete claims or pods"},
		"what is left": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=40/8")}, []*resourceapi.ResourceClaim{
			memory(t, "a", gcus, "10Gi", 2)}, memory(t, "new", gcus, "12Gi", 1), ""},
		"several devices": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=40")}, nil, memory(t, "new", gcus, "21Gi", 2),
			"needs 42 units"},
		"the second quota": {[]*corev1.ResourceQuota{quotaOf("a", string(gcu)+"=40"), quotaOf("b", string(gcu)+"=4")}, nil,
			memory(t, "new", gcus, "5Gi", 1), "exceeded quota b"},
		"a quota of 0": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=0")}, nil, memory(t, "new", gcus, "1Mi", 1),
			"request at most 0 units (0Mi)"},
		"more used than there is": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=4/9")}, nil, memory(t, "new", gcus, "1Gi", 1),
			"request at most 0 units"},
		"another vendor's quota": {[]*corev1.ResourceQuota{quotaOf("q", string(gpu)+"=1")}, nil, memory(t, "new", gcus, "40Gi", 1), ""},
		"a quota of some pods":   {[]*corev1.ResourceQuota{scoped}, nil, memory(t, "new", gcus, "40Gi", 1), ""},
		"tenths that were rounded": {[]*corev1.ResourceQuota{quotaOf("q", string(gpu)+"=3")}, []*resourceapi.ResourceClaim{memory(t,
			"a", gpus, "103Mi", 1)}, memory(t, "new", gpus, "205Mi", 1), ""},
		"a tenth more": {[]*corev1.ResourceQuota{quotaOf("q", string(gpu)+"=3")}, []*resourceapi.ResourceClaim{memory(t,
			"a", gpus, "103Mi", 1)}, memory(t, "new", gpus, "206Mi", 1),
			"needs 3 units of nvidia.com/gpu-memory (0.1 GB), and of 3 units 1 are used"},
		"a device without amount": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=40")}, nil, whole(gcus),
			"spec.devices.requests[0].exactly.capacity.requests[memory]: Required value: " +
				"the namespace has a ResourceQuota for enflame.com/gcu-memory"},
		"without amount or quota": {[]*corev1.ResourceQuota{quotaOf("q", string(gpu)+"=40")}, nil, whole(gcus), ""},
		"time slices": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=0")}, nil,
			whole("gcu-slots.enflame.divvy.dev"), ""},
		"partitions":                {[]*corev1.ResourceQuota{quotaOf("q", string(gpu)+"=0")}, nil, whole("mig.nvidia.divvy.dev"), ""},
		"a class of another driver": {[]*corev1.ResourceQuota{quotaOf("q", string(gpu)+"=0")}, nil, whole("gpu.nvidia.com"), ""},
		"all devices": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=40")}, nil, claim(t, "new", "requests: [{name: m, exactly: "+
			"{deviceClassName: "+gcus+", allocationMode: All, capacity: {requests: {memory: 1Gi}}}}]"), "use ExactCount"},
		"administrators' access": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=0")}, nil, claim(t, "new",
			"requests: [{name: m, exactly: "+
				"{deviceClassName: "+gcus+", adminAccess: true}}]"), ""},
		"the largest alternative": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=10")}, nil, claim(t, "new",
			"requests: [{name: m, firstAvailable: ["+
				"{name: a, deviceClassName: "+gcus+", capacity: {requests: {memory: 4Gi}}}, {name: b, deviceClassName: "+gcus+", "+
				"count: 2, capacity: {requests: {memory: 6Gi}}}]}]"),
			"needs 12 units"},
		"several requests": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=10")}, nil, claim(t, "new",
			"requests: [{name: a, exactly: {deviceClassName: "+gcus+
				", capacity: {requests: {memory: 6Gi}}}}, {name: b, exactly: {deviceClassName: "+gcus+", "+
				"capacity: {requests: {memory: 6Gi}}}}]"), "needs 12 units"},
		"an endless amount": {[]*corev1.ResourceQuota{quotaOf("q", string(gcu)+"=9223372036854775807")}, []*resourceapi.ResourceClaim{
			memory(t, "a", gcus, "8Ei", 32)}, memory(t, "new", gcus, "8Ei", 32), ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			q := NewQuotas(testUnits(t), time.Now)
			for _, one := range tt.quotas {
				q.Quota(nil, one)
			}
			for _, one := range tt.there {
				q.Claim(nil, one)
			}
			for range 2 { // a dry run leaves nothing behind
				err := q.Admit(tt.claim, "", true)
				if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
					t.Errorf("%v, want %s", err, tt.want)
				}
			}
		})
	}
}

// A claim counts from its admission on: until it is deleted, or for a while if it is never seen.
func TestClaimsInFlight(t *testing.T) {
	now := time.Unix(0, 0)
	q := NewQuotas(testUnits(t), func() time.Time { return now })
	q.Quota(nil, quotaOf("q", string(gcu)+"=10"))
	a, b, c := memory(t, "a", gcus, "6Gi", 1), memory(t, "b", gcus, "4Gi", 1), memory(t, "c", gcus, "1Gi", 1)
	admit := func(one *resourceapi.ResourceClaim, fits bool) {
		t.Helper()
		if err := q.Admit(one, "", false); (err == nil) != fits {
			t.Errorf("claim %s: %v, want it to fit: %t", one.Name, err, fits)
		}
	}
	admit(a, true)
	admit(a, true) // the review is repeated
	admit(b, true)
	admit(c, false)
	q.Claim(nil, a) // b is never created
	now = now.Add(reservationTime + 1)
	admit(c, true)
	q.Claim(nil, c)
	q.Claim(c, c) // an update
	admit(b, false)
	q.Claim(a, nil)
	admit(b, true)
	// A larger quota, then none.
	admit(memory(t, "d", gcus, "6Gi", 1), false)
	q.Quota(quotaOf("q", string(gcu)+"=10"), quotaOf("q", string(gcu)+"=12"))
	admit(memory(t, "d", gcus, "6Gi", 1), true)
	q.Quota(quotaOf("q", string(gcu)+"=12"), nil)
	admit(memory(t, "e", gcus, "600Gi", 1), true)
}

// Attempts to create a claim that exists do not fill the quota.
func TestRepeatedAttempts(t *testing.T) {
	q := NewQuotas(testUnits(t), time.Now)
	q.Quota(nil, quotaOf("q", string(gcu)+"=10"))
	admit := func(uid, name, amount string) error {
		one := memory(t, uid, gcus, amount, 1)
		one.Name = name
		return q.Admit(one, "", false)
	}
	for i := range 20 {
		if err := admit(fmt.Sprint(i), "same", "3Gi"); err != nil {
			t.Fatalf("attempt %d: %v", i, err)
		}
	}
	if err := admit("x", "other", "7Gi"); err != nil {
		t.Error(err)
	}
	if err := admit("y", "another", "1Gi"); err == nil {
		t.Error("more than the quota fits")
	}
	// The one that was created in the end, under the name of the first attempt, counts by itself.
	created := memory(t, "19", gcus, "3Gi", 1)
	created.Name = "same"
	q.Claim(nil, created)
	q.Claim(created, nil)
	if _, there := q.names[types.NamespacedName{Namespace: "team", Name: "same"}]; there {
		t.Error("a name outlives its claim")
	}
}

// Attempts of kube-controller-manager for a claim of a pod replace each other.
func TestRepeatedAttemptsForPod(t *testing.T) {
	const manager = "system:serviceaccount:kube-system:resource-claim-controller"
	uids := 0
	tests := map[string]struct {
		user string
		edit func(*resourceapi.ResourceClaim, int)
		want int // attempts that are admitted, of 5 that are more than a third of the quota each
	}{
		"with an account for each controller": {manager, nil, 5},
		"with one account":                    {"system:kube-controller-manager", nil, 5},
		"by another user":                     {"system:serviceaccount:team:resource-claim-controller", nil, 2},
		"of several pods": {manager, func(c *resourceapi.ResourceClaim, i int) {
			c.OwnerReferences[0].UID = types.UID(fmt.Sprint("pod-", i))
		}, 2},
		"of several claims of a pod": {manager, func(c *resourceapi.ResourceClaim, i int) {
			c.Annotations[kube.PodClaimAnnotation] = fmt.Sprint(i)
		}, 2},
		"of another owner": {manager, func(c *resourceapi.ResourceClaim, _ int) { c.OwnerReferences[0].Kind = "Job" }, 2},
		"without owner":    {manager, func(c *resourceapi.ResourceClaim, _ int) { c.OwnerReferences = nil }, 2},
		"without the name": {manager, func(c *resourceapi.ResourceClaim, _ int) { c.Annotations = nil }, 2},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			r := New(reader(t, nil), testUnits(t), func() bool { return true })
			r.quotas.Quota(nil, quotaOf("q", string(gcu)+"=10"))
			admit := func(i int, dryRun bool) *resourceapi.ResourceClaim {
				t.Helper()
				uids++
				one := memory(t, fmt.Sprint(uids), gcus, "4Gi", 1)
				one.Annotations = map[string]string{kube.PodClaimAnnotation: "memory"}
				one.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: "p", UID: "pod", Controller: new(true)}}
				if tt.edit != nil {
					tt.edit(one, i)
				}
				request := create(t, claimsResource, one)
				request.UserInfo.Username, request.DryRun = tt.user, &dryRun
				if response, _ := r.Validate(t.Context(), request); response.Allowed {
					return one
				}
				return nil
			}
			var admitted []*resourceapi.ResourceClaim
			for i := range 5 {
				if one := admit(i, false); one != nil {
					admitted = append(admitted, one)
				}
			}
			if len(admitted) != tt.want {
				t.Fatalf("%d attempts were admitted, want %d", len(admitted), tt.want)
			}
			if tt.want < 5 {
				return
			}
			// The one that is created counts by itself, beside a later one for the pod.
			r.quotas.Claim(nil, admitted[4])
			admit(5, true)
			if admit(6, false) == nil {
				t.Error("a claim after the one that was created does not fit")
			}
			if got := r.quotas.sums["team"][accel.Resource(gcu)]; got != 8 {
				t.Errorf("claims count as %d units, want 8", got)
			}
		})
	}
}

// Of a burst, as many are admitted as fit.
func TestBurst(t *testing.T) {
	q := NewQuotas(testUnits(t), time.Now)
	q.Quota(nil, quotaOf("q", string(gcu)+"=10"))
	var admitted atomic.Int64
	var all sync.WaitGroup
	for i := range 50 {
		one := memory(t, fmt.Sprint(i), gcus, "1Gi", 1)
		all.Go(func() {
			if q.Admit(one, "", false) == nil {
				admitted.Add(1)
			}
		})
	}
	all.Wait()
	if admitted.Load() != 10 {
		t.Errorf("%d were admitted, want 10", admitted.Load())
	}
}

// Pods by units and claims share a quota.
func TestPodsBesideClaims(t *testing.T) {
	q := NewQuotas(testUnits(t), time.Now)
	q.Quota(nil, quotaOf("q", string(gcu)+"=10/3"))
	pod := func(units string) *corev1.Pod {
		return podOf(nil, []corev1.Container{container("i", string(gcu)+"=1")}, container("a", string(gcu)+"="+units))
	}
	if err := q.AdmitPod(pod("8")); err != nil {
		t.Errorf("without claims: %v", err) // ResourceQuota rejects it
	}
	q.Claim(nil, memory(t, "a", gcus, "5Gi", 1))
	if err := q.AdmitPod(pod("2")); err != nil {
		t.Errorf("what is left: %v", err)
	}
	if err := q.AdmitPod(pod("3")); err == nil ||
		!strings.Contains(err.Error(),
			"exceeded quota q: the pod needs 3 units of enflame.com/gcu-memory (1 GB), and of 10 units 8 are used, "+
				"5 by claims and 3 by pods") {
		t.Errorf("more than is left: %v", err)
	}
	if err := q.AdmitPod(podOf(nil, nil, container("a", string(gpu)+"=1000"))); err != nil {
		t.Errorf("another resource: %v", err)
	}
}
