package claims

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/demand"
	"github.com/divvy-gpu/divvy/internal/core/fragmentation"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

var gcuMemory = ResourceOf(driver)

// learner is a policy that learns of the one resource of these tests.
type learner struct{ *fragmentation.Policy }

func (l learner) For(r accel.Resource) place.Policy {
	if r == gcuMemory {
		return l.Policy
	}
	return place.Spread // would be noticed
}

// expecting is a policy for which pods with these claims usually come, as many of each as of the others.
func expecting(t *testing.T, c *Catalog, of State, usual ...Demand) learner {
	t.Helper()
	var prior []demand.Count
	for _, d := range usual {
		r, ok, err := c.Request(t.Context(), of.Slices, d)
		if err != nil || !ok {
			t.Fatalf("%+v cannot be expressed in units: %v", d, err)
		}
		prior = append(prior, demand.Count{Pods: 1000, Kind: demand.Kind{Units: r.Peak() / accel.Units(r.Devices), Devices: r.Devices,
			CPU: r.CPU, Models: r.Selection}, Memory: r.Memory})
	}
	l := learner{fragmentation.New(demand.Options{Prior: prior})}
	if _, err := c.Rank(t.Context(), of, usual[0], l); err != nil { // it shows the catalog the state
		t.Fatal(err)
	}
	l.Renew(c.Each(gcuMemory))
	if l.Epoch() == 0 {
		t.Fatalf("no weights: %+v", l.Status())
	}
	return l
}

func demandOf(t *testing.T, cpu int64, requests ...resourceapi.DeviceRequest) Demand {
	t.Helper()
	d, err := DemandOf(all{claim(requests...)}, class)
	if err != nil {
		t.Fatal(err)
	}
	d.CPU = cpu
	return d
}

// Pods usually take 6 GiB of a device of 16, so two of them fill one: 6 GiB that are free are worth as much as 11, and 12 as
// much as 16.
func TestFragmentationKeepsUsableCapacity(t *testing.T) {
	of := State{Slices: offered{slice("x", gcu("a", 16)), slice("y", gcu("a", 16))}}
	for name, test := range map[string]struct {
		held  holds
		asks  string
		want  string // the best node
		tight string // that of binpack
	}{
		// Of 8 GiB on x, 6 stay for a usual pod, and of 7 GiB on y 5 GiB for none.
		"a remainder that a usual pod fills": {held: holds{"x/a": "8Gi", "y/a": "9Gi"}, asks: "2Gi", want: "x", tight: "y"},
		// Of 12 GiB on x, 11 stay for one usual pod instead of two, and of 7 GiB on y 6 GiB for one as before.
		"a remainder that stays what it was": {held: holds{"x/a": "4Gi", "y/a": "9Gi"}, asks: "1Gi", want: "y", tight: "y"},
	} {
		t.Run(name, func(t *testing.T) {
			of := of
			of.Held = held(t, test.held)
			catalog := NewCatalog()
			policy := expecting(t, catalog, of, demandOf(t, 0, memory("6Gi")))
			d := demandOf(t, 0, memory(test.asks))
			for policy, want := range map[place.Policy]string{policy: test.want, place.Binpack: test.tight} {
				rated, err := catalog.Rank(t.Context(), of, d, policy)
				if err != nil || len(rated) != 2 || rated[0].Node != want {
					t.Errorf("%s: %v, %v; want %s first", policy.Name(), rated, err, want)
				}
			}
		})
	}
}

