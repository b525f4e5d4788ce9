package inspect

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
	"github.com/divvy-gpu/divvy/internal/report/inspect/collect"
)

var update = flag.Bool("update", false, "write the golden files anew")

const gcuMemory accel.Resource = "enflame.com/gcu-memory"

// apiServer is as much of an API server as kubectl-divvy asks.
type apiServer struct {
	nodes []metav1.PartialObjectMetadata
	pods  []v1.Pod
	// full are the nodes with their status, quotas those of all namespaces.
	full   []v1.Node
	quotas []v1.ResourceQuota
	// refuseQuotas, when not 0, is the status of lists of quotas.
	refuseQuotas int
	// extender answers behind the service; nil for a service without pods.
	extender http.Handler
	// refuse, when not 0, is the status of every list.
	refuse int
	// asked are the paths, with their queries.
	asked []string
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.asked = append(s.asked, r.URL.RequestURI())
	const service = "/api/v1/namespaces/divvy-system/services/divvy-extender:32766/proxy"
	switch path := r.URL.Path; {
	case strings.HasPrefix(path, service) && s.extender != nil:
		http.StripPrefix(service, s.extender).ServeHTTP(w, r)
	case strings.HasPrefix(path, service):
		answer(w, http.StatusServiceUnavailable, status(http.StatusServiceUnavailable,
			`no endpoints available for service "divvy-extender"`))
	case s.refuse != 0:
		answer(w, s.refuse, status(s.refuse, "lists are not for you"))
	case path == "/api/v1/nodes" && !strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadataList"):
		all := slices.DeleteFunc(slices.Clone(s.full), func(n v1.Node) bool {
			return !selected(r.URL.Query().Get("fieldSelector"), "metadata.name="+n.Name, "metadata.name=")
		})
		answer(w, http.StatusOK, &v1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, Items: all})
	case path == "/api/v1/resourcequotas" && s.refuseQuotas != 0:
		answer(w, s.refuseQuotas, status(s.refuseQuotas, "quotas are not for you"))
	case path == "/api/v1/resourcequotas":
		answer(w, http.StatusOK, &v1.ResourceQuotaList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ResourceQuotaList"},
			Items: s.quotas})
	case path == "/api/v1/nodes":
		answer(w, http.StatusOK, &metav1.PartialObjectMetadataList{
			TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadataList"}, Items: s.nodes})
	case path == "/api/v1/pods":
		pods := slices.DeleteFunc(slices.Clone(s.pods), func(p v1.Pod) bool {
			return !selected(r.URL.Query().Get("fieldSelector"), "spec.nodeName="+p.Spec.NodeName, "spec.nodeName=") ||
				r.URL.Query().Get("labelSelector") == "divvy.dev/pool=true" && p.Labels["divvy.dev/pool"] != "true"
		})
		answer(w, http.StatusOK, &v1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, Items: pods})
	default:
		answer(w, http.StatusNotFound, status(http.StatusNotFound, "the server could not find the requested resource"))
	}
}

// selected reports whether a selector has the term, or none of its key.
func selected(selector, term, key string) bool {
	terms := strings.Split(selector, ",")
	return slices.Contains(terms, term) || !slices.ContainsFunc(terms, func(t string) bool { return strings.HasPrefix(t, key) })
}

func status(code int, text string) *metav1.Status {
	reason := map[int]metav1.StatusReason{
		http.StatusServiceUnavailable: metav1.StatusReasonServiceUnavailable,
		http.StatusNotFound:           metav1.StatusReasonNotFound,
		http.StatusForbidden:          metav1.StatusReasonForbidden,
	}[code]
	return &metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Status:   metav1.StatusFailure, Message: text, Reason: reason, Code: int32(code),
	}
}

func answer(w http.ResponseWriter, code int, object any) {
	body, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	w.Write(body) //nolint:errcheck // a test's client
}

// nodeWith publishes these inventories.
func nodeWith(t *testing.T, name string, inventories ...accel.Inventory) metav1.PartialObjectMetadata {
	t.Helper()
	value, err := wire.EncodeInventory(inventories)
	if err != nil {
		t.Fatal(err)
	}
	node := metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"}}
	node.Name, node.Annotations = name, map[string]string{wire.InventoryAnnotation: value}
	return node
}

