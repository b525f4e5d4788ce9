package why

import (
	"errors"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// TestWorkload: a Workload is explained by its conditions until it is admitted, and by its pods
// then.
func TestWorkload(t *testing.T) {
	is := func(kind string, status metav1.ConditionStatus, message string) metav1.Condition {
		return metav1.Condition{Type: kind, Status: status, Reason: "Reason", Message: message}
	}
	no := false
	for name, tt := range map[string]struct {
		kind       string // of its owner
		conditions []metav1.Condition
		active     *bool
		change     func(b *builder)
		code       Code
		has        string // in the text
	}{
		"more than the queue has": {kind: "Job", code: NotAdmitted, conditions: []metav1.Condition{is("QuotaReserved",
			metav1.ConditionFalse,
			"couldn't assign flavors to pod set main: insufficient quota for enflame.com/gcu-memory in flavor s60, previously considered "+
				"podsets requests (0) + current podset request (40) > maximum capacity (32)")},
			has: "raise the quota of enflame.com/gcu-memory in flavor s60 to more than 32"},
		"a check": {kind: "Job", code: NotAdmitted, conditions: []metav1.Condition{is("QuotaReserved", metav1.ConditionTrue,
			"Quota reserved"),
			is("Admitted", metav1.ConditionFalse, "check x is pending")}, has: "an admission check has not passed: check x is pending"},
		"not active": {kind: "Job", code: NotAdmitted, active: &no,
			has: "kubectl patch workloads.kueue.x-k8s.io -n team-a w --type=merge -p '{\"spec\":{\"active\":true}}'"},
		"no condition yet": {kind: "Job", code: NotAdmitted, has: "Kueue has not admitted it"},
		"the place is unknown": {kind: "Job", code: NotAdmitted, change: func(b *builder) {
			b.Queues.Place = func(*Workload) (Place, error) { return Place{}, errors.New("no right to read it") }
		}, has: "NOTE  Its place in the queue is unknown: no right to read it."},
		"admitted, and the pod waits": {kind: "Job", code: InsufficientCapacity, conditions: []metav1.Condition{is("Admitted",
			metav1.ConditionTrue, "")}, has: "train has waited"},
		"of a pod, admitted": {kind: "Pod", code: InsufficientCapacity, conditions: []metav1.Condition{is("Admitted",
			metav1.ConditionTrue, "")},
			has: "train has waited"},
		"finished": {kind: "Job", conditions: []metav1.Condition{is("Finished", metav1.ConditionTrue, "")},
			has: "The Workload has finished."},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBuilder(t)
			b.full()
			if tt.kind == "Job" {
				ownedBy(&b.Pods[1], "Job", "train")
			}
			w := b.workload("w", tt.kind, "train", tt.conditions...)
			w.Spec.Active = tt.active
			if tt.change != nil {
				tt.change(b)
			}
			e := New(&b.Snapshot).Workload(b.Snapshot.Workload("team-a", "w"), nil)
			if tt.code == "" && len(e.Causes) > 0 || tt.code != "" && (len(e.Causes) == 0 || e.Causes[0].Code != tt.code) {
				t.Errorf("causes %+v, want %s", e.Causes, tt.code)
			}
			var out strings.Builder
			if err := Print(&out, &e); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(out.String(), tt.has) {
				t.Errorf("%q is not in:\n%s", tt.has, &out)
			}
		})
	}
}

