package simulate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
	"github.com/divvy-gpu/divvy/internal/report/simulate/live"
)

var update = flag.Bool("update", false, "write the golden files anew")

// run runs the subcommand with these arguments, in a cluster of these objects
// or without one when there are none.
func run(t *testing.T, objects []runtime.Object, stdin string, args ...string) (out, errOut string, err error) {
	t.Helper()
	cmd := command(func() (kube.Clients, error) {
		if objects == nil {
			return kube.Clients{}, errors.New("there is no cluster")
		}
		return kube.Clients{Kubernetes: fake.NewClientset(objects...)}, nil
	})
	var stdout, stderr bytes.Buffer
	cmd.SetArgs(append([]string{}, args...)) // nil would stand for the test's own
	cmd.SetIn(strings.NewReader(stdin))
	cmd.SetOut(&stdout)
	cmd.SetErr(&stderr)
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	err = cmd.ExecuteContext(context.Background())
	return stdout.String(), stderr.String(), err
}

// golden compares with a file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Errorf("%s (-want +got), -update writes it anew:\n%s", path, d)
	}
}

// busy are six nodes, and pods for 90 % of their units.
func busy(t *testing.T) []runtime.Object {
	t.Helper()
	var out []runtime.Object
	for _, name := range []string{"a", "b", "c", "d", "e", "f"} {
		out = append(out, liveNode(t, name))
	}
	for i, units := range slices.Repeat([]int{3, 8, 11, 16, 5}, 4) {
		out = append(out, livePod(fmt.Sprintf("pod-%02d", i), "", units, v1.PodPending, nil))
	}
	return out
}

func TestOutput(t *testing.T) {
	tests := map[string][]string{
		"table.txt":    nil,
		"one-seed.txt": {"--policy", "spread", "--shuffles", "1", "--seed", "7", "--arrived", "50,150"},
		"churn.txt":    {"--policy", "binpack,spread", "--churn", "--shuffles", "2"},
		"find.txt":     {"--policy", "binpack,spread", "--find-nodes", "--shuffles", "3"},
		"replay.json":  {"--policy", "all", "--shuffles", "2", "--arrived", "20"},
		"churn.json":   {"--policy", "binpack", "--churn", "--shuffles", "2", "--sample"},
		"find.json":    {"--policy", "binpack", "--find-nodes", "--shuffles", "2"},
	}
	for file, args := range tests {
		t.Run(file, func(t *testing.T) {
			format, _ := strings.CutPrefix(filepath.Ext(file), ".")
			if format == "txt" {
				format = "table"
			}
			out, errOut, err := run(t, busy(t), "", append([]string{"--from-cluster", "-o", format}, args...)...)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, file, out+errOut)
			if format == "json" {
				var r simulate.Report
				if err := json.Unmarshal([]byte(out), &r); err != nil || r.Cluster.Devices != 12 {
					t.Errorf("report of %d devices, %v", r.Cluster.Devices, err)
				}
			}
		})
	}
}