// gcuNode has two cards.
func gcuNode(t *testing.T, name string) metav1.PartialObjectMetadata {
	t.Helper()
	inv := accel.Inventory{Resource: gcuMemory, Unit: "1"}
	for i := range 2 {
		inv.Shares = append(inv.Shares, accel.Share{Units: 16, Device: accel.Device{
			Index: i, ID: accel.DeviceID(fmt.Sprintf("%s-%d", name, i)), Model: "S60", NUMANode: i}})
	}
	return nodeWith(t, name, inv)
}

// newServer has two nodes with pods on one of them.
func newServer(t *testing.T) *apiServer {
	t.Helper()
	s := &apiServer{}
	s.nodes = []metav1.PartialObjectMetadata{gcuNode(t, "node-a"), gcuNode(t, "node-b"), {ObjectMeta: metav1.ObjectMeta{Name: "plain"}}}

	signer, err := wire.NewSigner(bytes.Repeat([]byte("k"), wire.MinKeyBytes))
	if err != nil {
		t.Fatal(err)
	}
	for i, units := range []int64{4, 8, 2, 0} {
		pod := v1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: "team", Name: fmt.Sprintf("pod-%d", i), UID: types.UID(fmt.Sprintf("uid-%d", i)),
			CreationTimestamp: metav1.Unix(1662450043+int64(i), 0)}}
		pod.Spec.NodeName = "node-a"
		list := v1.ResourceList{v1.ResourceName(gcuMemory): *resource.NewQuantity(units, resource.DecimalSI)}
		pod.Spec.Containers = []v1.Container{{Name: "main", Resources: v1.ResourceRequirements{Requests: list, Limits: list}}}
		if i < 2 { // the third was placed by hand
			value, err := signer.EncodeGrant(string(pod.UID), accel.Grant{
				Resource: gcuMemory, Node: "node-a", Device: "node-a-0", DeviceUnits: 16, Units: accel.Units(units), At: time.Unix(1, 0),
				Confirmed: i == 0})
			if err != nil {
				t.Fatal(err)
			}
			pod.Annotations = map[string]string{wire.GrantAnnotation: value}
		}
		s.pods = append(s.pods, pod)
	}
	return s
}

// extenderOf answers inspect as the extender does. That both agree on the
// route and the shape is tested with the extender itself, in the lab.
func extenderOf(usages func() []ledger.NodeUsage) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+inspect.Route, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, reportOf(gcuMemory, usages()))
	})
	mux.HandleFunc("GET "+inspect.Route+"/{node}", func(w http.ResponseWriter, r *http.Request) {
		for _, u := range usages() {
			if u.Name == r.PathValue("node") {
				answer(w, http.StatusOK, reportOf(gcuMemory, []ledger.NodeUsage{u}))
				return
			}
		}
		answer(w, http.StatusNotFound, inspect.Failed(fmt.Sprintf("node %q is unknown or offers no %s", r.PathValue("node"), gcuMemory)))
	})
	return mux
}

func twoNodes() []ledger.NodeUsage {
	l := ledger.New(ledger.Options{})
	for _, name := range []string{"extender-a", "extender-b"} {
		l.SetNode(name, []accel.Inventory{{Resource: gcuMemory, Unit: "0.1", Shares: []accel.Share{
			{Units: 160, Device: accel.Device{ID: accel.DeviceID(name), Model: "S60", NUMANode: accel.NoNUMA}}}}})
	}
	l.Observe(ledger.Holding{Pod: accel.PodRef{UID: "u", Namespace: "team", Name: "p"}, Node: "extender-a", Resource: gcuMemory,
		Units: 40, Device: "extender-a", Created: time.Unix(1662450043, 0)})
	return slices.Collect(l.Nodes(gcuMemory))
}

func run(t *testing.T, s *apiServer, node string, change func(*collect.Options)) (out, errOut string, err error) {
	t.Helper()
	server := httptest.NewServer(s)
	defer server.Close()
	clients, err := kube.NewClients(&rest.Config{Host: server.URL}, "test")
	if err != nil {
		t.Fatal(err)
	}
	o := collect.DefaultOptions()
	o.Timeout = 2 * time.Second
	if change != nil {
		change(&o)
	}
	var outBuffer, errBuffer bytes.Buffer
	err = collect.Run(t.Context(), o, clients, node, &outBuffer, &errBuffer)
	return outBuffer.String(), errBuffer.String(), err
}

