package dra

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// claimOf makes a claim from texts "request=chip" or "request=chip:bytes".
func claimOf(name string, prepared bool, parts ...string) alloc.Claim {
	c := alloc.Claim{Vendor: "enflame", UID: "uid-" + name, Namespace: "ns", Name: name, Prepared: prepared}
	for _, text := range parts {
		request, chip, _ := strings.Cut(text, "=")
		part := alloc.ClaimPart{Request: request}
		if id, amount, ok := strings.Cut(chip, ":"); ok {
			chip = id
			_, _ = fmt.Sscan(amount, &part.Bytes)
		}
		part.Card.Chips = []accel.DeviceID{accel.DeviceID(chip)}
		c.Parts = append(c.Parts, part)
	}
	return c
}

// useOf makes the use of a container from texts "claim" or "claim/request".
func useOf(pod, container string, requests ...string) Use {
	u := Use{Namespace: "ns", Pod: pod, PodUID: "uid-" + pod, Container: container}
	for _, text := range requests {
		claim, request, _ := strings.Cut(text, "/")
		u.Requests = append(u.Requests, UsedRequest{claim, request})
	}
	return u
}

func TestUses(t *testing.T) {
	gpu, generated := "gpu", "pod-mem-x7f2"
	container := func(name string, claims ...corev1.ResourceClaim) corev1.Container {
		return corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Claims: claims}}
	}
	pod := &corev1.Pod{}
	pod.Namespace, pod.Name, pod.UID = "ns", "p", "uid-p"
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "a", ResourceClaimName: &gpu},
		{Name: "b", ResourceClaimTemplateName: new("mem")}, {Name: "c", ResourceClaimTemplateName: new("none")}}
	pod.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "b", ResourceClaimName: &generated}, {Name: "c"}}
	pod.Spec.InitContainers = []corev1.Container{container("init", corev1.ResourceClaim{Name: "b", Request: "r"})}
	pod.Spec.Containers = []corev1.Container{container("main", corev1.ResourceClaim{Name: "a"}, corev1.ResourceClaim{Name: "c"}),
		container("old"), container("none")}
	pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "extended",
		RequestMappings: []corev1.ContainerExtendedResourceRequest{{ContainerName: "old", ResourceName: "nvidia.com/gpu",
			RequestName: "container-1-request-0"}}}
	want := []Use{useOf("p", "init", "pod-mem-x7f2/r"), useOf("p", "main", "gpu"), useOf("p", "old", "extended/container-1-request-0")}
	if diff := cmp.Diff(want, Uses(pod)); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[string]string{"a": "gpu", "b": "pod-mem-x7f2", "": "extended"}, kube.ClaimsOf(pod)); diff != "" {
		t.Error(diff)
	}
}

