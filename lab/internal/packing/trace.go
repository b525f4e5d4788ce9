package packing

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
	"github.com/divvy-gpu/divvy/internal/report/simulate"
)

// TraceUnits is how many units a GPU of the trace has: it counts in
// thousandths.
const TraceUnits = 1000

// Bounds of what a trace may say, far beyond any real machine, so that no sum overflows.
const (
	maxAmount   = 1 << 32 // of millicores or MiB
	maxNodeGPUs = 64
)

// table reads a CSV file by the names of its columns, up to the first mistake.
type table struct {
	file    string
	csv     *csv.Reader
	columns map[string]int
	record  []string
	err     error // the first mistake
}

// openTable reads the header. Columns beyond those required are ignored.
func openTable(r io.Reader, file string, required ...string) (*table, error) {
	t := &table{file: file, csv: csv.NewReader(r), columns: map[string]int{}}
	header, err := t.csv.Read()
	if err != nil {
		return nil, fmt.Errorf("%s: read the header, which must name the columns %s: %w", file, strings.Join(required, ", "), err)
	}
	for i, name := range header {
		t.columns[strings.TrimSpace(strings.TrimPrefix(name, "\uFEFF"))] = i // spreadsheets write a byte order mark
	}
	for _, name := range required {
		if _, ok := t.columns[name]; !ok {
			return nil, fmt.Errorf("%s:1: missing column %s; the first line must name %s", file, name, strings.Join(required, ", "))
		}
	}
	return t, nil
}

// next moves to the next line, false at the end or after a mistake.
func (t *table) next() bool {
	if t.err != nil {
		return false
	}
	record, err := t.csv.Read()
	if err != nil && !errors.Is(err, io.EOF) {
		t.err = fmt.Errorf("%s: %w", t.file, err)
	}
	t.record = record
	return err == nil
}

// place is the present line, as FILE:LINE.
func (t *table) place() string {
	line, _ := t.csv.FieldPos(0)
	return fmt.Sprintf("%s:%d", t.file, line)
}

func (t *table) fail(column string, format string, args ...any) {
	if t.err == nil {
		t.err = fmt.Errorf("%s: column %s: %w", t.place(), column, fmt.Errorf(format, args...))
	}
}

// text returns a field, "" when the file does not have the column.
func (t *table) text(column string) string {
	i, ok := t.columns[column]
	if !ok {
		return ""
	}
	return strings.TrimSpace(t.record[i])
}

// name returns a field that no line before has, and notes it in known.
func (t *table) name(column string, known map[string]bool) string {
	name := t.text(column)
	if name == "" || known[name] {
		t.fail(column, "%q is empty or the name of an earlier line", name)
	}
	known[name] = true
	return name
}

// number returns a field that is a whole number from lowest to highest.
func (t *table) number(column string, lowest, highest int64) int64 {
	s := t.text(column)
	f, err := strconv.ParseFloat(s, 64) // programs that computed a column write 1000.0
	if n := int64(f); err == nil && f == float64(n) && n >= lowest && n <= highest {
		return n
	}
	t.fail(column, "%q is not a whole number from %d to %d", s, lowest, highest)
	return 0
}

// How the files of the public trace are called.
const (
	nodeList = "openb_node_list_gpu_node.csv"
	podList  = "openb_pod_list_"
	listEnd  = ".csv"
)

// ReadTrace reads a directory with the trace: its list of nodes, and the lists of pods
// of those names, or of "all".
func ReadTrace(dir string, workloads []string) (*simulate.Cluster, []*simulate.Workload, error) {
	c, err := ReadFile(filepath.Join(dir, nodeList), ReadNodes)
	if err != nil {
		return nil, nil, err
	}
	if slices.Equal(workloads, []string{"all"}) {
		// Not filepath.Glob, to which a directory's name is a pattern.
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, nil, err
		}
		workloads = nil
		for _, entry := range entries {
			if name, ok := strings.CutPrefix(entry.Name(), podList); ok {
				workloads = append(workloads, strings.TrimSuffix(name, listEnd))
			}
		}
	}
	var out []*simulate.Workload
	for _, name := range workloads {
		w, err := ReadFile(filepath.Join(dir, podList+name+listEnd), func(r io.Reader, file string) (*simulate.Workload, error) {
			return ReadPods(r, file, name)
		})
		if err != nil {
			return nil, nil, err
		}
		out = append(out, w)
	}
	return c, out, nil
}

