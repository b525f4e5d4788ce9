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

// Bounds of what a trace may say, far beyond any real machine; they keep sums
// from overflowing and a typing error from being simulated.
const (
	maxCPUMilli   = 1 << 30
	maxMemoryMiB  = 1 << 32
	maxNodeGPUs   = 64
	maxLineErrors = 10
)

// LineError says what is wrong where in a file.
type LineError struct {
	File string
	Line int
	// Column is the name of the column, "" for the whole line.
	Column string
	Err    error
}

func (e *LineError) Error() string {
	if e.Column == "" {
		return fmt.Sprintf("%s:%d: %v", e.File, e.Line, e.Err)
	}
	return fmt.Sprintf("%s:%d: column %s: %v", e.File, e.Line, e.Column, e.Err)
}

// Unwrap returns what is wrong.
func (e *LineError) Unwrap() error { return e.Err }

// table reads a CSV file by the names of its columns.
type table struct {
	file    string
	csv     *csv.Reader
	columns map[string]int
	record  []string
	line    int
	errs    []error
}

// openTable reads the header. Columns beyond those required are ignored, unless
// they are asked for with optional.
func openTable(r io.Reader, file string, required []string) (*table, error) {
	t := &table{file: file, csv: csv.NewReader(r), columns: map[string]int{}}
	t.csv.ReuseRecord = true
	t.csv.FieldsPerRecord = -1 // told in own words, with the file's name
	header, err := t.csv.Read()
	switch {
	case errors.Is(err, io.EOF):
		return nil, &LineError{file, 1, "", fmt.Errorf("the file is empty; the first line must name the columns %s",
			strings.Join(required, ", "))}
	case err != nil:
		return nil, t.broken(err)
	}
	for i, name := range header {
		name = strings.TrimSpace(strings.TrimPrefix(name, "\uFEFF")) // spreadsheets write a byte order mark
		if _, twice := t.columns[name]; twice && slices.Contains(required, name) {
			return nil, &LineError{file, 1, name, errors.New("is there twice")}
		}
		t.columns[name] = i
	}
	var missing []string
	for _, name := range required {
		if _, ok := t.columns[name]; !ok {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return nil, &LineError{file, 1, "", fmt.Errorf("missing columns: %s; the first line must name %s",
			strings.Join(missing, ", "), strings.Join(required, ", "))}
	}
	return t, nil
}

// broken words an error of the CSV reader.
func (t *table) broken(err error) error {
	var parse *csv.ParseError
	if errors.As(err, &parse) {
		return &LineError{t.file, parse.Line, "", parse.Err}
	}
	return fmt.Errorf("read %s: %w", t.file, err)
}

// next moves to the next line, false at the end or when too much is wrong.
func (t *table) next() bool {
	if len(t.errs) >= maxLineErrors {
		t.errs = append(t.errs, fmt.Errorf("%s: more may be wrong, reading stopped at line %d", t.file, t.line))
		return false
	}
	record, err := t.csv.Read()
	if errors.Is(err, io.EOF) {
		return false
	}
	if err != nil {
		t.errs = append(t.errs, t.broken(err))
		return false
	}
	t.record = record
	t.line, _ = t.csv.FieldPos(0)
	return true
}

// fail notes that something is wrong in the present line.
func (t *table) fail(column string, format string, args ...any) {
	t.errs = append(t.errs, &LineError{t.file, t.line, column, fmt.Errorf(format, args...)})
}

// text returns a field, "" when the file does not have the column.
func (t *table) text(column string) string {
	i, ok := t.columns[column]
	if !ok {
		return ""
	}
	if i >= len(t.record) {
		t.fail(column, "the line ends before it: it has %d fields, the header %d", len(t.record), len(t.columns))
		return ""
	}
	return strings.TrimSpace(t.record[i])
}

// unique notes what is wrong with the name of a line: first has the lines of
// the names so far.
func (t *table) unique(column, name, none string, first map[string]int) {
	switch at, twice := first[name]; {
	case name == "":
		t.fail(column, "%s", none)
	case twice:
		t.fail(column, "%q was named in line %d already", name, at)
	default:
		first[name] = t.line
	}
}

// number returns a field that is a whole number from lowest to highest. What
// is not is noted, and false returned.
func (t *table) number(column string, lowest, highest int64) (int64, bool) {
	before := len(t.errs)
	s := t.text(column)
	if len(t.errs) > before {
		return 0, false
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		// Programs that computed a column write 1000.0.
		f, ferr := strconv.ParseFloat(s, 64)
		if ferr != nil || f != float64(int64(f)) {
			t.fail(column, "%q is not a whole number", s)
			return 0, false
		}
		n = int64(f)
	}
	if n < lowest || n > highest {
		t.fail(column, "%d is not within %d and %d", n, lowest, highest)
		return 0, false
	}
	return n, true
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
// TraceUnits. The file's name is for errors, which are *LineError, up to a few
// of them joined.
func ReadNodes(r io.Reader, file string) (*simulate.Cluster, error) {
	t, err := openTable(r, file, []string{"sn", "cpu_milli", "memory_mib", "gpu", "model"})
	if err != nil {
		return nil, err
	}
	c := &simulate.Cluster{}
	first := map[string]int{}
	for t.next() {
		name := t.text("sn")
		t.unique("sn", name, "a node needs a name", first)
		cpu, okCPU := t.number("cpu_milli", 1, maxCPUMilli)
		memory, okMemory := t.number("memory_mib", 1, maxMemoryMiB)
		gpus, okGPUs := t.number("gpu", 0, maxNodeGPUs)
		model := t.text("model")
		if !okCPU || !okMemory || !okGPUs {
			continue
		}
		n := simulate.Node{Name: name, CPU: cpu, Memory: memory}
		for i := range int(gpus) {
			n.Devices = append(n.Devices, accel.Share{
				Device: accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprintf("%s/%d", name, i)), Model: model, NUMANode: accel.NoNUMA},
				Units:  TraceUnits,
			})
		}
		c.Nodes = append(c.Nodes, n)
	}
	if len(t.errs) > 0 {
		return nil, errors.Join(t.errs...)
	}
	if len(c.Nodes) == 0 {
		return nil, &LineError{file, 1, "", errors.New("there are no nodes below the header")}
	}
	if c.Units() == 0 {
		return nil, fmt.Errorf("%s: %d nodes, but column gpu is 0 in all of them: there is nothing to share", file, len(c.Nodes))
	}
	return c, nil
}

