package why

import (
	"math/rand"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var appX = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}}

// hindrances are what kube-scheduler looks at besides the devices. Some of them it only prefers,
// and some never let the pod in.
var inTree = map[string]func(rng *rand.Rand, b *builder, p *v1.Pod){
	"spread": func(rng *rand.Rand, _ *builder, p *v1.Pod) {
		when := []v1.UnsatisfiableConstraintAction{v1.DoNotSchedule, v1.ScheduleAnyway}[rng.Intn(2)]
		p.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{{MaxSkew: 1, TopologyKey: "zone", WhenUnsatisfiable: when,
			LabelSelector: appX}}
	},
	"affinity": func(rng *rand.Rand, _ *builder, p *v1.Pod) {
		term := v1.PodAffinityTerm{TopologyKey: "zone", LabelSelector: appX}
		a := affinityOf(p)
		if a.PodAffinity = (&v1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{term}}); rng.Intn(2) == 0 {
			a.PodAffinity = &v1.PodAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []v1.WeightedPodAffinityTerm{{Weight: 1,
				PodAffinityTerm: term}}}
		}
	},
	"anti-affinity": func(_ *rand.Rand, _ *builder, p *v1.Pod) { repel(p) },
	"anti-affinity of another pod": func(rng *rand.Rand, b *builder, p *v1.Pod) {
		if other := &b.Pods[rng.Intn(len(b.Pods))]; other.Name != p.Name {
			repel(other)
		}
	},
	"node affinity": func(rng *rand.Rand, _ *builder, p *v1.Pod) {
		affinityOf(p).NodeAffinity = &v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{
			NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{{Key: "zone",
				Operator: v1.NodeSelectorOpIn, Values: [][]string{{"a", "b"}, {"b"}}[rng.Intn(2)]}}}}}}
	},
	"volume": func(rng *rand.Rand, _ *builder, p *v1.Pod) {
		source := v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}
		if rng.Intn(2) == 0 {
			source = v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}
		}
		p.Spec.Volumes = []v1.Volume{{Name: "data", VolumeSource: source}}
	},
	"claim": func(_ *rand.Rand, _ *builder, p *v1.Pod) { p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "x"}} },
	"gang":  func(_ *rand.Rand, _ *builder, p *v1.Pod) { label(p, labelPodGroup, "g") },
	"port": func(rng *rand.Rand, b *builder, p *v1.Pod) {
		for _, of := range []*v1.Pod{p, &b.Pods[rng.Intn(len(b.Pods))]} {
			of.Spec.Containers[0].Ports = []v1.ContainerPort{{HostPort: 8080}}
		}
	},
	"ephemeral": func(rng *rand.Rand, b *builder, p *v1.Pod) {
		for _, of := range []*v1.Pod{p, &b.Pods[rng.Intn(len(b.Pods))]} {
			of.Spec.Containers[0].Resources.Requests[v1.ResourceEphemeralStorage] = resource.MustParse("60Gi")
		}
	},
	"memory": func(rng *rand.Rand, b *builder, p *v1.Pod) {
		for _, of := range []*v1.Pod{p, &b.Pods[rng.Intn(len(b.Pods))]} {
			of.Spec.Containers[0].Resources.Requests[v1.ResourceMemory] = resource.MustParse("40Gi")
		}
	},
}

func affinityOf(p *v1.Pod) *v1.Affinity {
	if p.Spec.Affinity == nil {
		p.Spec.Affinity = &v1.Affinity{}
	}
	return p.Spec.Affinity
}

func repel(p *v1.Pod) {
	affinityOf(p).PodAntiAffinity = &v1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{
		{TopologyKey: "zone", LabelSelector: appX}}}
}

func label(p *v1.Pod, key, value string) {
	if p.Labels == nil {
		p.Labels = map[string]string{}
	}
	p.Labels[key] = value
}