func TestMistakes(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	notList := write("node.json", `{"apiVersion":"v1","kind":"Node"}`)
	cut := write("cut.json", "{\n\"kind\": \"List\",\n\"items\": [")
	empty := write("empty.json", `{"apiVersion":"v1","kind":"List","items":[{"kind":"Secret"}]}`)
	broken := write("broken.json", `{"kind":"List","items":[{"kind":"Node"},{"kind":"Pod","spec":7}]}`)
	tests := map[string]struct {
		args []string
		want string
	}{
		"nothing to simulate": {nil, "exactly one of --from-cluster, --from-dump FILE, --replay FILE and --dump FILE is required"},
		"two sources": {[]string{"--from-cluster", "--from-dump", "f"},
			"exactly one of --from-cluster, --from-dump FILE, --replay FILE and --dump FILE is required"},
		"a dump of a dump": {[]string{"--dump", "f", "--from-dump", "f"}, "exactly one of"},
		"unknown policy": {[]string{"--from-cluster", "--policy", "tetris"},
			`--policy: unknown policy "tetris"; use one of binpack, spread, fragmentation, fragmentation-online`},
		"policy twice":          {[]string{"--from-cluster", "--policy", "spread,Spread"}, "--policy: spread is listed twice"},
		"no policy":             {[]string{"--from-cluster", "--policy", ""}, "--policy: at least one policy is needed"},
		"no shuffles":           {[]string{"--from-cluster", "--shuffles", "0"}, "--shuffles 0: must be from 1 to 10000"},
		"arrived is not sorted": {[]string{"--from-cluster", "--arrived", "130,100"}, "--arrived 100 after 130: must be ascending"},
		"arrived is zero":       {[]string{"--from-cluster", "--arrived", "0"}, "--arrived 0: must be from 1 to 1000 percent"},
		"no load":               {[]string{"--from-cluster", "--churn", "--load", "0"}, "--load 0: must be above 0 and at most 1000"},
		"load is not a number":  {[]string{"--from-cluster", "--churn", "--load", "NaN"}, "--load NaN: must be above 0 and at most 1000"},
		"warm-up before time": {[]string{"--from-cluster", "--churn", "--warm-up", "-1"},
			"--warm-up -1: must be from 0 and at most 1000"},
		"too much refused": {[]string{"--from-cluster", "--find-nodes", "--refused", "101"},
			"--refused 101: must be from 0 and at most 100"},
		"two questions":        {[]string{"--from-cluster", "--find-nodes", "--churn"}, "--churn and --find-nodes cannot be combined"},
		"unknown output":       {[]string{"--from-cluster", "-o", "svg"}, `--output "svg": must be table or json`},
		"no cluster":           {[]string{"--from-cluster"}, "there is no cluster"},
		"no cluster to dump":   {[]string{"--dump", "-"}, "there is no cluster"},
		"no dump":              {[]string{"--from-dump", dir + "/none"}, "open " + dir + "/none: no such file or directory"},
		"a dump of one object": {[]string{"--from-dump", notList}, notList + `: kind is "Node"; it must be a List of nodes and pods`},
		"a dump that was cut":  {[]string{"--from-dump", cut}, cut + ":3: unexpected end of JSON input"},
		"a dump without nodes": {[]string{"--from-dump", empty}, empty + ": no nodes among its 1 items"},
		"a dump that is broken": {[]string{"--from-dump", broken},
			broken + ": items[1]: json: cannot unmarshal number into Go struct field Pod.spec"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			out, _, err := run(t, nil, "", tt.args...)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v\nwant %s", err, tt.want)
			}
			if out != "" {
				t.Errorf("printed %q", out)
			}
		})
	}
}

func TestPodsThatFitNowhere(t *testing.T) {
	large := livePod("fat", "", 4, v1.PodPending, nil)
	large.Spec.Containers[0].Resources.Requests[v1.ResourceCPU] = apiresource.MustParse("65")
	objects := append(busy(t), livePod("wide", "", 33, v1.PodPending, map[string]string{wire.CountAnnotation: "3"}), large,
		livePod("other", "", 1, v1.PodPending, map[string]string{wire.UseModelsAnnotation: "X9"}))
	wide := `pod team/wide: pod "team/wide" requests 3 devices with 11 units each, 1000 millicores, 1024 MiB of memory, more than any ` +
		`empty node has`
	fat := `pod team/fat: pod "team/fat" requests 4 units of one device, 65000 millicores, 1024 MiB of memory, more than any empty node has`
	other := `pod team/other: pod "team/other" requests 1 units of one device, a device of model X9, 1000 millicores, 1024 MiB of memory,` +
		` more than any empty node has`
	out, said, err := run(t, objects, "", "--from-cluster", "--policy", "binpack", "--shuffles", "1")
	if err != nil || !strings.Contains(out, "3 pods of 23 do not fit on any empty node") {
		t.Errorf("with pods that fit nowhere: %v\n%s", err, out)
	}
	for _, want := range []string{wide, fat, other} {
		if !strings.Contains(said, want) {
			t.Errorf("no %q in\n%s", want, said)
		}
	}
	for _, flag := range []string{"--strict", "--find-nodes"} {
		if _, _, err := run(t, objects, "", "--from-cluster", flag); err == nil || !strings.Contains(err.Error(), fat) {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

const gcuMemory accel.Resource = "enflame.com/gcu-memory"

// liveNode is a node with two cards of 16 units, 8 cores and 32 GiB.
func liveNode(t *testing.T, name string, more ...accel.Inventory) *v1.Node {
	t.Helper()
	inv := accel.Inventory{Resource: gcuMemory, Unit: "1"}
	for i := range 2 {
		inv.Shares = append(inv.Shares, accel.Share{
			Device: accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprintf("%s-%d", name, i)), Model: "S60", NUMANode: accel.NoNUMA,
				MemoryBytes: 16 << 30}, Units: 16,
		})
	}
	text, err := wire.EncodeInventory(append([]accel.Inventory{inv}, more...))
	if err != nil {
		t.Fatal(err)
	}
	return &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{wire.InventoryAnnotation: text, "other": "secret"}},
		Status: v1.NodeStatus{Allocatable: v1.ResourceList{v1.ResourceCPU: apiresource.MustParse("8"),
			v1.ResourceMemory: apiresource.MustParse("32Gi")}},
	}
}

