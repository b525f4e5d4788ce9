package extender

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// How the attempts to place a pod went is read as the watch shows it.
func TestAttemptOfArgs(t *testing.T) {
	condition := v1.PodCondition{
		Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: "Unschedulable", LastTransitionTime: metav1.Now(),
		Message: "0/2 nodes are available: 2 \"quoted\" <b> é\u2028.\nAnd more",
	}
	for name, conditions := range map[string][]v1.PodCondition{
		"none": nil, "others": {{Type: v1.PodReady, Message: "PodScheduled"}},
		"first": {condition, {Type: v1.PodReady}}, "last": {{Type: v1.PodReady}, condition},
	} {
		t.Run(name, func(t *testing.T) {
			pod := newPod("p", 4)
			pod.ResourceVersion, pod.Status.Conditions = "4711", conditions
			body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &[]string{"a"}})
			if err != nil {
				t.Fatal(err)
			}
			args, err := decodeFilterArgs(body)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := cluster.AttemptOf(args.pod), cluster.AttemptOf(pod); got != want || got.Version != 4711 {
				t.Errorf("%+v, want %+v", got, want)
			}
		})
	}
	pod := newPod("p", 4)
	pod.Status.Conditions = slices.Repeat([]v1.PodCondition{condition}, maxConditions+1)
	body, err := json.Marshal(extenderv1.ExtenderArgs{Pod: pod, NodeNames: &[]string{"a"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := decodeFilterArgs(body); err == nil || !strings.Contains(err.Error(), "more than 1000 conditions") {
		t.Errorf("%v", err)
	}
}

func FuzzFilterArgs(f *testing.F) {
	pod, err := json.Marshal(newPod("p", 4, 2))
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{
		`{"Pod":` + string(pod) + `,"Nodes":null,"NodeNames":["a","b"]}`,
		`{"Pod":{},"Nodes":null,"NodeNames":[]}`,
		`{"Pod":{},"Nodes":null,"NodeNames":["a"]}` + "\n",
		`{"Pod":{},"Nodes":null,"NodeNames":["a",]}`,
		`{"Pod":{},"Nodes":null,"NodeNames":["a"],"NodeNames":["b"]}`,
		`{"Pod":{},"Nodes":null,"NodeNames":["a\"","\u00e9","é","<"]}`,
		`{"Pod":{"metadata":{"name":"}{\\\""}},"Nodes":null,"NodeNames":["a"]}`,
		`{"Pod":{]},"Nodes":null,"NodeNames":["a"]}`,
		`{"Pod":{},"Nodes":null,"NodeNames":["a"]}]}`,
		`{"Pod":{},"Nodes":{"items":[{"metadata":{"name":"a"}}]},"NodeNames":null}`,
		`{"pod":{"spec":{"initContainers":[{"restartPolicy":"Always"}]}},"nodenames":null}`,
		`{"Pod":{"spec":{"containers":[{"resources":{"requests":{"cpu":"1","memory":" 2Gi","a":3,"a":"4"},"limits":{}}}]}},"Nodes":null,` +
			`"NodeNames":["a"]}`,
		`{"Pod":{"metadata":{"resourceVersion":"7"},"status":{"conditions":[{"type":"PodScheduled","status":"False","message":"é"},{}]}},` +
			`"Nodes":null,"NodeNames":["a"]}`,
		`{"Pod":{"status":{"conditions":{"type":"PodScheduled"}}},"Nodes":null,"NodeNames":["a"]}`,
		`null`, `[]`, ``, `{"Pod":`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) { sameAsWhole(t, body) })
}

// sameAsWhole compares what is read with what a whole decode into kube-scheduler's own type
// gives.
func sameAsWhole(t *testing.T, body []byte) {
	t.Helper()
	before := bytes.Clone(body)
	got, err := decodeFilterArgs(body)
	if !bytes.Equal(before, body) {
		t.Fatalf("%q was changed to %q", before, body)
	}
	if err != nil {
		return
	}
	var whole extenderv1.ExtenderArgs
	if json.Unmarshal(body, &whole) != nil || whole.Pod == nil {
		return // a field that does not decide is wrong
	}
	if whole.NodeNames != nil && !slices.Equal(*whole.NodeNames, got.names) {
		t.Fatalf("%q: names %q, want %q", body, got.names, *whole.NodeNames)
	}
	sameContainers(t, whole.Pod.Spec.Containers, got.pod.Spec.Containers)
	sameContainers(t, whole.Pod.Spec.InitContainers, got.pod.Spec.InitContainers)

	// What is read can be answered.
	var answer extenderv1.ExtenderFilterResult
	out := appendFilterResult(nil, got, &decision.Answer{Fits: make([]int, min(len(got.names), 1))})
	if err := json.Unmarshal(out, &answer); err != nil {
		t.Fatalf("%q: answer %q: %v", body, out, err)
	}
}

func sameContainers(t *testing.T, whole, got []v1.Container) {
	t.Helper()
	if len(whole) != len(got) {
		t.Fatalf("%d containers, want %d", len(got), len(whole))
	}
	for i := range whole {
		w, g := &whole[i], &got[i]
		if w.Name != g.Name || !reflect.DeepEqual(w.RestartPolicy, g.RestartPolicy) ||
			!reflect.DeepEqual(w.Resources.Limits, g.Resources.Limits) || !reflect.DeepEqual(w.Resources.Requests, g.Resources.Requests) {
			t.Fatalf("container %+v, want %+v", g, w)
		}
	}
}

func FuzzBindArgs(f *testing.F) {
	f.Add([]byte(`{"PodName":"p","PodNamespace":"n","PodUID":"u","Node":"a"}`))
	f.Add([]byte(`{"PodName":null}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		args, err := decodeBindArgs(body)
		var want extenderv1.ExtenderBindingArgs
		if json.Unmarshal(body, &want) != nil {
			if err == nil {
				t.Fatalf("%q was read as %+v", body, args)
			}
			return
		}
		got := extenderv1.ExtenderBindingArgs{PodName: args.PodName, PodNamespace: args.PodNamespace, PodUID: want.PodUID, Node: args.Node}
		if err == nil && (got != want || args.PodUID != string(want.PodUID)) {
			t.Fatalf("%q was read as %+v, want %+v", body, args, want)
		}
	})
}

func FuzzString(f *testing.F) {
	f.Add("plain")
	f.Add("q\"\\<\n\xff\u2028é")
	f.Fuzz(func(t *testing.T, s string) {
		want, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if got := appendString(nil, s); !bytes.Equal(got, want) {
			t.Fatalf("%q written as %s, want %s", s, got, want)
		}
	})
}
