package main

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

func TestParse(t *testing.T) {
	tests := map[string]struct {
		minutes string
		args    []string
		want    time.Duration
		err     string
	}{
		"the default":                   {want: 4 * time.Minute},
		"minutes of the environment":    {minutes: "2.5", want: 150 * time.Second},
		"the flag wins":                 {minutes: "2", args: []string{"--duration=3m"}, want: 3 * time.Minute},
		"too short":                     {args: []string{"--duration=5s"}, err: "too short"},
		"minutes that are no number":    {minutes: "many", err: "SOAK_MINUTES"},
		"an argument that nobody knows": {args: []string{"more"}, err: "unknown argument"},
		"limits and claims":             {args: []string{"--limits", "--claims"}, err: "exclude each other"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Setenv("SOAK_MINUTES", test.minutes)
			o, err := parse(test.args, io.Discard)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Fatalf("error %v, want one with %q", err, test.err)
				}
				return
			}
			if err != nil || o.duration != test.want || o.seed == 0 {
				t.Errorf("options %+v, %v; want a duration of %v and some seed", o, err, test.want)
			}
		})
	}
}

// TestNewPod makes many pods: each must fit a card, and every shape must come.
func TestNewPod(t *testing.T) {
	s := &testenv.Env{Pods: testenv.Pods{Namespace: "n"}}
	rng := rand.New(rand.NewPCG(1, 1))
	shapes := map[string]bool{}
	sum := int64(0)
	const n = 500
	for i := range n {
		pod := newPod(s, rng, fmt.Sprint(i))
		units := testenv.Units(pod)
		if units < 1 || units > cardUnits {
			t.Fatalf("pod %+v asks for %d units, a card has %d", pod.Name, units, cardUnits)
		}
		sum += units
		shapes[fmt.Sprintf("%d init, %d app", len(pod.Spec.InitContainers), len(pod.Spec.Containers))] = true
		if endsByItself(pod) {
			shapes["ends"] = true
		}
	}
	for _, want := range []string{"0 init, 1 app", "0 init, 2 app", "1 init, 1 app", "2 init, 2 app", "ends"} {
		if !shapes[want] {
			t.Errorf("no pod of the shape %q among %d: %v", want, n, shapes)
		}
	}
	if mean := float64(sum) / n; mean < 3 || mean > 8 {
		t.Errorf("a pod asks for %.1f units on average, which fills 8 cards with too few or too many pods", mean)
	}
}

func TestSameSeedSamePods(t *testing.T) {
	s := &testenv.Env{}
	one, two := rand.New(rand.NewPCG(7, 1)), rand.New(rand.NewPCG(7, 1))
	for i := range 50 {
		if a, b := newPod(s, one, "p").String(), newPod(s, two, "p").String(); a != b {
			t.Fatalf("pod %d differs:\n%s\n%s", i, a, b)
		}
	}
}

func TestNote(t *testing.T) {
	c := newChurn(nil, nil, 0, kind{})
	pod := func(name string, status corev1.PodStatus) *corev1.Pod {
		p := &corev1.Pod{Status: status}
		p.Name, p.UID = name, types.UID(name)
		return p
	}
	c.note(pod("running", corev1.PodStatus{Phase: corev1.PodRunning}))
	if len(c.ran) != 1 || len(c.refused)+len(c.died) != 0 {
		t.Errorf("a running pod: %d ran, %d refused, %d died", len(c.ran), len(c.refused), len(c.died))
	}
	c.note(pod("refused", corev1.PodStatus{Phase: corev1.PodFailed, Reason: "UnexpectedAdmissionError", Message: "away"}))
	if len(c.refused) != 1 || len(c.died) != 0 {
		t.Errorf("a refused pod: %v refused, %v died", c.refused, c.died)
	}
	c.note(pod("running", corev1.PodStatus{Phase: corev1.PodFailed}))
	if len(c.died) != 1 || len(c.refused) != 1 {
		t.Errorf("the running pod died: %v died, %v refused", c.died, c.refused)
	}
}

func TestReasons(t *testing.T) {
	got := reasons([]string{"app: ended with 128", "divvy-soak/soak-0001 needs 4 units", "divvy-soak/soak-0022 needs 12 units"})
	want := []string{"2 times: N needs N units", "1 times: app: ended with N"}
	if !slices.Equal(got, want) {
		t.Errorf("reasons %q, want %q", got, want)
	}
}