// livePod asks for so many units, 1 core and 1 GiB; for none when 0.
func livePod(name, node string, units int, phase v1.PodPhase, annotations map[string]string) *v1.Pod {
	requests := v1.ResourceList{v1.ResourceCPU: apiresource.MustParse("1"), v1.ResourceMemory: apiresource.MustParse("1Gi")}
	if units > 0 {
		requests[v1.ResourceName(gcuMemory)] = *apiresource.NewQuantity(int64(units), apiresource.DecimalSI)
	}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name, Annotations: annotations},
		Spec: v1.PodSpec{NodeName: node, Containers: []v1.Container{{
			Name: "main", Env: []v1.EnvVar{{Name: "PASSWORD", Value: "secret"}}, Resources: v1.ResourceRequirements{Requests: requests},
		}}},
		Status: v1.PodStatus{Phase: phase},
	}
}

func TestLiveCluster(t *testing.T) {
	objects := []runtime.Object{
		liveNode(t, "a"), liveNode(t, "b"), &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "plain"}},
		&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "odd", Annotations: map[string]string{wire.InventoryAnnotation: "{"}}},
		livePod("small", "a", 4, v1.PodRunning, nil), livePod("large", "", 16, v1.PodPending,
			map[string]string{wire.UseModelsAnnotation: "S6*", "other": "secret"}),
		livePod("pair", "b", 20, v1.PodRunning, map[string]string{wire.CountAnnotation: "2"}),
		livePod("ended", "a", 16, v1.PodSucceeded, nil), livePod("daemon", "a", 0, v1.PodRunning, nil),
		livePod("wrong", "", 3, v1.PodPending, map[string]string{wire.CountAnnotation: "2"}),
	}
	claiming := livePod("claiming", "", 0, v1.PodPending, nil)
	claiming.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gcu"}}
	objects = append(objects, claiming)
	args := []string{"--policy", "binpack", "--shuffles", "2", "-o", "json"}
	fromCluster, said, err := run(t, objects, "", append(args, "--from-cluster")...)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Node odd is ignored: ", "ResourceClaims are not simulated, and 1 of the pods have some",
		"Pod team/wrong is ignored: annotation divvy.dev/devices: container main requests 3"} {
		if !strings.Contains(said, want) {
			t.Errorf("said %q, want %q in it", said, want)
		}
	}
	var r simulate.Report
	if err := json.Unmarshal([]byte(fromCluster), &r); err != nil {
		t.Fatal(err)
	}
	if w := r.Workloads[0]; r.Cluster != (simulate.ClusterSummary{Nodes: 2, Devices: 4, Units: 64}) || w.Name != string(gcuMemory) ||
		w.Pods != 3 || w.DemandPercent != 62.5 {
		t.Errorf("simulated %+v, %+v", r.Cluster, w)
	}

	dump := filepath.Join(t.TempDir(), "dump.json")
	if out, _, err := run(t, objects, "", "--dump", dump); err != nil || out != "" {
		t.Fatalf("dump: %v, printed %q", err, out)
	}
	text, err := os.ReadFile(dump)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), "secret") || strings.Contains(string(text), "ended") {
		t.Errorf("the dump has more than is needed:\n%s", text)
	}
	fromFile, _, err := run(t, nil, "", append(args, "--from-dump", dump)...)
	if err != nil {
		t.Fatal(err)
	}
	toInput, _, err := run(t, objects, "", "--dump", "-")
	if err != nil {
		t.Fatal(err)
	}
	fromInput, _, err := run(t, nil, toInput, append(args, "--from-dump", "-")...)
	if err != nil {
		t.Fatal(err)
	}
	if fromFile != fromCluster || fromInput != fromCluster {
		t.Error("a dump gives another result than the cluster that it is of")
	}
	// What a daemon takes of a node, simulated pods do not have.
	l, err := live.Read(context.Background(),
		func() (kube.Clients, error) { return kube.Clients{Kubernetes: fake.NewClientset(objects...)}, nil })
	if err != nil {
		t.Fatal(err)
	}
	c, w, err := l.Simulation("", io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := c.Nodes[0], c.Nodes[1]; a.CPU != 7000 || a.Memory != 31<<10 || b.CPU != 8000 || b.Memory != 32<<10 {
		t.Errorf("nodes have %d and %d millicores, %d and %d MiB", a.CPU, b.CPU, a.Memory, b.Memory)
	}
	asks := map[string]string{}
	for _, p := range w.Pods {
		asks[p.Name] = fmt.Sprint(p.Ask.Units, " on ", p.Ask.Devices, " of ", p.Ask.Only, ", ", p.Ask.CPU, " and ", p.Ask.Memory)
	}
	if d := cmp.Diff(map[string]string{
		"team/small": "4 on 1 of <nil>, 1000 and 1024", "team/large": "16 on 1 of &{[S6*] [] [] [] none}, 1000 and 1024",
		"team/pair": "10 on 2 of <nil>, 1000 and 1024",
	}, asks); d != "" {
		t.Errorf("asks (-want +got):\n%s", d)
	}
}

