package devicemanager

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// use is what a pod got when it was admitted.
type use struct {
	pod *corev1.Pod
	// how is the resource and the mode that it had then.
	how   string
	whole bool
	// chips are the indexes that its container sees.
	chips []string
}

// TestModesChangeAtRandom changes what every resource is made of, again and
// again, while pods come and go: a chip that was given out in one way is not
// given out in another one as long as its pod runs, whatever the resource has
// become since, and no running pod fails.
func TestModesChangeAtRandom(t *testing.T) {
	t.Parallel()
	for i := range uint64(3) {
		t.Run(fmt.Sprint("seed ", *seed+i), func(t *testing.T) {
			t.Parallel()
			cards := vendorsim.GCUs(6, 16<<10)
			for j := range cards {
				cards[j].NUMA = j / 2 % 2
			}
			n := prepareNode(t, "1", cards)
			n.asBoards()
			n.kubelet.Policy = []string{topologymanager.PolicyNone, topologymanager.PolicyBestEffort,
				topologymanager.PolicySingleNumaNode}[i]
			random := rand.New(rand.NewPCG(*seed+i, 2))
			resources := randomModes(random)
			n.resources(resources...)
			n.kubelet.start()
			n.startAgent()
			n.awaitServed()
			var running []use
			count := map[string]int{}
			for step := range 100 {
				switch d := random.IntN(100); {
				case d < 55:
					r := resources[random.IntN(len(resources))]
					one := use{how: howOf(r), whole: r.Mode == config.ModeExclusive}
					amount := 1 + random.Int64N(2)
					if r.Mode == config.ModeMemory {
						amount += random.Int64N(8)
					}
					shapes := []shape{of(accel.Resource(r.Name), amount)}
					if random.IntN(3) == 0 {
						shapes = append(shapes, first(accel.Resource(r.Name), amount))
					}
					one.pod = n.bind(-1, fmt.Sprint("pod", step), shapes...)
					if err := n.kubelet.add(one.pod); err != nil {
						count["refused"]++
						n.api.remove(one.pod.UID)
						continue
					}
					if err := n.kubelet.run(one.pod); err != nil {
						t.Fatal(err)
					}
					one.chips = strings.Split(n.kubelet.env(one.pod.UID, "app0")["ENFLAME_VISIBLE_DEVICES"], ",")
					for _, other := range running {
						shared := slices.ContainsFunc(one.chips, func(c string) bool { return slices.Contains(other.chips, c) })
						if shared && (one.how != other.how || one.whole) {
							t.Fatalf("step %d: pod %s got chips %v as %s, pod %s has %v as %s", step, one.pod.Name, one.chips, one.how,
								other.pod.Name, other.chips, other.how)
						}
					}
					count[string(r.Mode)]++
					running = append(running, one)
				case d < 80 && len(running) > 0:
					i := random.IntN(len(running))
					n.kubelet.remove(running[i].pod)
					running = slices.Delete(running, i, i+1)
				case d < 84:
					n.restartAgent()
					n.awaitServed()
				case d < 87:
					n.kubelet.stop()
					var pods []*corev1.Pod
					for _, one := range running {
						pods = append(pods, one.pod)
					}
					n.kubelet.boot()
					n.awaitServed()
					n.awaitHeld(pods)
					n.kubelet.readd()
				default:
					count["reloads"]++
					resources = randomModes(random)
					n.resources(resources...)
					n.restartAgent()
					n.awaitServed()
				}
				for _, one := range running {
					if got := n.api.get(one.pod.UID).Status; got.Phase != corev1.PodRunning {
						t.Fatalf("step %d: pod %s does not run any more: %s", step, one.pod.Name, got.Message)
					}
				}
			}
			t.Log(count)
		})
	}
}

// awaitServed waits until divvy-node serves kubelet what it can of its
// configuration.
func (n *node) awaitServed() {
	n.t.Helper()
	eventually(n.t, patience, func() error {
		err := n.agent.Ready()
		if err == nil {
			return n.taken()
		}
		for line := range strings.Lines(err.Error()) {
			// Of a resource without devices kubelet is told nothing.
			if !strings.Contains(line, "memoryUnit") && !strings.Contains(line, "chooses none") &&
				!strings.Contains(line, "not registered") {
				return err
			}
			if strings.Contains(line, "not registered") && !strings.Contains(err.Error(), "chooses none") &&
				!strings.Contains(err.Error(), "memoryUnit") {
				return err
			}
		}
		return n.taken()
	})
}

// taken returns an error until kubelet knows the devices of each resource that
// the node shows. Before that no scheduler sends a pod, and kubelet admits one
// without giving it anything.
func (n *node) taken() error {
	var c config.NodeConfig
	n.configure(&c)
	for _, r := range c.Resources {
		if got, _ := n.kubelet.capacityOf(accel.Resource(r.Name)); got == 0 && len(n.sharesOf(accel.Resource(r.Name))) > 0 {
			return fmt.Errorf("kubelet does not know %s yet", r.Name)
		}
	}
	return nil
}

// awaitHeld waits until kubelet, which has just booted, was told again of all
// that the pods hold, also of resources that are not configured any more.
func (n *node) awaitHeld(pods []*corev1.Pod) {
	n.t.Helper()
	eventually(n.t, patience, func() error {
		for _, r := range []accel.Resource{gcuMemory, gcuWhole, gcuBoard, gcuShared} {
			held := map[string]bool{}
			for _, pod := range pods {
				for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
					for _, id := range n.kubelet.held(pod.UID, c.Name, r) {
						held[id] = true
					}
				}
			}
			if _, got := n.kubelet.capacityOf(r); got < int64(len(held)) {
				return fmt.Errorf("kubelet has %d healthy %s, containers hold %d", got, r, len(held))
			}
		}
		return nil
	})
}

func howOf(r config.Resource) string {
	if r.Mode == config.ModeMemory {
		return r.Name + " memory"
	}
	return fmt.Sprintf("%s %s split=%t", r.Name, r.Mode, r.SplitBoards)
}

// randomModes makes a configuration of up to three resources.
func randomModes(random *rand.Rand) []config.Resource {
	var out []config.Resource
	for _, name := range []accel.Resource{gcuMemory, gcuWhole, gcuBoard} {
		r := config.Resource{Name: string(name), Vendor: "enflame", SplitBoards: random.IntN(2) == 0}
		switch random.IntN(4) {
		case 0:
			r.Mode, r.MemoryUnit = config.ModeMemory, []string{"1", "0.1"}[random.IntN(2)]
		case 1:
			r.Mode = config.ModeExclusive
		case 2:
			r.Mode, r.Replicas = config.ModeTimeSlicing, 1+random.IntN(3)
			r.ReplicasFor = []config.ReplicaRule{{Devices: config.DeviceSelector{Indexes: []int{random.IntN(6)}},
				Replicas: 1 + random.IntN(4)}}
		case 3:
			if name != gcuWhole {
				continue // it leaves the configuration
			}
			r.Mode = config.ModeExclusive
		}
		if random.IntN(3) == 0 {
			r.Devices = &config.DeviceSelector{Indexes: []int{random.IntN(6), random.IntN(6), random.IntN(6)}}
		}
		out = append(out, r)
	}
	return out
}