func TestRun(t *testing.T) {
	notReady := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusServiceUnavailable, inspect.Failed("the extender is not ready: no signing key yet"))
	})
	garbage := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, "hello") })
	strange := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, map[string]string{"kind": "Pod"})
	})
	mute := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })

	tests := map[string]struct {
		extender http.Handler
		refuse   int
		node     string
		change   func(*collect.Options)
		golden   string // of the output
		said     string // part of what standard error says; "" for nothing
		err      string // part of the error
	}{
		"all":      {extender: extenderOf(twoNodes), golden: "all"},
		"one node": {extender: extenderOf(twoNodes), node: "extender-a", golden: "one"},
		"one resource": {extender: extenderOf(twoNodes),
			change: func(o *collect.Options) { o.Resource = string(gcuMemory) }, golden: "all"},
		"one resource of one node, and no lists": {extender: extenderOf(twoNodes), refuse: http.StatusForbidden, node: "extender-a",
			change: func(o *collect.Options) { o.Resource = string(gcuMemory) }, golden: "one"},
		"all that may be seen without lists": {extender: extenderOf(twoNodes), refuse: http.StatusForbidden,
			node: "extender-a", golden: "one",
			said: "Only enflame.com/gcu-memory is shown: list the nodes: lists are not for you."},
		"guide's json": {extender: extenderOf(twoNodes), node: "extender-a", change: func(o *collect.Options) { o.Output = "json" },
			golden: "json"},
		"unknown node": {extender: extenderOf(twoNodes), node: "nowhere",
			err: `node "nowhere" is unknown or offers no devices; available: extender-a, extender-b`},
		"unknown node, for one resource": {extender: extenderOf(twoNodes),
			node: "nowhere", change: func(o *collect.Options) { o.Resource = string(gcuMemory) },
			err: `node "nowhere" is unknown or offers no enflame.com/gcu-memory; available: extender-a, extender-b`},
		"extender is down":      {golden: "fallback", said: "no endpoints available"},
		"extender is not ready": {extender: notReady, golden: "fallback", said: "no signing key yet"},
		"extender is another":   {extender: garbage, golden: "fallback", said: "is not a report"},
		"extender is a pod":     {extender: strange, golden: "fallback", said: "is not a report"},
		"extender says nothing": {extender: mute, change: func(o *collect.Options) { o.Timeout = 50 * time.Millisecond },
			golden: "fallback", said: "deadline exceeded"},
		"no such service":    {change: func(o *collect.Options) { o.Service = "other" }, golden: "fallback", said: "could not find"},
		"down, one node":     {node: "node-b", golden: "fallback-one", said: "no endpoints available"},
		"down, unknown node": {node: "nowhere", err: "available: node-a, node-b"},
		"down, another resource": {change: func(o *collect.Options) { o.Resource = "example.com/none" }, said: "no endpoints",
			err: "no node offers example.com/none; offered resources: enflame.com/gcu-memory"},
		"down, and lists refused": {refuse: http.StatusForbidden, said: "no endpoints", err: "lists are not for you"},
		"a node without devices":  {node: "plain", err: `node "plain" is unknown or offers no devices`},
		"a node without the resource": {node: "plain",
			change: func(o *collect.Options) { o.Resource = string(gcuMemory) }, said: "no endpoints",
			err: `node "plain" is unknown or offers no enflame.com/gcu-memory`},
		"options that make no sense": {change: func(o *collect.Options) { o.Output, o.Namespace, o.Port, o.Timeout = "xml", "", 0, 0 },
			err: "output format \"xml\": must be one of table, wide, json, yaml\n--namespace must not be empty\n--port 0: must be from 1 " +
				"to 65535\n--extender-timeout 0s: must be above zero"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := newServer(t)
			s.extender, s.refuse = tt.extender, tt.refuse
			if tt.golden == "all" || tt.golden == "one" || tt.golden == "json" || strings.Contains(tt.err, "extender-a") {
				s.nodes = []metav1.PartialObjectMetadata{gcuNode(t, "extender-a"), gcuNode(t, "extender-b")}
			}
			out, errOut, err := run(t, s, tt.node, tt.change)
			if tt.err == "" && err != nil {
				t.Fatal(err)
			}
			if tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Fatalf("error %v, want %s", err, tt.err)
			}
			if !strings.Contains(errOut, tt.said) || (tt.said == "") != (errOut == "") {
				t.Errorf("said %q, want %q", errOut, tt.said)
			}
			if tt.golden == "" {
				if out != "" {
					t.Errorf("printed %q beside the error", out)
				}
				return
			}
			compare(t, tt.golden, out)
		})
	}
}