func TestLiveMistakes(t *testing.T) {
	whole := accel.Inventory{Resource: "enflame.com/gcu"}
	for i := range 4 {
		whole.Shares = append(whole.Shares, accel.Share{
			Device: accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprint("whole-", i)), Model: "S60", NUMANode: accel.NoNUMA}, Units: 1,
		})
	}
	two := []runtime.Object{liveNode(t, "a", whole), livePod("p", "", 4, v1.PodPending, nil)}
	tests := map[string]struct {
		objects []runtime.Object
		args    []string
		want    string
	}{
		"nothing is shared": {[]runtime.Object{&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "plain"}}}, nil,
			"no node publishes devices that Divvy shares; check that divvy-node is running"},
		"several resources": {two, nil, "the nodes share several resources; select one with --resource: enflame.com/gcu, " +
			"enflame.com/gcu-memory"},
		"another resource": {two, []string{"--resource", "nvidia.com/gpu"},
			"--resource nvidia.com/gpu: no node publishes it; published resources: enflame.com/gcu, enflame.com/gcu-memory"},
		"nobody asks for it": {two, []string{"--resource", "enflame.com/gcu"},
			"no pod requests enflame.com/gcu: there is no workload to replay"},
		"a pod is too large": {[]runtime.Object{liveNode(t, "a"), livePod("p", "", 17, v1.PodPending, nil)}, nil,
			`pod team/p: pod "team/p" requests 17 units of one device, 1000 millicores, 1024 MiB of memory, more than any empty node has`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if _, _, err := run(t, tt.objects, "", append([]string{"--from-cluster", "--strict"}, tt.args...)...); err == nil ||
				!strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v\nwant %s", err, tt.want)
			}
		})
	}
	// Whole devices: as many as units.
	pod := livePod("p", "", 0, v1.PodPending, nil)
	pod.Spec.Containers[0].Resources.Requests["enflame.com/gcu"] = apiresource.MustParse("2")
	out, _, err := run(t, append(two, pod)[0:1:1], "", "--from-cluster", "--resource", "enflame.com/gcu")
	if err == nil || out != "" {
		t.Errorf("without the pod: %v", err)
	}
	out, _, err = run(t, []runtime.Object{two[0], pod}, "", "--from-cluster", "--resource", "enflame.com/gcu", "--find-nodes", "--policy",
		"binpack", "--shuffles", "1", "-o", "json")
	var r simulate.Report
	if err != nil || json.Unmarshal([]byte(out), &r) != nil || r.Workloads[0].DemandPercent != 50 ||
		r.Workloads[0].Policies[0].MostNodes != 1 {
		t.Errorf("whole devices: %v\n%s", err, out)
	}
}

// A dump has withheld units, and no pod of a simulation gets any.
func TestWithheldUnits(t *testing.T) {
	node := liveNode(t, "a")
	inventory, err := wire.DecodeInventory(node.Annotations[wire.InventoryAnnotation])
	if err != nil {
		t.Fatal(err)
	}
	inventory[0].Shares[0].Withheld, inventory[0].Shares[1].Withheld = 10, 4
	if node.Annotations[wire.InventoryAnnotation], err = wire.EncodeInventory(inventory); err != nil {
		t.Fatal(err)
	}
	objects := []runtime.Object{node}
	for i, units := range []int{6, 6, 6, 7, 13} {
		objects = append(objects, livePod(fmt.Sprintf("pod-%02d", i), "", units, v1.PodPending, nil))
	}
	dump, _, err := run(t, objects, "", "--dump", "-")
	if err != nil {
		t.Fatal(err)
	}
	out, _, err := run(t, nil, dump, "--from-dump", "-", "-o", "json", "--policy", "binpack", "--shuffles", "1", "--seed", "1")
	if err != nil {
		t.Fatal(err)
	}
	var r simulate.Report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatal(err)
	}
	if r.Cluster.Units != 18 || len(r.Workloads) != 1 || r.Workloads[0].Misfits != 1 {
		t.Errorf("a cluster of %d units, workloads %+v; want 18 units, and one pod of 13 that fits nowhere", r.Cluster.Units, r.Workloads)
	}
}