// TestHindrances: with random hindrances of kube-scheduler's own, a change that is called verified
// is never one that it would refuse then. What it does with them is decided by a second
// implementation, which knows them all.
func TestHindrances(t *testing.T) {
	names := make([]string, 0, len(inTree))
	for name := range inTree {
		names = append(names, name)
	}
	slices.Sort(names)
	verified, unverified := map[string]int{}, map[string]int{}
	for seed := range int64(*seeds) {
		rng := rand.New(rand.NewSource(seed))
		b := randomCluster(t, seed)
		p := b.Snapshot.Pod("team-a", "train")
		for i := range b.Pods {
			if rng.Intn(3) > 0 {
				label(&b.Pods[i], "app", "x")
			}
		}
		for i := range b.Nodes {
			if rng.Intn(3) == 0 {
				b.Nodes[i].Labels["zone"] = "b"
			}
		}
		var with []string
		for range 1 + rng.Intn(2) {
			name := names[rng.Intn(len(names))]
			inTree[name](rng, b, p)
			with = append(with, name)
		}
		e := New(&b.Snapshot).Pod(p)
		for i := range e.Changes {
			c := &e.Changes[i]
			count := unverified
			if c.Verified {
				count = verified
				after := carryOut(t, &b.Snapshot, c)
				if train := after.Pod("team-a", "train"); !admittedInTree(after, train) {
					t.Errorf("seed %d, %v: %q is verified, and kube-scheduler refuses the pod", seed, with, c.Text)
				}
			}
			for _, name := range with {
				count[name]++
			}
		}
		if e.Causes[0].Code == Backoff && !admittedInTree(&b.Snapshot, p) &&
			(e.Waiting.Helps || strings.Contains(e.Causes[0].Detail, "fits now")) {
			t.Errorf("seed %d, %v: %+v of a pod that fits nowhere", seed, with, e.Causes[0])
		}
		if t.Failed() {
			checkPrint(t, &e)
			return
		}
	}
	t.Logf("changes, verified: %v, not verified: %v", verified, unverified)
	for _, name := range names {
		never := name == "claim" || name == "gang" || name == "anti-affinity"
		if unverified[name] == 0 && name != "memory" && name != "ephemeral" && name != "port" && name != "node affinity" ||
			verified[name] == 0 && !never {
			t.Errorf("%s: %d changes verified, %d not", name, verified[name], unverified[name])
		}
	}
}

// admittedInTree decides whether a pod fits on any node, without the code that is tested.
func admittedInTree(s *Snapshot, p *v1.Pod) bool {
	if len(p.Spec.ResourceClaims) > 0 || p.Labels[labelPodGroup] != "" || // neither exists
		slices.ContainsFunc(p.Spec.Volumes, func(v v1.Volume) bool { return v.PersistentVolumeClaim != nil }) {
		return false
	}
	return slices.ContainsFunc(s.Nodes, func(n v1.Node) bool { return naiveOn(s, p, &n) && !hinderedOn(s, p, &n) })
}

func hinderedOn(s *Snapshot, p *v1.Pod, n *v1.Node) bool {
	zoneOf := func(o *v1.Pod) string { return nodeNamed(s, o.Spec.NodeName).Labels["zone"] }
	isX := func(o *v1.Pod) bool { return o.Labels["app"] == "x" }
	zone := n.Labels["zone"]
	inZone, all := map[string]int{}, 0
	free := map[v1.ResourceName]int64{}
	for _, name := range []v1.ResourceName{v1.ResourceMemory, v1.ResourceEphemeralStorage} {
		free[name] = n.Status.Allocatable.Name(name, resource.BinarySI).Value()
	}
	for i := range s.Pods {
		o := &s.Pods[i]
		if o.Spec.NodeName == "" || o.Status.Phase != v1.PodRunning {
			continue
		}
		if isX(o) {
			inZone[zoneOf(o)]++
			all++
		}
		if a := o.Spec.Affinity; isX(p) && a != nil && a.PodAntiAffinity != nil && zone != "" && zoneOf(o) == zone {
			return true
		}
		if o.Spec.NodeName != n.Name {
			continue
		}
		if len(o.Spec.Containers[0].Ports) > 0 && len(p.Spec.Containers[0].Ports) > 0 {
			return true
		}
		for name := range free {
			free[name] -= o.Spec.Containers[0].Resources.Requests.Name(name, resource.BinarySI).Value()
		}
	}
	for name, amount := range free {
		if p.Spec.Containers[0].Resources.Requests.Name(name, resource.BinarySI).Value() > amount {
			return true
		}
	}
	for _, c := range p.Spec.TopologySpreadConstraints {
		if c.WhenUnsatisfiable != v1.DoNotSchedule {
			continue
		}
		least := -1
		for i := range s.Nodes {
			if of := s.Nodes[i].Labels["zone"]; of != "" && (least < 0 || inZone[of] < least) {
				least = inZone[of]
			}
		}
		own := 0
		if isX(p) {
			own = 1
		}
		if zone == "" || inZone[zone]+own-least > int(c.MaxSkew) {
			return true
		}
	}
	a := p.Spec.Affinity
	switch {
	case a == nil:
		return false
	case a.PodAffinity != nil && len(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 &&
		(zone == "" || inZone[zone] == 0 && (all > 0 || !isX(p))):
		return true
	case a.PodAntiAffinity != nil && zone != "" && inZone[zone] > 0:
		return true
	case a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil:
		values := a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchExpressions[0].Values
		return !slices.Contains(values, zone)
	}
	return false
}