func TestArrange(t *testing.T) {
	const conflict = "%s uses %s, and %s uses %s: a container has all its devices of enflame.divvy.dev in one variable"
	wrong := func(use, requests, other, others string) string {
		return fmt.Sprintf(conflict, use, requests, other, others)
	}
	both := claimOf("b", true, "s=1")
	both.Together = map[string][]alloc.Portion{"s": {{Chip: "0"}, {Chip: "1"}}}
	beside := claimOf("a", true, "r=0")
	beside.Together = map[string][]alloc.Portion{"r": {{Chip: "0"}, {Chip: "1"}}}
	elsewhere := claimOf("a", false, "r=9")
	elsewhere.UID, elsewhere.Namespace = "uid-elsewhere", "other"
	namesake := claimOf("a", true, "r=9")
	namesake.UID, namesake.Pods = "uid-old", []string{"uid-gone"}
	fresh := claimOf("a", false, "r=0")
	fresh.Pods = []string{"uid-p"}
	tests := map[string]struct {
		claims []alloc.Claim
		uses   []Use
		sized  bool
		want   string // what requests give
		wrong  []string
	}{
		"one request": {[]alloc.Claim{claimOf("a", false, "r=0")}, []Use{useOf("p", "c", "a/r")}, false, "a/r=0", nil},
		"two requests of a claim in one container": {[]alloc.Claim{claimOf("a", false, "r=0", "s=1")}, []Use{useOf("p", "c", "a")}, false,
			"a/r=0+1 a/s=0+1", nil},
		"two claims in one container": {[]alloc.Claim{claimOf("a", false, "r=0"), claimOf("b", false, "s=1")},
			[]Use{useOf("p", "c", "b", "a")}, false, "a/r=0+1 b/s=0+1", nil},
		"each container its own request": {[]alloc.Claim{claimOf("a", false, "r=0", "s=1")},
			[]Use{useOf("p", "c", "a/r"), useOf("p", "d", "a/s")}, false, "a/r=0 a/s=1", nil},
		"an init container has all that others have": {[]alloc.Claim{claimOf("a", false, "r=0", "s=1")},
			[]Use{useOf("p", "init", "a"), useOf("p", "c", "a/r")}, false, "a/r=0+1 a/s=0+1",
			[]string{wrong("container c of pod ns/p", "r of claim a", "container init of pod ns/p", "all requests of claim a")}},
		"groups of three": {[]alloc.Claim{claimOf("a", false, "r=0", "s=1", "t=2")},
			[]Use{useOf("p", "c", "a/r", "a/s"), useOf("p", "d", "a/s", "a/t")}, false, "a/r=0+1 a/s=0+1 a/t=1+2",
			[]string{wrong("container d of pod ns/p", "s of claim a and t of claim a", "container c of pod ns/p",
				"r of claim a and s of claim a")}},
		"an alternative": {[]alloc.Claim{claimOf("a", false, "r/large=0", "s=1")}, []Use{useOf("p", "c", "a/r", "a/s")}, false,
			"a/r=0+1 a/s=0+1", nil},
		"a claim that is not of the vendor": {[]alloc.Claim{claimOf("a", false, "r=0")}, []Use{useOf("p", "c", "a", "nic")}, false,
			"a/r=0", nil},
		"no container": {[]alloc.Claim{claimOf("a", false, "r=0", "s=1")}, nil, false, "a/r=0 a/s=1", nil},
		"another namespace": {[]alloc.Claim{claimOf("a", false, "r=0", "s=1")},
			[]Use{{Namespace: "other", Pod: "p", Container: "c", Requests: []UsedRequest{{Claim: "a"}}}}, false, "a/r=0 a/s=1", nil},
		"a claim that is prepared keeps its value": {[]alloc.Claim{claimOf("a", true, "r=0"), claimOf("b", false, "s=1")},
			[]Use{useOf("p", "c", "a"), useOf("q", "c", "a", "b")}, false, "a/r=0 b/s=0+1",
			[]string{wrong("container c of pod ns/q", "all requests of claim a and all requests of claim b", "container c of pod ns/p",
				"all requests of claim a")}},
		"unless no other container uses it": {[]alloc.Claim{claimOf("a", true, "r=0"), claimOf("b", false, "s=1")},
			[]Use{useOf("q", "c", "a", "b")}, false, "a/r=0+1 b/s=0+1", nil},
		"and that it has beside another one": {[]alloc.Claim{beside, both}, []Use{useOf("q", "c", "b"), useOf("p", "c", "a", "b")}, false,
			"a/r=0+1 b/s=0+1", []string{wrong("container c of pod ns/q", "all requests of claim b", "container c of pod ns/p",
				"all requests of claim a and all requests of claim b")}},
		"what was beside it is released": {[]alloc.Claim{both}, []Use{useOf("q", "c", "b")}, false, "b/s=1", nil},
		"several containers of which none uses it": {[]alloc.Claim{both, claimOf("c", true, "t=2")},
			[]Use{useOf("q", "c", "b"), useOf("r", "c", "b", "c")}, false, "b/s=1 c/t=1+2",
			[]string{wrong("container c of pod ns/r", "all requests of claim b and all requests of claim c", "container c of pod ns/q",
				"all requests of claim b")}},
		"the memory of a chip from two requests": {[]alloc.Claim{claimOf("a", false, "r=0:10", "s=0:5")}, []Use{useOf("p", "c", "a")}, true,
			"a/r=0:15 a/s=0:15", nil},
		"the same chip with different limits": {[]alloc.Claim{claimOf("a", false, "r=0:10", "s=0:5")},
			[]Use{useOf("p", "c", "a"), useOf("p", "d", "a/r")}, true, "a/r=0:15 a/s=0:15",
			[]string{wrong("container d of pod ns/p", "r of claim a", "container c of pod ns/p", "all requests of claim a")}},
		"the same chip without limits": {[]alloc.Claim{claimOf("a", false, "r=0:10", "s=0:5")},
			[]Use{useOf("p", "c", "a"), useOf("p", "d", "a/r")}, false, "a/r=0:15 a/s=0:15", nil},
		"a claim of the same name that is still held": {[]alloc.Claim{namesake, fresh}, []Use{useOf("p", "c", "a")}, false,
			"a/r=9 a/r=0", nil},
		"a claim of the same name in another namespace": {[]alloc.Claim{elsewhere, claimOf("a", false, "r=0"), claimOf("b", false, "s=1")},
			[]Use{useOf("p", "c", "a", "b")}, false, "a/r=9 a/r=0+1 b/s=0+1", nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			a := arrange(tt.claims, tt.uses, tt.sized)
			var got []string
			for i := range tt.claims {
				for _, r := range refsOf(&tt.claims[i]) {
					var portions []string
					for _, p := range a.values[r] {
						text := string(p.Chip)
						if p.Bytes > 0 {
							text += fmt.Sprint(":", p.Bytes)
						}
						portions = append(portions, text)
					}
					got = append(got, tt.claims[i].Name+"/"+r.request+"="+strings.Join(portions, "+"))
				}
			}
			if got := strings.Join(got, " "); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
			if len(a.wrong) != len(tt.wrong) {
				t.Fatalf("wrong are %+v, want %q", a.wrong, tt.wrong)
			}
			for i, want := range tt.wrong {
				if err := a.wrong[i].Error("enflame.divvy.dev"); !strings.HasPrefix(err.Error(), want) {
					t.Errorf("got %q, want %q", err, want)
				}
			}
			// Once the changes are made, all claims are prepared and nothing else is to change.
			claims := slices.Clone(tt.claims)
			for _, c := range a.changed() {
				c.Prepared = true
				claims[slices.IndexFunc(claims, func(other alloc.Claim) bool { return other.Key() == c.Key() })] = c
			}
			for i := range claims {
				for _, r := range refsOf(&claims[i]) {
					if given := a.given(&claims[i], r); !claims[i].Prepared || !slices.Equal(given, a.values[r]) {
						t.Errorf("%s of claim %+v gives %v, and was to give %v", r.request, claims[i], given, a.values[r])
					}
				}
			}
			if again := arrange(claims, tt.uses, tt.sized).changed(); len(again) > 0 {
				t.Errorf("changed once more are %+v", again)
			}
		})
	}
}