// A device whose node has no CPU left for usual pods is the one to use up.
func TestFragmentationCountsHosts(t *testing.T) {
	hosts := map[string]Host{"x": {CPU: 16000, Memory: 1 << 20, Cores: 32000}, "y": {CPU: 1000, Memory: 1 << 20, Cores: 32000}}
	of := State{Slices: offered{slice("x", gcu("a", 16)), slice("y", gcu("a", 16))}, Held: held(t, nil),
		Hosts: func(node string) Host { return hosts[node] }}
	catalog := NewCatalog()
	policy := expecting(t, catalog, of, demandOf(t, 8000, memory("8Gi")))
	first := func(cpu int64) string {
		rated, err := catalog.Rank(t.Context(), of, demandOf(t, cpu, memory("8Gi")), policy)
		if err != nil || len(rated) == 0 {
			t.Fatal(rated, err)
		}
		return rated[0].Node
	}
	if node := first(500); node != "y" {
		t.Errorf("a pod with little CPU goes to %s", node)
	}
	if node := first(2000); node != "x" {
		t.Errorf("a pod goes to %s, which has not its CPU", node)
	}
	hosts["y"] = Host{CPU: 16000, Memory: 1 << 20, Cores: 32000} // and what is remembered of idle nodes follows
	hosts["x"] = Host{CPU: 1000, Memory: 1 << 20, Cores: 32000}
	if node := first(500); node != "x" {
		t.Errorf("a pod with little CPU goes to %s after the nodes have changed", node)
	}
}

func modelled(d resourceapi.Device, model string) resourceapi.Device {
	d.Attributes[wire.DeviceModel] = resourceapi.DeviceAttribute{StringValue: &model}
	return d
}

func TestRequest(t *testing.T) {
	model := func(expression string) string {
		return fmt.Sprintf("device.attributes[%q].model %s", driver, expression)
	}
	two := offered{slice("x", modelled(gcu("a", 16), "S60"), modelled(gcu("b", 16), "S60")), slice("y", modelled(gcu("a", 8), "L600"))}
	mig := modelled(whole("p", 4), "S60")
	mig.Attributes[wire.DeviceType] = resourceapi.DeviceAttribute{StringValue: ptr.To("mig")}
	constrained := claim(memory("1Gi"))
	constrained.Spec.Devices.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: ptr.To(resourceapi.FullyQualifiedName("a/b"))}}
	for name, test := range map[string]struct {
		slices offered
		claims all
		want   string // units on devices of models, "" where it cannot be expressed
	}{
		"memory":           {slices: two, claims: all{claim(memory("2Gi"))}, want: "2048 on 1 of []"},
		"it is rounded up": {slices: two, claims: all{claim(memory("1048577"))}, want: "2 on 1 of []"},
		"several devices":  {slices: two, claims: all{claim(asks("gcu", 2, wire.MemoryCapacity, "2Gi"))}, want: "2048 on 2 of []"},
		"a model": {
			slices: two, claims: all{claim(selecting(memory("2Gi"), model("== 'S60'")))}, want: "2048 on 1 of [gcu S60]",
		},
		"more than some have": {slices: two, claims: all{claim(memory("10Gi"))}, want: "10240 on 1 of []"},
		"whole devices of one size": {
			slices: offered{slice("x", whole("a", 16), whole("b", 16))}, claims: all{claim(asks("gcu", 1, "", ""))},
			want: "16384 on 1 of []",
		},
		"a type": {
			slices: offered{slice("x", modelled(gcu("a", 16), "S60"), mig)}, claims: all{claim(memory("2Gi"))},
			want: "2048 on 1 of [gcu S60]",
		},
		"whole devices of two sizes": {slices: two, claims: all{claim(memory(""))}},
		"some devices of a model": {
			slices: two, claims: all{claim(selecting(memory("1Gi"), fmt.Sprintf("device.capacity[%q].memory.isGreaterThan("+
				"quantity('8Gi')) && device.attributes[%q].model == 'S60' || 'x' == 'y'", driver, driver)))},
			want: "1024 on 1 of [gcu S60]",
		},
		"two requests": {slices: two, claims: all{claim(memory("1Gi"), memory("1Gi"))}},
		"two claims":   {slices: two, claims: all{claim(memory("1Gi")), claim(memory("1Gi"))}},
		"a constraint": {slices: two, claims: all{constrained}},
		"time slices":  {slices: offered{slice("x", slots("a", 4))}, claims: all{claim(asks("slots", 1, "", ""))}},
		"overlapping devices": {
			slices: offered{slice("x", draws(gcu("a", 16), "a", "chip0"), gcu("b", 16))}, claims: all{claim(memory("1Gi"))},
		},
		"no device": {slices: offered{slice("x", slots("a", 4))}, claims: all{claim(memory("1Gi"))}},
	} {
		d, err := DemandOf(test.claims, class)
		if err != nil {
			t.Fatal(err)
		}
		r, ok, err := NewCatalog().Request(t.Context(), test.slices, d)
		got := ""
		if ok {
			var models []string
			if r.Selection != nil {
				models = r.Selection.UseModels
			}
			got = fmt.Sprintf("%d on %d of %v", r.Peak()/accel.Units(r.Devices), r.Devices, models)
		}
		if err != nil || got != test.want || ok && r.Resource != gcuMemory {
			t.Errorf("%s: %q, %v; want %q", name, got, err, test.want)
		}
	}
	some := offered{slice("x", modelled(gcu("a", 16), "S60"), modelled(gcu("b", 8), "S60"))}
	d := demandOf(t, 0, selecting(memory("1Gi"), fmt.Sprintf("device.capacity[%q].memory.isGreaterThan(quantity('8Gi'))", driver)))
	if r, ok, err := NewCatalog().Request(t.Context(), some, d); ok || err != nil {
		t.Errorf("one device of two of a model: %+v, %v", r, err)
	}
}