// ReadPods reads a list of pods in the format of the trace: the columns name,
// cpu_milli, memory_mib, num_gpu (how many GPUs) and gpu_milli (thousandths of
// each), and gpu_spec where it is there: the models that will do, separated by
// "|", empty for any. A pod whose num_gpu is 0 takes CPU and memory alone. The
// file's name is for errors, as in ReadNodes; the workload gets the name given.
func ReadPods(r io.Reader, file, workload string) (*simulate.Workload, error) {
	t, err := openTable(r, file, []string{"name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli"})
	if err != nil {
		return nil, err
	}
	w := &simulate.Workload{Name: workload}
	first := map[string]int{}
	selections := map[string]*accel.Selection{}
	for t.next() {
		name := t.text("name")
		t.unique("name", name, "a pod needs a name", first)
		cpu, okCPU := t.number("cpu_milli", 0, maxCPUMilli)
		memory, okMemory := t.number("memory_mib", 0, maxMemoryMiB)
		gpus, okGPUs := t.number("num_gpu", 0, maxNodeGPUs)
		milli, okMilli := t.number("gpu_milli", 0, TraceUnits)
		if !okCPU || !okMemory || !okGPUs || !okMilli {
			continue
		}
		p := simulate.Pod{Name: name, Source: fmt.Sprintf("%s:%d", file, t.line), Ask: place.Ask{CPU: cpu, Memory: memory}}
		switch {
		case gpus == 0 && milli != 0:
			t.fail("gpu_milli", "%d is asked of each GPU, but num_gpu is 0", milli)
			continue
		case gpus > 0 && milli == 0:
			t.fail("gpu_milli", "0 is asked of each of %d GPUs; it must be 1 to %d", gpus, TraceUnits)
			continue
		case gpus > 1 && milli != TraceUnits:
			t.fail("gpu_milli", "%d: with num_gpu %d it must be %d, parts are of one GPU only", milli, gpus, TraceUnits)
			continue
		case gpus == 0 && cpu == 0 && memory == 0:
			t.fail("", "pod %q asks for nothing: cpu_milli, memory_mib and num_gpu are 0", name)
			continue
		}
		if gpus > 0 {
			p.Ask.Devices, p.Ask.Units = int(gpus), accel.Units(milli)
			spec := t.text("gpu_spec")
			if strings.Trim(spec, "| ") == "" && spec != "" {
				t.fail("gpu_spec", "%q names no model; leave it empty for any", spec)
				continue
			}
			p.Ask.Only = selection(selections, spec)
		}
		w.Pods = append(w.Pods, p)
	}
	if len(t.errs) > 0 {
		return nil, errors.Join(t.errs...)
	}
	if len(w.Pods) == 0 {
		return nil, &LineError{file, 1, "", errors.New("there are no pods below the header")}
	}
	if w.Demand() == 0 {
		return nil, fmt.Errorf("%s: %d pods, but column num_gpu is 0 in all of them: there is nothing to place on GPUs", file, len(w.Pods))
	}
	return w, nil
}

// selection returns the selection that a gpu_spec stands for, the same one for
// the same text.
func selection(known map[string]*accel.Selection, spec string) *accel.Selection {
	if spec == "" {
		return nil
	}
	if s := known[spec]; s != nil {
		return s
	}
	var models []string
	for m := range strings.SplitSeq(spec, "|") {
		if m = strings.TrimSpace(m); m != "" {
			models = append(models, m)
		}
	}
	slices.Sort(models)
	s := &accel.Selection{UseModels: slices.Compact(models)}
	known[spec] = s
	return s
}