// ReadFile opens a file and reads it.
func ReadFile[T any](path string, read func(r io.Reader, name string) (T, error)) (T, error) {
	f, err := os.Open(path)
	if err != nil {
		var none T
		return none, err
	}
	defer func() { _ = f.Close() }() // it was only read
	return read(f, path)
}

// ReadNodes reads a list of nodes in the format of the trace: the columns sn,
// cpu_milli, memory_mib, gpu (how many) and model. Each GPU becomes a device of
// TraceUnits. The file's name is for errors.
func ReadNodes(r io.Reader, file string) (*simulate.Cluster, error) {
	t, err := openTable(r, file, "sn", "cpu_milli", "memory_mib", "gpu", "model")
	if err != nil {
		return nil, err
	}
	c := &simulate.Cluster{}
	known := map[string]bool{}
	for t.next() {
		n := simulate.Node{Name: t.name("sn", known)}
		n.CPU, n.Memory = t.number("cpu_milli", 1, maxAmount), t.number("memory_mib", 1, maxAmount)
		for i := range int(t.number("gpu", 0, maxNodeGPUs)) {
			n.Devices = append(n.Devices, accel.Share{
				Device: accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprintf("%s/%d", n.Name, i)), Model: t.text("model"),
					NUMANode: accel.NoNUMA},
				Units: TraceUnits,
			})
		}
		c.Nodes = append(c.Nodes, n)
	}
	if t.err == nil && c.Units() == 0 {
		t.err = fmt.Errorf("%s: %d nodes without a GPU: there is nothing to share", file, len(c.Nodes))
	}
	return c, t.err
}

// ReadPods reads a list of pods in the format of the trace: the columns name,
// cpu_milli, memory_mib, num_gpu (how many GPUs) and gpu_milli (thousandths of
// each), and gpu_spec where it is there: the models that will do, separated by
// "|", empty for any. A pod whose num_gpu is 0 takes CPU and memory alone. The
// file's name is for errors; the workload gets the name given.
func ReadPods(r io.Reader, file, workload string) (*simulate.Workload, error) {
	t, err := openTable(r, file, "name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
	if err != nil {
		return nil, err
	}
	w := &simulate.Workload{Name: workload}
	known := map[string]bool{}
	selections := map[string]*accel.Selection{}
	for t.next() {
		p := simulate.Pod{Name: t.name("name", known), Source: t.place(), Ask: place.Ask{
			CPU: t.number("cpu_milli", 0, maxAmount), Memory: t.number("memory_mib", 0, maxAmount),
			Devices: int(t.number("num_gpu", 0, maxNodeGPUs)), Units: accel.Units(t.number("gpu_milli", 0, TraceUnits)),
		}}
		a := &p.Ask
		switch {
		case (a.Devices == 0) != (a.Units == 0):
			t.fail("gpu_milli", "%d is requested of each of %d GPUs", a.Units, a.Devices)
		case a.Devices > 1 && a.Units != TraceUnits:
			t.fail("gpu_milli", "%d: with num_gpu %d it must be %d, parts are of one GPU only", a.Units, a.Devices, TraceUnits)
		case a.Devices > 0:
			a.Only = t.selection(selections)
		case a.CPU == 0 && a.Memory == 0:
			t.fail("num_gpu", "pod %q requests nothing: cpu_milli and memory_mib are 0, too", p.Name)
		}
		w.Pods = append(w.Pods, p)
	}
	if t.err == nil && w.Demand() == 0 {
		t.err = fmt.Errorf("%s: %d pods without a GPU: there is nothing to place on GPUs", file, len(w.Pods))
	}
	return w, t.err
}

// selection returns the selection that a gpu_spec stands for, the same one for
// the same text.
func (t *table) selection(known map[string]*accel.Selection) *accel.Selection {
	spec := t.text("gpu_spec")
	if spec == "" || known[spec] != nil {
		return known[spec]
	}
	var models []string
	for m := range strings.SplitSeq(spec, "|") {
		if m = strings.TrimSpace(m); m != "" {
			models = append(models, m)
		}
	}
	if len(models) == 0 {
		t.fail("gpu_spec", "%q names no model; leave it empty for any", spec)
	}
	slices.Sort(models)
	known[spec] = &accel.Selection{UseModels: slices.Compact(models)}
	return known[spec]
}