// What cannot be expressed in units is rated by binpack, with the same ratings.
func TestBinpackForTheRest(t *testing.T) {
	of := State{Slices: offered{slice("x", gcu("a", 16), gcu("b", 16)), slice("y", gcu("a", 16), gcu("b", 8))},
		Held: held(t, holds{"x/a": "9Gi", "y/a": "8Gi"}), Hosts: func(string) Host { return Host{} }}
	catalog := NewCatalog()
	policy := expecting(t, catalog, of, demandOf(t, 0, memory("6Gi")))
	for _, d := range []Demand{demandOf(t, 1000, memory("1Gi"), memory("2Gi")), demandOf(t, 0, memory(""))} {
		got, err := catalog.Rank(t.Context(), of, d, policy)
		if err != nil {
			t.Fatal(err)
		}
		want, err := catalog.Rank(t.Context(), of, d, place.Binpack)
		if err != nil || !slices.Equal(got, want) || len(got) == 0 {
			t.Errorf("%v, want %v; %v", got, want, err)
		}
	}
}

// On random states, nodes are rated for claims as the ledger rates them for equal units.
func TestClaimsAreRatedAsUnits(t *testing.T) {
	const step = int64(1) << 30 / wire.MemoryStep // units of a GiB
	models := []string{"gcu S60", "gcu L600", "gcu T20"}
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 20))
		var published offered
		taken, hosts := holds{}, map[string]Host{}
		policy := fragmentation.New(demand.Options{})
		books := ledger.New(ledger.Options{Policy: policy})
		var names []string
		for n := range 8 + r.IntN(8) {
			name := fmt.Sprintf("n%02d", n)
			names = append(names, name)
			model, gib := models[r.IntN(len(models))], int64(16)
			if model == models[2] {
				gib = 8
			}
			var devices []resourceapi.Device
			inventory := accel.Inventory{Resource: gcuMemory, Several: true}
			for d := range 1 + r.IntN(8) {
				id := fmt.Sprintf("d%d", d)
				device := modelled(gcu(id, gib), strings.TrimPrefix(model, "gcu "))
				share := accel.Share{Device: accel.Device{ID: accel.DeviceID(id), Index: d, Model: model}, Units: accel.Units(gib * step)}
				if r.IntN(12) == 0 {
					device = tainted(device, resourceapi.DeviceTaintEffectNoSchedule)
					share.Health.Unhealthy = true
				} else if used := r.Int64N(gib + 1); used > 0 {
					taken[name+"/"+id] = fmt.Sprintf("%dGi", used)
					share.Withheld = accel.Units(used * step)
				}
				devices = append(devices, device)
				inventory.Shares = append(inventory.Shares, share)
			}
			published = append(published, slice(name, devices...))
			host := Host{CPU: r.Int64N(64000), Memory: r.Int64N(1 << 18)}
			host.Cores = host.CPU
			hosts[name] = host
			books.SetNode(name, []accel.Inventory{inventory})
			books.SetCapacity(name, host.CPU, host.Memory)
		}
		of := State{Slices: published, Held: held(t, taken), Hosts: func(node string) Host { return hosts[node] }}
		random := func() (Demand, place.Ask) {
			a := place.Ask{Units: accel.Units((1 + r.Int64N(8)) * step), Devices: 1, CPU: r.Int64N(16000), Memory: r.Int64N(1 << 14)}
			if r.IntN(3) == 0 {
				a.Devices = 1 + r.IntN(4)
			}
			request := asks("gcu", int64(a.Devices), wire.MemoryCapacity, resource.NewQuantity(int64(a.Units)*wire.MemoryStep,
				resource.BinarySI).String())
			if i := r.IntN(2 * len(models)); i < len(models) {
				is := fmt.Sprintf("device.attributes[%q].model == %q", driver, strings.TrimPrefix(models[i], "gcu "))
				request = selecting(request, is)
				a.Only = &accel.Selection{UseModels: []string{models[i]}}
			}
			d := demandOf(t, a.CPU, request)
			d.Memory = a.Memory
			return d, a
		}
		catalog := NewCatalog()
		for range 200 {
			_, a := random()
			policy.Observe(&a)
		}
		policy.Renew(books.Each(gcuMemory))
		if policy.Epoch() == 0 {
			t.Fatalf("seed %d: no weights: %+v", seed, policy.Status())
		}
		for range 40 {
			d, a := random()
			got, err := catalog.Rank(t.Context(), of, d, learner{policy})
			if err != nil {
				t.Fatal(err)
			}
			request := accel.Request{Resource: gcuMemory, Devices: a.Devices, CPU: a.CPU, Memory: a.Memory, Selection: a.Only,
				Containers: []accel.ContainerRequest{{Kind: accel.AppContainer, Units: a.Units * accel.Units(a.Devices)}}}
			if of, ok, err := catalog.Request(t.Context(), published, d); ok { // else no device is of the model
				if err != nil || of.Peak() != request.Peak() || of.Devices != request.Devices || of.CPU != request.CPU {
					t.Fatalf("seed %d: %+v is %+v, %v", seed, a, of, err)
				}
			}
			verdicts := make([]ledger.Verdict, len(names))
			books.Check(request, names, verdicts)
			var want []Rated
			for i, v := range verdicts {
				if v.Code == accel.Fits { // how devices are connected is unknown here, and the same for all there
					want = append(want, Rated{names[i], v.Rating - place.Connections(v.Rating)})
				}
			}
			slices.SortFunc(got, func(a, b Rated) int { return strings.Compare(a.Node, b.Node) })
			if !slices.Equal(got, want) {
				t.Fatalf("seed %d: %+v with %+v is rated\n%v, by the ledger\n%v", seed, a, a.Only, got, want)
			}
		}
		same(t, catalog.Each(gcuMemory), books.Each(gcuMemory))
	}
}

// same compares nodes as a renewal of weights sees them.
func same(t *testing.T, got, want iter.Seq2[string, *place.Node]) {
	t.Helper()
	text := func(nodes iter.Seq2[string, *place.Node]) string {
		out := ""
		for name, n := range nodes {
			out += fmt.Sprintf("%s %d %d %d\n", name, n.CPU, n.Memory, n.Cores)
			for i := range n.Slots {
				s := &n.Slots[i]
				if s.Unhealthy {
					continue
				}
				out += fmt.Sprintf("  %s %s %d of %d\n", s.ID, s.Model, s.Free, s.Total)
			}
		}
		return out
	}
	if a, b := text(got), text(want); a != b {
		t.Errorf("the catalog has\n%s, the ledger\n%s", a, b)
	}
}