// compare compares an output with a golden file, which it writes first when it is
// told to.
func compare(t *testing.T, name, out string) {
	t.Helper()
	golden := filepath.Join("testdata", name+".txt")
	if *update {
		if err := os.WriteFile(golden, []byte(out), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), out); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// One question is one request, and only the pods that have not ended are read.
func TestRequests(t *testing.T) {
	s := newServer(t)
	s.extender = extenderOf(twoNodes)
	if _, _, err := run(t, s, "extender-a", func(o *collect.Options) { o.Resource = string(gcuMemory) }); err != nil {
		t.Fatal(err)
	}
	const proxy = "/api/v1/namespaces/divvy-system/services/divvy-extender:32766/proxy"
	want := []string{proxy + "/gcushare-scheduler/inspect/extender-a?details=true&resource=enflame.com%2Fgcu-memory"}
	if diff := cmp.Diff(want, s.asked); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	s = newServer(t)
	if _, _, err := run(t, s, "", nil); err != nil {
		t.Fatal(err)
	}
	const unfinished = "fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed"
	want = []string{"/api/v1/nodes?limit=500", "/api/v1/pods?" + unfinished + "&limit=500",
		// Of the pool, which is not there; no pod is read twice.
		"/api/v1/nodes?limit=500", "/api/v1/resourcequotas?limit=500",
		"/api/v1/pods?" + unfinished + "&labelSelector=divvy.dev%2Fpool%3Dtrue&limit=500",
		"/apis/resource.k8s.io/v1/resourceslices?limit=500",
		proxy + "/gcushare-scheduler/inspect?details=true&resource=enflame.com%2Fgcu-memory"}
	if diff := cmp.Diff(want, s.asked); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// newMixedServer has a node with every way of sharing and an older one.
func newMixedServer(t *testing.T) *apiServer {
	t.Helper()
	givenOut := func(as string) accel.Health {
		return accel.Health{Unhealthy: true, Reason: accel.ReasonGivenOut + as}
	}
	gpu := func(i int, units accel.Units, health accel.Health) accel.Share {
		return accel.Share{Units: units, Device: accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprint("GPU-n", i)),
			Model: "NVIDIA A100-SXM4-80GB", NUMANode: i / 2, Health: health}}
	}
	chip := func(i, position int, health accel.Health) accel.Share {
		return accel.Share{Units: 32, Device: accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprint("GPU-i", i)), Board: "GPU-i0",
			Chip: position, Model: "Iluvatar BI-V150", NUMANode: accel.NoNUMA, Health: health}}
	}
	board := accel.Share{Units: 1, Chips: 2, Device: accel.Device{ID: "GPU-i0", Board: "GPU-i0", Model: "Iluvatar BI-V150",
		NUMANode: accel.NoNUMA}}
	well, lost := accel.Health{}, accel.Health{Unhealthy: true, Reason: "XID 79: the GPU has fallen off the bus"}
	s := &apiServer{nodes: []metav1.PartialObjectMetadata{
		nodeWith(t, "mixed",
			accel.Inventory{Resource: "nvidia.com/gpu", Shares: []accel.Share{gpu(0, 1, well), gpu(1, 1, lost),
				gpu(2, 1, givenOut("nvidia.com/gpu-memory"))}},
			accel.Inventory{Resource: "nvidia.com/gpu.shared", Shares: []accel.Share{gpu(3, 4, well)}},
			accel.Inventory{Resource: "nvidia.com/gpu-memory", Unit: "1", Shares: []accel.Share{gpu(0, 80, givenOut("nvidia.com/gpu")),
				gpu(2, 80, well)}},
			accel.Inventory{Resource: "iluvatar.com/gpu", Shares: []accel.Share{board}},
			accel.Inventory{Resource: "iluvatar.com/gpu-memory", Unit: "1", Shares: []accel.Share{
				chip(0, 0, givenOut("iluvatar.com/gpu")), chip(1, 1, givenOut("iluvatar.com/gpu"))}}),
		nodeWith(t, "plain-gpus", accel.Inventory{Resource: "nvidia.com/gpu", Shares: []accel.Share{gpu(0, 1, well)}}),
		gcuNode(t, "gcus"),
	}}
	broken := metav1.PartialObjectMetadata{}
	broken.Name, broken.Annotations = "broken", map[string]string{wire.InventoryAnnotation: "{"}
	s.nodes = append(s.nodes, broken)
	add := func(name string, held map[accel.Resource][]string, asks ...any) {
		pod := v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, UID: types.UID("uid-" + name),
			CreationTimestamp: metav1.Unix(1662450043+int64(len(s.pods)), 0), Annotations: map[string]string{}}}
		pod.Spec.NodeName = "mixed"
		list := v1.ResourceList{}
		for i := 0; i < len(asks); i += 2 {
			list[v1.ResourceName(asks[i].(string))] = *resource.NewQuantity(int64(asks[i+1].(int)), resource.DecimalSI)
		}
		pod.Spec.Containers = []v1.Container{{Name: "main", Resources: v1.ResourceRequirements{Requests: list, Limits: list}}}
		if len(held) > 0 {
			value, err := json.Marshal(held)
			if err != nil {
				t.Fatal(err)
			}
			pod.Annotations[wire.HeldAnnotation] = string(value)
		}
		s.pods = append(s.pods, pod)
	}
	type held = map[accel.Resource][]string
	add("train", held{"nvidia.com/gpu": {"GPU-n0"}, "nvidia.com/gpu.shared": {"GPU-n3::2"}}, "nvidia.com/gpu", 1, "nvidia.com/gpu.shared",
		1)
	add("slices", held{"nvidia.com/gpu.shared": {"GPU-n3::0", "GPU-n3::3"}}, "nvidia.com/gpu.shared", 2)
	add("on-a-board", held{"iluvatar.com/gpu": {"GPU-i0"}}, "iluvatar.com/gpu", 1)
	add("starting", nil, "nvidia.com/gpu", 1)
	add("on-a-lost-one", held{"nvidia.com/gpu": {"GPU-gone"}}, "nvidia.com/gpu", 1)
	add("memory", nil, "nvidia.com/gpu-memory", 20)
	s.pods[len(s.pods)-1].Annotations[wire.HeldAnnotation] = "{garbage"
	signer, err := wire.NewSigner(bytes.Repeat([]byte("k"), wire.MinKeyBytes))
	if err != nil {
		t.Fatal(err)
	}
	if s.pods[len(s.pods)-1].Annotations[wire.GrantAnnotation],
		err = signer.EncodeGrant("uid-memory", accel.Grant{Resource: "nvidia.com/gpu-memory",
		Node: "mixed", Device: "GPU-n2", DeviceUnits: 80, Units: 20, At: time.Unix(1, 0), Confirmed: true}); err != nil {
		t.Fatal(err)
	}
	add("nothing", nil)
	return s
}