func TestResult(t *testing.T) {
	good := result{
		duration: 4 * time.Minute, created: 200, ran: 180, restarts: map[string]int{"kubelet killed": 4},
		watch: audit.Summary{Largest: 16, Size: 16, Fill: 0.97}, pods: 20, containers: 30,
	}
	if err := good.faults(); err != nil {
		t.Errorf("a good run has the faults %v", err)
	}
	want := "soak: 180 pods run, 4 restarts done, 0 mismatches, largest use of any card 16 of 16 units, fullest 97 % of all cards"
	if text := good.String(); !strings.HasSuffix(text, want) {
		t.Errorf("summary %q, want it to end with %q", text, want)
	}
	for want, change := range map[string]func(*result){
		"mismatch: x":        func(r *result) { r.mismatches = []string{"x"} },
		"beyond its size: y": func(r *result) { r.watch.Violations = []string{"y"} },
		"ended by itself: z": func(r *result) { r.died = []string{"z"} },
		"only 10 pods ran":   func(r *result) { r.ran = 10 },
		"refused 60 of 200":  func(r *result) { r.refused = slices.Repeat([]string{"away"}, 60) },
		"filled to 80 %":     func(r *result) { r.watch.Fill = 0.8 },
		"only 0 restarts":    func(r *result) { r.restarts = nil },
		"no pod was left":    func(r *result) { r.pods = 0 },
	} {
		bad := good
		change(&bad)
		if err := bad.faults(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("faults %v, want one with %q", err, want)
		}
	}
}

// TestNewGreedyPod: there are pods that try for more than their allocation, and such that do not.
func TestNewGreedyPod(t *testing.T) {
	s := &testenv.Env{Pods: testenv.Pods{Namespace: "n"}}
	rng := rand.New(rand.NewPCG(1, 1))
	greedy := map[bool]int{}
	for i := range 100 {
		pod := newGreedyPod(s, rng, fmt.Sprint(i))
		if units := greedyUnits(pod); units < 1 || units > 8 {
			t.Fatalf("pod of %d units", units)
		}
		greedy[strings.Count(strings.Join(pod.Spec.Containers[0].Command, " "), "--mib") == 2]++
	}
	if greedy[true] < 20 || greedy[false] < 20 {
		t.Errorf("pods that try for more: %v", greedy)
	}
}

func TestJudge(t *testing.T) {
	type limits = map[accel.DeviceID]backend.MemoryLimit
	limit := func(bytes, used uint64) backend.MemoryLimit {
		return backend.MemoryLimit{Bytes: bytes, UsedBytes: used}
	}
	for name, test := range map[string]struct {
		limits limits
		wrong  string
		full   bool
	}{
		"as allocated":        {limits: limits{"a": limit(8, 3)}},
		"at its limit":        {limits: limits{"a": limit(8, 8)}, full: true},
		"no limit":            {wrong: "limits on 0 GPUs, want one"},
		"two GPUs":            {limits: limits{"a": limit(8, 0), "b": limit(8, 0)}, wrong: "limits on 2 GPUs, want one"},
		"another limit":       {limits: limits{"a": limit(9, 3)}, wrong: "the limit on a is 9 bytes, allocated are 8"},
		"more than its limit": {limits: limits{"a": limit(8, 9)}, wrong: "9 bytes of a are in use, allocated are 8"},
	} {
		t.Run(name, func(t *testing.T) {
			if wrong, full := judge(test.limits, 8); wrong != test.wrong || full != test.full {
				t.Errorf("judge = %q, %v; want %q, %v", wrong, full, test.wrong, test.full)
			}
		})
	}
}

// TestNewClaimingPod: every shape of a claim comes, from a template, for one pod, and shared, and
// every way in which containers have devices.
func TestNewClaimingPod(t *testing.T) {
	s := &testenv.Env{Pods: testenv.Pods{Namespace: "n"}}
	rng := rand.New(rand.NewPCG(1, 1))
	seen := map[string]int{}
	const n = 2000
	sum := int64(0)
	for i := range n {
		pod := newClaimingPod(s, rng, fmt.Sprintf("soak-%04d", i))
		sum += claimedGiB(pod)
		uses := 0
		for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			uses += len(c.Resources.Claims)
			if len(c.Resources.Claims) > 0 && len(c.Resources.Limits) > 0 {
				seen["both in a container"]++
			}
			if len(c.Resources.Claims) > 1 {
				seen["two claims in a container"]++
			}
			for _, use := range c.Resources.Claims {
				if use.Request != "" {
					seen["one request"]++
				}
			}
		}
		if uses == 0 {
			seen["no claim"]++
		}
		for _, one := range pod.Spec.ResourceClaims {
			name := ptr.Deref(one.ResourceClaimName, ptr.Deref(one.ResourceClaimTemplateName, ""))
			shape, known := shapeOf(name)
			if !known {
				t.Fatalf("claim %q has no shape", name)
			}
			switch {
			case one.ResourceClaimTemplateName != nil:
				seen[shape.name+" of a template"]++
			case strings.HasSuffix(name, pod.Name):
				seen[shape.name+" of its own"]++
			case len(pod.Spec.ResourceClaims) == 1:
				seen[shape.name+" shared"]++
			default:
				t.Errorf("pod %s shares a claim and has another", pod.Name)
			}
		}
	}
	want := []string{"both in a container", "two claims in a container", "one request", "no claim"}
	for _, shape := range claimShapes {
		want = append(want, shape.name+" of a template", shape.name+" of its own", shape.name+" shared")
	}
	for _, one := range want {
		if seen[one] == 0 {
			t.Errorf("%q does not occur in %d pods: %v", one, n, seen)
		}
	}
	if mean := float64(sum) / n; mean < 10 || mean > 30 {
		t.Errorf("a pod asks for %.1f GiB on average, which fills %d GiB with too few or too many pods", mean, claimGiB)
	}
}