// TestRejects: a container cannot have devices of a vendor in two ways, nor a part of a device's memory if it
// gets around the limit.
func TestRejects(t *testing.T) {
	claims := []alloc.Claim{claimOf("part", false, "r=0:10"), claimOf("whole", false, "r=1")}
	for name, tt := range map[string]struct {
		around, units, claim string
		sized                bool
		want                 string
	}{
		"a part": {"container c is privileged", "", "part", true,
			"container c of pod ns/p: container c is privileged, which gets around"},
		"a part without limits": {"container c is privileged", "", "part", false, ""},
		"a whole device":        {"container c is privileged", "", "whole", true, ""},
		"a harmless pod":        {"", "", "part", true, ""},
		"a claim of another":    {"container c is privileged", "enflame", "none", true, ""},
		"units of the vendor": {"", "enflame", "whole", false,
			"container c of pod ns/p requests v.example/unit and uses all requests of claim whole: a container has all its devices"},
		"units of another vendor": {"", "nvidia", "whole", false, ""},
	} {
		use := useOf("p", "c", tt.claim)
		use.Around, use.Units = tt.around, map[string]accel.Resource{tt.units: "v.example/unit"}
		err := arrange(claims, nil, tt.sized).rejects(&use, tt.sized)
		if got := fmt.Sprint(err); (err == nil) != (tt.want == "") || err != nil && !strings.HasPrefix(got, tt.want) {
			t.Errorf("%s: got %v, want %q", name, err, tt.want)
		}
	}
}

