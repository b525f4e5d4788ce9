package why

import (
	"encoding/csv"
	"flag"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
)

// sample has a few rows like those of the trace, which is not part of the repository.
const sample = "testdata/trace"

var traceDir = flag.String("why.trace", sample, "folder with the nodes and pods of the trace, for TestTrace")

// table reads columns of a file of the trace, as numbers.
func table(t *testing.T, file string, columns ...string) [][]int64 {
	t.Helper()
	f, err := os.Open(filepath.Join(*traceDir, file))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	rows, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	var out [][]int64
	for _, row := range rows[1:] {
		var numbers []int64
		for _, c := range columns {
			n, err := strconv.ParseInt(row[slices.Index(rows[0], c)], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			numbers = append(numbers, n)
		}
		out = append(out, numbers)
	}
	return out
}

// loaded is a part of the trace's cluster after pods have come and gone at an offered load
// of 97 %, with the last of those that did not fit. Only devices are counted. The order in
// which pods come and how long they stay are the seed's.
func loaded(t *testing.T, seed int64, nodes, waiting int) (*builder, *board) {
	t.Helper()
	rng := rand.New(rand.NewSource(seed))
	kinds := table(t, "openb_node_list_gpu_node.csv", "gpu")
	pods := table(t, "openb_pod_list_default.csv", "num_gpu", "gpu_milli")
	pods = slices.DeleteFunc(pods, func(p []int64) bool { return p[0] == 0 })
	b := newBuilder(t)
	l := ledger.New(ledger.Options{Now: func() time.Time { return taken }})
	var names []string
	capacity := int64(0)
	rng.Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
	for i := range nodes {
		name := fmt.Sprintf("n%04d", i)
		units := make([]accel.Units, kinds[i%len(kinds)][0])
		for d := range units {
			units[d] = 1000
		}
		b.node(name, units).Status.Allocatable[v1.ResourceCPU] = resource.MustParse("1k")
		l.SetNode(name, []accel.Inventory{*b.inventories[name]})
		names, capacity = append(names, name), capacity+1000*int64(len(units))
	}
	mean := int64(0)
	for _, p := range pods {
		mean += p[0] * p[1]
	}
	mean /= int64(len(pods))
	rate := 0.97 * float64(capacity) / float64(mean) // arrivals per mean time of a pod
	type running struct {
		until float64
		pod   []int64
		grant accel.Grant
	}
	on := map[string]running{}
	var refused [][]int64
	verdicts := make([]ledger.Verdict, len(names))
	for now, i := 0.0, 0; now < 4; i++ {
		now += rng.ExpFloat64() / rate
		for _, name := range sortedKeys(on) {
			if on[name].until <= now {
				l.Forget(name)
				delete(on, name)
			}
		}
		pod, stay, name := pods[rng.Intn(len(pods))], rng.ExpFloat64(), fmt.Sprintf("p%06d", i)
		r := accel.Request{Resource: memory, Devices: int(pod[0]),
			Containers: []accel.ContainerRequest{{Kind: accel.AppContainer, Units: accel.Units(pod[0] * pod[1])}}}
		l.Check(r, names, verdicts)
		best := -1
		for k, v := range verdicts {
			if v.Code == accel.Fits && (best < 0 || v.Rating > verdicts[best].Rating) {
				best = k
			}
		}
		if best < 0 {
			refused = append(refused, pod)
			continue
		}
		g, _, err := l.Reserve(accel.PodRef{UID: name, Name: name}, taken, names[best], r)
		if err != nil {
			t.Fatal(err)
		}
		on[name] = running{now + stay, pod, g}
	}
	b.Pods = make([]v1.Pod, 0, len(on)+waiting)
	spots := map[string]spot{}
	for _, name := range sortedKeys(on) {
		g := on[name].grant
		s := spot{g.Node, []int{g.Index}}
		for _, d := range g.More {
			s.devices = append(s.devices, d.Index)
		}
		p := b.on(name, g.Node, int64(g.Units), s.devices...)
		p.Labels = map[string]string{"app": name}
		ownedBy(p, "ReplicaSet", "of-"+name)
		annotate(p, "divvy.dev/devices", strconv.Itoa(len(s.devices)))
		spots[name] = s
	}
	for i, pod := range refused[max(len(refused)-waiting, 0):] {
		p := b.waiting(fmt.Sprintf("w%d", i), pod[0]*pod[1], insufficient)
		annotate(p, "divvy.dev/devices", strconv.FormatInt(pod[0], 10))
	}
	o := newBoard(b, func(*v1.Pod) bool { return true })
	for name, s := range spots {
		o.put(name, s)
	}
	return b, o
}

// TestTrace checks plans for states of a public trace and prints the tables of docs/simulate.md;
// without the trace it checks a few small ones.
func TestTrace(t *testing.T) {
	sizes, seeds, small := []int{20, 100, 400}, int64(5), int64(200)
	if *traceDir == sample {
		sizes, seeds, small = []int{10}, 2, 20
	}
	for _, nodes := range sizes {
		var waits, now, units, admitted, usable, moves int
		began := time.Now()
		for seed := range seeds {
			b, o := loaded(t, seed, nodes, 10)
			for i := range b.Pods {
				if q := b.Pods[i].Spec.Containers[0].Resources.Requests[memory]; b.Pods[i].Spec.NodeName == "" {
					waits++
					units += int(q.Value())
				}
			}
			if seed == 0 {
				began = time.Now()
			}
			p := New(&b.Snapshot).Admit()
			if seed == 0 {
				t.Logf("%d nodes: %v", nodes, time.Since(began).Round(time.Millisecond))
			}
			checkPlan(t, seed, &p, o, rand.New(rand.NewSource(seed)))
			moves += len(p.Moves)
			for _, one := range p.Admitted {
				if one.AfterMove == 0 {
					now++
					units -= int(one.Units)
					continue
				}
				admitted, usable = admitted+1, usable+int(one.Units)
			}
		}
		t.Logf("%d nodes: %d waiting with %.1f devices, %d moves, %d admitted with %.1f devices", nodes, waits-now,
			float64(units)/1000, moves, admitted, float64(usable)/1000)
	}
	// Small ones, beside the fewest moves for one pod that waits.
	states, possible, best, found, moves := 0, 0, 0, 0, 0
	for seed := range small {
		b, o := loaded(t, seed, 3, 1)
		if b.Snapshot.Pod("team-a", "w0") == nil {
			continue
		}
		states++
		p := New(&b.Snapshot).Admit()
		checkPlan(t, seed, &p, o, rand.New(rand.NewSource(seed)))
		least := o.copy().fewest("w0", 2)
		if least > 2 || least == 0 {
			continue
		}
		possible, best = possible+1, best+least
		if len(p.Admitted) == 1 {
			found, moves = found+1, moves+len(p.Moves)
		}
	}
	if states == 0 || possible == 0 {
		t.Errorf("of %d small states %d are possible with 1 or 2 moves: nothing was compared", states, possible)
	}
	t.Logf("3 nodes: of %d states %d are possible with 1 or 2 moves, %d in sum; planned %d, %d moves", states, possible, best, found, moves)
}