func TestClaimSpec(t *testing.T) {
	mixed, _ := shapeOf("mixed-shared-1")
	spec := mixed.spec().Devices
	if len(spec.Requests) != 2 || spec.Requests[1].Name != "r1" || len(spec.Constraints) != 0 {
		t.Errorf("the claim of two requests is %+v", spec)
	}
	chips, _ := shapeOf("chips-c0-soak-0001")
	if spec := chips.spec().Devices; spec.Requests[0].Exactly.Count != 2 || len(spec.Constraints) != 1 {
		t.Errorf("the claim of two chips is %+v", spec)
	}
	if _, known := shapeOf("other"); known {
		t.Error("a claim of another name has a shape")
	}
}

func TestClaimsResult(t *testing.T) {
	good := claimsResult{ran: 50, end: comparison{containers: 9, took: time.Second}, ClaimSummary: audit.ClaimSummary{
		Samples: 90, Full: 80, Containers: 700, Claims: 40, Shared: 30, Both: 20, Largest: 200 * gib,
	}}
	if err := good.faults(); err != nil {
		t.Errorf("a good run has the faults %v", err)
	}
	if text := (result{claims: &good}).String(); !strings.Contains(text, "claims had up to 200 of 256 GiB") {
		t.Errorf("summary %q, want it with the memory", text)
	}
	for want, change := range map[string]func(*claimsResult){
		"mismatch: x":             func(r *claimsResult) { r.Violations = []string{"x"} },
		"mismatch: at the end: y": func(r *claimsResult) { r.end.err = errors.New("y") },
		"shows nothing":           func(r *claimsResult) { r.Shared = 0 },
		"39 % of the memory":      func(r *claimsResult) { r.Largest = 100 * gib },
	} {
		bad := good
		change(&bad)
		whole := result{claims: &bad}
		if err := whole.faults(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("faults %v, want one with %q", err, want)
		}
		if counted := !strings.Contains(whole.String(), " 0 mismatches"); counted != strings.HasPrefix(want, "mismatch") {
			t.Errorf("%s: mismatches are counted is %t", want, counted)
		}
	}
}

// TestClaimsComeAndGo: the claims that pods name are created once, and deleted when no pod names them.
func TestClaimsComeAndGo(t *testing.T) {
	ctx := t.Context()
	s := &testenv.Env{Client: fake.NewClientset(), Pods: testenv.Pods{Namespace: "n"}}
	pod := func(claims ...string) *corev1.Pod {
		p := s.Pods.New("p")
		for _, name := range claims {
			p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, corev1.PodResourceClaim{ResourceClaimName: &name})
		}
		return p
	}
	claims := s.Client.ResourceV1().ResourceClaims("n")
	exist := func() (names []string) {
		list, err := claims.List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for i := range list.Items {
			names = append(names, list.Items[i].Name)
		}
		slices.Sort(names)
		return names
	}
	one, two := pod("gcu2-shared-1", "gpu-c0-p"), pod("gcu2-shared-1")
	for _, p := range []*corev1.Pod{one, two} {
		if err := makeClaims(ctx, s, p); err != nil {
			t.Fatal(err)
		}
	}
	template := &resourceapi.ResourceClaim{}
	template.Name, template.OwnerReferences = "p-c0-x", []metav1.OwnerReference{{Kind: "Pod", Name: "p"}}
	if _, err := claims.Create(ctx, template, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got, want := exist(), []string{"gcu2-shared-1", "gpu-c0-p", "p-c0-x"}; !slices.Equal(got, want) {
		t.Errorf("claims %q, want %q", got, want)
	}
	tidyClaims(ctx, s, []*corev1.Pod{two})
	if got, want := exist(), []string{"gcu2-shared-1", "p-c0-x"}; !slices.Equal(got, want) {
		t.Errorf("with the second pod alone there are the claims %q, want %q", got, want)
	}
	if err := makeClaims(ctx, s, pod("other")); err == nil {
		t.Error("a claim without a shape was created")
	}
}