// podsWorld is a node whose kubelet prepares the claims of random pods as its manager does: all that
// are not prepared for another pod, in one call.
type podsWorld struct {
	rand     *rand.Rand
	claims   map[string]alloc.Claim // by name, prepared or not
	prepared map[string]bool
	pods     map[string][]Use // those that are bound, running or not
	running  map[string]bool
	made     int
}

func (w *podsWorld) held(fresh ...string) []alloc.Claim {
	var out []alloc.Claim
	for _, name := range slices.Sorted(maps.Keys(w.claims)) {
		if w.prepared[name] || slices.Contains(fresh, name) {
			out = append(out, w.claims[name])
		}
	}
	return out
}

func (w *podsWorld) uses() []Use {
	var out []Use
	for _, pod := range slices.Sorted(maps.Keys(w.pods)) {
		out = append(out, w.pods[pod]...)
	}
	return out
}

// claimsOf are the claims of a pod.
func (w *podsWorld) claimsOf(pod string) []string {
	var out []string
	for _, u := range w.pods[pod] {
		for _, r := range u.Requests {
			out = append(out, r.Claim)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func (w *podsWorld) apply(a *arrangement) {
	for _, c := range a.changed() {
		c.Prepared = true
		w.claims[c.Name], w.prepared[c.Name] = c, true
	}
}

// bind adds a pod with claims of its own and shared ones.
func (w *podsWorld) bind() string {
	w.made++
	pod := fmt.Sprint("p", w.made)
	var names []string
	for i := range 1 + w.rand.IntN(2) {
		name := fmt.Sprint(pod, "-", i)
		if w.rand.IntN(3) == 0 {
			name = fmt.Sprint("shared", w.rand.IntN(3))
		}
		if _, ok := w.claims[name]; !ok {
			var parts []string
			for j := range 1 + w.rand.IntN(3) {
				w.made++
				parts = append(parts, fmt.Sprintf("r%d=chip%d", j%2, w.made))
			}
			w.claims[name] = claimOf(name, false, parts...)
		}
		names = append(names, name)
	}
	for i := range 1 + w.rand.IntN(2) {
		var requests []string
		for _, name := range names {
			if w.rand.IntN(4) > 0 {
				requests = append(requests, name+[]string{"", "", "/r0", "/r1"}[w.rand.IntN(4)])
			}
		}
		w.pods[pod] = append(w.pods[pod], useOf(pod, fmt.Sprint("c", i), requests...))
	}
	return pod
}

// sees returns what a container finds: the device nodes, and the values of the variable, of which
// any may be the one that counts.
func (w *podsWorld) sees(t *testing.T, u *Use) (nodes string, values map[string]bool) {
	t.Helper()
	var reached []string
	values = map[string]bool{}
	text := func(portions []alloc.Portion) []string {
		var out []string
		for _, p := range portions {
			out = append(out, string(p.Chip))
		}
		slices.Sort(out)
		return out
	}
	for _, used := range u.Requests {
		claim := w.claims[used.Claim]
		spec, err := Spec(&claim, func(own, all []alloc.Portion) (cdispecs.ContainerEdits, error) {
			return cdispecs.ContainerEdits{Env: text(own), NetDevices: nil, AdditionalGIDs: nil,
				Mounts: []*cdispecs.Mount{{HostPath: strings.Join(text(all), ",")}}}, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range spec.Devices {
			if used.Request == "" || d.Name == claim.UID+"-"+used.Request {
				reached = append(reached, d.ContainerEdits.Env...)
				values[d.ContainerEdits.Mounts[0].HostPath] = true
			}
		}
	}
	slices.Sort(reached)
	return strings.Join(slices.Compact(reached), ","), values
}

// chips are those of a container, counted without the code under test.
func (w *podsWorld) chips(u *Use) string {
	all := map[string]bool{}
	for _, used := range u.Requests {
		for _, part := range w.claims[used.Claim].Parts {
			if used.Request == "" || part.Request == used.Request {
				all[string(part.Card.Chips[0])] = true
			}
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(all)), ",")
}

// contradiction reports whether two containers have a request in common and not all: no value of a
// variable can be right for both.
func (w *podsWorld) contradiction() bool {
	all := w.uses()
	for i := range all {
		for j := range i {
			for _, x := range all[i].Requests {
				for _, y := range all[j].Requests {
					common := x.Claim == y.Claim && (x.Request == "" || y.Request == "" || x.Request == y.Request)
					if common && w.chips(&all[i]) != w.chips(&all[j]) {
						return true
					}
				}
			}
		}
	}
	return false
}

// TestContainersSeeWhatTheyUse: whatever pods are bound and end, each container finds the devices of
// its requests in the variable, whichever CDI device sets it, or its pod is rejected for a
// contradiction. Those that kubelet does not ask for are reported if theirs are wrong.
func TestContainersSeeWhatTheyUse(t *testing.T) {
	accepted, rejected, reported := 0, 0, 0
	for seed := range uint64(80) {
		w := &podsWorld{rand: rand.New(rand.NewPCG(seed, 0)), claims: map[string]alloc.Claim{}, prepared: map[string]bool{},
			pods: map[string][]Use{}, running: map[string]bool{}}
		for range 30 {
			switch w.rand.IntN(3) {
			case 0, 1:
				pod := w.bind()
				fresh := slices.DeleteFunc(w.claimsOf(pod), func(name string) bool { return w.prepared[name] })
				if len(fresh) == 0 {
					w.running[pod] = true // kubelet does not ask
					break
				}
				keys := map[alloc.ClaimKey]bool{}
				for _, name := range fresh {
					c := w.claims[name]
					keys[c.Key()] = true
				}
				a := arrange(w.held(fresh...), w.uses(), false)
				if slices.ContainsFunc(a.wrong, func(c clash) bool { return a.uses(&c.use, keys) }) {
					if rejected++; !w.contradiction() {
						t.Fatalf("seed %d: %s is rejected without need: %+v", seed, pod, a.wrong)
					}
					if w.rand.IntN(2) == 0 {
						delete(w.pods, pod)
					}
					break
				}
				accepted++
				w.apply(a)
				w.running[pod] = true
				for _, u := range w.pods[pod] {
					nodes, values := w.sees(t, &u)
					right := slices.ContainsFunc(a.wrong, func(c clash) bool { return c.use.name() == u.name() }) ||
						len(u.Requests) == 0 || len(values) == 1 && values[nodes] && nodes == w.chips(&u)
					if !right && nodes != "" {
						t.Fatalf("seed %d: %s sees %s in %v, and uses %s", seed, u.name(), nodes, values, w.chips(&u))
					}
				}
			default:
				for _, pod := range slices.Sorted(maps.Keys(w.running))[:min(1, len(w.running))] {
					delete(w.pods, pod)
					delete(w.running, pod)
				}
				for name := range w.prepared {
					used := func(p string) bool { return slices.Contains(w.claimsOf(p), name) }
					if !slices.ContainsFunc(slices.Collect(maps.Keys(w.running)), used) {
						c := w.claims[name]
						c.Prepared, c.Together = false, nil
						w.claims[name] = c
						delete(w.prepared, name)
					}
				}
			}
			a := arrange(w.held(), w.uses(), false)
			w.apply(a)
			for pod := range w.running {
				for _, u := range w.pods[pod] {
					nodes, values := w.sees(t, &u)
					if slices.ContainsFunc(a.wrong, func(c clash) bool { return c.use.name() == u.name() }) {
						if reported++; !w.contradiction() {
							t.Fatalf("seed %d: %s is reported without need", seed, u.name())
						}
						continue
					}
					if nodes != "" && (len(values) != 1 || !values[nodes] || nodes != w.chips(&u)) {
						t.Fatalf("seed %d: %s sees %s in %v, and uses %s", seed, u.name(), nodes, values, w.chips(&u))
					}
				}
			}
		}
	}
	if accepted < 400 || rejected < 40 || reported < 40 {
		t.Errorf("the pods do not differ enough: %d accepted, %d rejected, %d reported", accepted, rejected, reported)
	}
}
