package main

import (
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

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