// TestGateOfKueue: the gate of a pod is explained by its Workload, which the group of the pod may
// name; without one, by the gate and why the Workloads are not known.
func TestGateOfKueue(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(b *builder, p *v1.Pod)
		code   Code
		note   string
	}{
		"its own": {func(b *builder, _ *v1.Pod) { b.workload("w", "Pod", "train") }, NotAdmitted, ""},
		"that of its group": {func(b *builder, p *v1.Pod) {
			p.Labels = map[string]string{labelKueueGroup: "w"}
			b.workload("w", "Pod", "x")
		}, NotAdmitted, ""},
		"of another":      {func(b *builder, _ *v1.Pod) { b.workload("w", "Pod", "other") }, Gated, ""},
		"that of its Job": {func(b *builder, p *v1.Pod) { ownedBy(p, "Job", "j"); b.workload("w", "Job", "j") }, NotAdmitted, ""},
		"none can be read": {func(b *builder, _ *v1.Pod) { b.Failed = []Failure{{SourceWorkloads, "forbidden"}} }, Gated,
			"The Workloads of Kueue could not be read"},
		"admitted meanwhile": {func(b *builder, _ *v1.Pod) {
			b.workload("w", "Pod", "train", metav1.Condition{Type: "Admitted", Status: "True"})
		}, Gated, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBuilder(t)
			b.node("gcu-1", []accel.Units{16})
			p := b.pod("train", 8)
			p.Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: gateKueue}}
			tt.change(b, p)
			e := explainTrain(b, nil)
			if len(e.Causes) != 1 || e.Causes[0].Code != tt.code || e.State != StateGated {
				t.Errorf("%s, causes %+v, want %s", e.State, e.Causes, tt.code)
			}
			if notes := strings.Join(e.Notes, "\n"); !strings.Contains(notes, tt.note) {
				t.Errorf("notes %q, want %q", notes, tt.note)
			}
		})
	}
}

// TestQueuedPod: a pod that is created again is gated again by Kueue.
func TestQueuedPod(t *testing.T) {
	for _, kind := range []string{"", "StatefulSet"} {
		b := newBuilder(t)
		b.node("gcu-1", []accel.Units{16})
		p := b.waiting("train", 20, insufficient)
		label(p, labelKueueQueue, "q")
		if kind != "" {
			ownedBy(p, kind, "train")
		}
		e := explainTrain(b, nil)
		c := changeOf(t, &e, ChangeRequest)
		if c.Verified || !strings.Contains(c.Text, "Kueue must admit it again") || len(c.Commands) == 0 {
			t.Errorf("%+v", c)
		}
	}
}

// TestGang: a gang that is complete is no cause, and no change of one of its pods is verified.
func TestGang(t *testing.T) {
	in := "train"
	for name, tt := range map[string]struct {
		change func(b *builder)
		code   Code
		note   string
	}{
		"of scheduler-plugins": {func(b *builder) { b.group(GroupPlugins, `{"minMember": 2}`) }, GangIncomplete, ""},
		"of Kubernetes": {func(b *builder) {
			b.group(GroupScheduling, `{"schedulingPolicy": {"gang": {"minCount": 2}}}`)
			b.Pods[1].Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: &in}
		}, GangIncomplete, ""},
		"of Kubernetes, one by one": {func(b *builder) {
			b.group(GroupScheduling, `{"schedulingPolicy": {"basic": {}}}`)
			b.Pods[1].Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: &in}
		}, InsufficientCapacity, ""},
		"complete": {func(b *builder) { b.group(GroupPlugins, `{"minMember": 1}`) }, InsufficientCapacity,
			"0 of its 1 pods have a node"},
		"of the other": {func(b *builder) { b.group(GroupScheduling, `{"minMember": 2}`) }, InsufficientCapacity, "is not known"},
		"cannot be read": {func(b *builder) { b.Failed = []Failure{{SourceGroups, "forbidden"}} }, InsufficientCapacity,
			"The PodGroups could not be read"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBuilder(t)
			b.full()
			b.Pods[1].Labels = map[string]string{labelPodGroup: "train"}
			tt.change(b)
			e := explainTrain(b, nil)
			if e.Causes[0].Code != tt.code {
				t.Errorf("causes %+v, want %s", e.Causes, tt.code)
			}
			if notes := strings.Join(e.Notes, "\n"); !strings.Contains(notes, tt.note) {
				t.Errorf("notes %q, want %q", notes, tt.note)
			}
			_, of := b.gangOf(b.Snapshot.Pod("team-a", "train"))
			if verified := slices.ContainsFunc(e.Changes, func(c Change) bool { return c.Verified }); verified == of {
				t.Errorf("changes %+v of a pod of a gang: %v", e.Changes, of)
			}
		})
	}
}