// onlyGCUs is an extender that manages Enflame's memory alone.
func onlyGCUs() http.Handler {
	books := ledger.New(ledger.Options{})
	books.SetNode("gcus", []accel.Inventory{{Resource: gcuMemory, Unit: "1", Shares: []accel.Share{
		{Units: 16, Device: accel.Device{ID: "gcus-0", Model: "as the extender says", NUMANode: accel.NoNUMA}}}}})
	next := extenderOf(func() []ledger.NodeUsage { return slices.Collect(books.Nodes(gcuMemory)) })
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked := r.URL.Query().Get("resource"); asked != string(gcuMemory) {
			answer(w, http.StatusNotFound, inspect.Failed(inspect.NotManaged(accel.Resource(asked))))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// All resources of a node are shown, whoever manages them; what the extender
// does not manage is read from nodes and pods.
func TestEveryResourceIsShown(t *testing.T) {
	for name, tt := range map[string]struct {
		extender http.Handler
		node     string
		change   func(*collect.Options)
		said     string
	}{
		"mixed":          {extender: onlyGCUs(), said: "Node broken is not shown: unreadable inventory"},
		"mixed-down":     {said: "The extender does not respond"},
		"mixed-wide":     {extender: onlyGCUs(), node: "mixed", change: func(o *collect.Options) { o.Output = "wide" }},
		"mixed-resource": {extender: onlyGCUs(), change: func(o *collect.Options) { o.Resource = "nvidia.com/gpu" }, said: "broken"},
		"mixed-slices":   {extender: onlyGCUs(), node: "mixed", change: func(o *collect.Options) { o.Resource = "nvidia.com/gpu.shared" }},
		"mixed-json":     {extender: onlyGCUs(), change: func(o *collect.Options) { o.Output = "json" }},
		"mixed-json-gpu": {extender: onlyGCUs(),
			node: "plain-gpus", change: func(o *collect.Options) { o.Output, o.Resource = "json", "nvidia.com/gpu" }},
		"mixed-json-all": {extender: onlyGCUs(), node: "mixed", change: func(o *collect.Options) { o.Output, o.Resource = "json", "all" }},
		"mixed-yaml-all": {extender: onlyGCUs(), node: "plain-gpus",
			change: func(o *collect.Options) { o.Output, o.Resource = "yaml", "all" }},
	} {
		t.Run(name, func(t *testing.T) {
			s := newMixedServer(t)
			s.extender = tt.extender
			out, errOut, err := run(t, s, tt.node, tt.change)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(errOut, tt.said) || (tt.said == "") != (errOut == "") {
				t.Errorf("said %q, want %q", errOut, tt.said)
			}
			compare(t, name, out)
		})
	}
	s := newMixedServer(t)
	s.extender = onlyGCUs()
	_, _, err := run(t, s, "gcus", func(o *collect.Options) { o.Resource = "nvidia.com/gpu" })
	if want := `node "gcus" is unknown or offers no nvidia.com/gpu; available: mixed, plain-gpus`; err == nil || err.Error() != want {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestCommand(t *testing.T) {
	server := httptest.NewServer(newServer(t))
	defer server.Close()
	var out, errOut bytes.Buffer
	cmd := Command()
	cmd.SetArgs([]string{"--server", server.URL, "-o", "json", "node-b"})
	cmd.SetOut(&out)
	cmd.SetErr(&errOut)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	var report inspect.Report
	if err := json.Unmarshal(out.Bytes(), &report); err != nil || len(report.Nodes) != 1 || report.Nodes[0].Name != "node-b" {
		t.Errorf("printed %s: %v", out.String(), err)
	}
}

// reportOf is a report of nodes in the order given.
func reportOf(resource accel.Resource, usages []ledger.NodeUsage) inspect.Report {
	report := inspect.Report{Nodes: make([]inspect.Node, 0, len(usages))}
	for _, u := range usages {
		report.Nodes = append(report.Nodes, inspect.NodeFromUsage(resource, u))
	}
	return report
}

func TestFlagsBesideUsage(t *testing.T) {
	tests := map[string]struct {
		args []string
		want string
	}{
		"a format":     {[]string{"--usage", "-o", "wide"}, `output format "wide": with --usage it must be one of table, json`},
		"no namespace": {[]string{"--usage", "-n", ""}, "--namespace must not be empty"},
		"the extender's": {[]string{"--usage", "--port", "1", "--resource", "a.com/b"},
			"--port has no effect with --usage; leave it out\n--resource"},
		"nodes without it":   {[]string{"node-a", "node-b"}, "accepts at most 1 arg(s), received 2"},
		"nodes are accepted": {[]string{"--usage", "node-a", "node-b", "--kubeconfig", "/nowhere"}, "/nowhere"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			cmd := Command()
			cmd.SilenceErrors, cmd.SilenceUsage = true, true
			cmd.SetArgs(tt.args)
			if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s", err, tt.want)
			}
		})
	}
}
