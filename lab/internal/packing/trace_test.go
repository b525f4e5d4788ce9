package packing

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

// The smallest files in the format of the trace that hold a bit of everything.
const (
	nodesCSV = `sn,cpu_milli,memory_mib,gpu,model
big,64000,262144,4,A
small,16000,65536,1,B
`
	podsCSV = `name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos
part,4000,8192,1,250,,LS
whole,8000,16384,1,1000,A|B,LS
pair,16000,32768,2,1000,A,BE
plain,2000,4096,0,0,,BE
`
)

func readNodes(t *testing.T, text string) *simulate.Cluster {
	t.Helper()
	c, err := ReadNodes(strings.NewReader(text), "nodes.csv")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func readPods(t *testing.T, text string) *simulate.Workload {
	t.Helper()
	w, err := ReadPods(strings.NewReader(text), "pods.csv", "mine")
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestReadTrace(t *testing.T) {
	c, w := readNodes(t, nodesCSV), readPods(t, podsCSV)
	if len(c.Nodes) != 2 || c.Units() != 5000 {
		t.Errorf("%d nodes with %d units, want 2 with 5000", len(c.Nodes), c.Units())
	}
	if n := c.Nodes[0]; n.Name != "big" || n.CPU != 64000 || n.Memory != 262144 || len(n.Devices) != 4 ||
		n.Devices[3].Model != "A" || n.Devices[3].Index != 3 || n.Devices[3].Units != TraceUnits {
		t.Errorf("node read as %+v", n)
	}
	want := []simulate.Pod{
		{Name: "part", Source: "pods.csv:2", Ask: place.Ask{Units: 250, Devices: 1, CPU: 4000, Memory: 8192}},
		{Name: "whole", Source: "pods.csv:3", Ask: place.Ask{Units: 1000, Devices: 1, CPU: 8000, Memory: 16384,
			Only: &accel.Selection{UseModels: []string{"A", "B"}}}},
		{Name: "pair", Source: "pods.csv:4", Ask: place.Ask{Units: 1000, Devices: 2, CPU: 16000, Memory: 32768,
			Only: &accel.Selection{UseModels: []string{"A"}}}},
		{Name: "plain", Source: "pods.csv:5", Ask: place.Ask{CPU: 2000, Memory: 4096}},
	}
	if d := cmp.Diff(want, w.Pods); d != "" {
		t.Errorf("pods (-want +got):\n%s", d)
	}
	if w.Demand() != 3250 {
		t.Errorf("demand %d, want 3250", w.Demand())
	}
	// A spreadsheet's way of writing the same: columns in another order, a byte
	// order mark, quotes, spaces, carriage returns and numbers with a fraction.
	other := "\ufeffgpu_milli,num_gpu,memory_mib,cpu_milli,name\r\n250.0,1,8192, 4000,\"part\"\r\n"
	if got := readPods(t, other).Pods[0]; got.Ask != want[0].Ask {
		t.Errorf("read as %+v, want %+v", got.Ask, want[0].Ask)
	}
}

func TestReadTraceRefuses(t *testing.T) {
	const nodes, pods = "sn,cpu_milli,memory_mib,gpu,model\n", "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n"
	const spec = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"
	tests := map[string]struct {
		text  string
		nodes bool
		want  string
	}{
		"no file": {text: "", nodes: true,
			want: "f.csv: read the header, which must name the columns sn, cpu_milli, memory_mib, gpu, model: EOF"},
		"a column of nodes is missing": {text: "sn,cpu,memory_mib,gpu,model\na,1,1,1,A\n", nodes: true,
			want: "f.csv:1: missing column cpu_milli; the first line must name sn, cpu_milli, memory_mib, gpu, model"},
		"a column of pods is missing": {text: "name,cpu_milli,memory_mib,gpu_milli\np,1,1,1\n",
			want: "f.csv:1: missing column num_gpu; the first line must name name, cpu_milli, memory_mib, num_gpu, gpu_milli"},
		"no nodes": {text: nodes, nodes: true, want: "f.csv: 0 nodes without a GPU: there is nothing to share"},
		"no pods":  {text: pods, want: "f.csv: 0 pods without a GPU: there is nothing to place on GPUs"},
		"nodes without GPUs": {text: nodes + "a,1000,1024,0,\n", nodes: true,
			want: "f.csv: 1 nodes without a GPU: there is nothing to share"},
		"pods without GPUs": {text: pods + "p,1000,1024,0,0\n", want: "f.csv: 1 pods without a GPU: there is nothing to place on GPUs"},
		"a node twice": {text: nodes + "a,1000,1024,1,A\na,1000,1024,1,A\n", nodes: true,
			want: `f.csv:3: column sn: "a" is empty or the name of an earlier line`},
		"a pod twice": {text: pods + "p,1,1,1,1\n\nq,1,1,1,1\np,1,1,1,1\n",
			want: `f.csv:5: column name: "p" is empty or the name of an earlier line`},
		"a node without a name": {text: nodes + ",1000,1024,1,A\n", nodes: true,
			want: `f.csv:2: column sn: "" is empty or the name of an earlier line`},
		"a pod without a name": {text: pods + ",1,1,1,1\n", want: `f.csv:2: column name: "" is empty or the name of an earlier line`},
		"a word for a number": {text: nodes + "a,many,1024,1,A\n", nodes: true,
			want: `f.csv:2: column cpu_milli: "many" is not a whole number from 1 to 4294967296`},
		"a fraction": {text: pods + "p,1.5,1,1,1\n", want: `f.csv:2: column cpu_milli: "1.5" is not a whole number from 0 to 4294967296`},
		"nothing for a number": {text: pods + "p,1,,1,1\n",
			want: `f.csv:2: column memory_mib: "" is not a whole number from 0 to 4294967296`},
		"below zero": {text: pods + "p,-1,1,1,1\n", want: `f.csv:2: column cpu_milli: "-1" is not a whole number from 0 to 4294967296`},
		"beyond any number": {text: pods + "p,99999999999999999999,1,1,1\n",
			want: `f.csv:2: column cpu_milli: "99999999999999999999" is not a whole number from 0 to 4294967296`},
		"a node without CPU": {text: nodes + "a,0,1024,1,A\n", nodes: true,
			want: `f.csv:2: column cpu_milli: "0" is not a whole number from 1 to 4294967296`},
		"too many GPUs": {text: nodes + "a,1,1024,65,A\n", nodes: true,
			want: `f.csv:2: column gpu: "65" is not a whole number from 0 to 64`},
		"more than a GPU of one": {text: pods + "p,1,1,1,1001\n",
			want: `f.csv:2: column gpu_milli: "1001" is not a whole number from 0 to 1000`},
		"nothing of a GPU": {text: pods + "p,1,1,1,0\n", want: "f.csv:2: column gpu_milli: 0 is requested of each of 1 GPUs"},
		"a part of no GPU": {text: pods + "p,1,1,0,500\n", want: "f.csv:2: column gpu_milli: 500 is requested of each of 0 GPUs"},
		"parts of several GPUs": {text: pods + "p,1,1,2,500\n",
			want: "f.csv:2: column gpu_milli: 500: with num_gpu 2 it must be 1000, parts are of one GPU only"},
		"nothing at all": {text: pods + "p,0,0,0,0\n",
			want: `f.csv:2: column num_gpu: pod "p" requests nothing: cpu_milli and memory_mib are 0, too`},
		"a line that is too short": {text: pods + "p,1,1\n", want: "f.csv: record on line 2: wrong number of fields"},
		"a quote that never ends": {text: pods + "\"p,1,1,1,1\n",
			want: `f.csv: parse error on line 2, column 12: extraneous or missing " in quoted-field`},
		"models that are none": {text: spec + "p,1,1,1,1,\"| |\"\n",
			want: `f.csv:2: column gpu_spec: "| |" names no model; leave it empty for any`},
		"several mistakes": {text: pods + "p,x,1,1,1\nq,1,1,1,y\n",
			want: `f.csv:2: column cpu_milli: "x" is not a whole number from 0 to 4294967296`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var err error
			if tt.nodes {
				_, err = ReadNodes(strings.NewReader(tt.text), "f.csv")
			} else {
				_, err = ReadPods(strings.NewReader(tt.text), "f.csv", "w")
			}
			if err == nil {
				t.Fatal("no error")
			}
			if d := cmp.Diff(tt.want, err.Error()); d != "" {
				t.Errorf("error (-want +got):\n%s", d)
			}
		})
	}
}

func TestReadPublished(t *testing.T) {
	const table = "workload,policy,arrived_percent,allocated_percent_mean,shuffles\ndefault,FGD,100,95.5,10\n"
	got, err := ReadPublished(strings.NewReader(table), "p.csv")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]Published{{Workload: "default", Policy: "FGD", Arrived: 100, Allocated: 95.5}}, got); d != "" {
		t.Errorf("published (-want +got):\n%s", d)
	}
	for text, want := range map[string]string{
		"workload,policy\n": "p.csv:1: missing column arrived_percent; the first line must name workload, policy, arrived_percent, " +
			"allocated_percent_mean",
		"workload,policy,arrived_percent,allocated_percent_mean\na,b,1,NaN\n": `p.csv:2: column allocated_percent_mean: "NaN" is not a ` +
			`number from 0 to 100`,
		"workload,policy,arrived_percent,allocated_percent_mean\na,b,x,1\n": `p.csv:2: column arrived_percent: "x" is not a whole ` +
			`number from 0 to 10000`,
	} {
		if _, err := ReadPublished(strings.NewReader(text), "p.csv"); err == nil || err.Error() != want {
			t.Errorf("%q: error %v, want %s", text, err, want)
		}
	}
}

// A reader that is given anything must answer with a list or an error that
// names the file.
func FuzzReadPods(f *testing.F) {
	f.Add(podsCSV)
	f.Add("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np,1e3,1,1,1\n")
	f.Add("name,cpu_milli\n\"")
	f.Fuzz(func(t *testing.T, text string) {
		w, err := ReadPods(strings.NewReader(text), "f.csv", "w")
		if err != nil {
			if !strings.Contains(err.Error(), "f.csv") {
				t.Errorf("error %q does not name the file", err)
			}
			return
		}
		for _, p := range w.Pods {
			if p.Name == "" || p.Ask.Units < 0 || p.Ask.Units > TraceUnits || p.Ask.Devices < 0 ||
				(p.Ask.Devices == 0) != (p.Ask.Units == 0) {
				t.Errorf("accepted %+v", p)
			}
		}
	})
}
