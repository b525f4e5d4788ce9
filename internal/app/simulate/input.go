package simulate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/simulate"
)

// How the files of the public trace are called.
const (
	traceNodes    = "openb_node_list_gpu_node.csv"
	tracePods     = "openb_pod_list_"
	traceEnd      = ".csv"
	traceWorkload = "default"
)

// experiment reads what is to be simulated.
func (o *Options) experiment(ctx context.Context, connect func() (kube.Clients, error), in io.Reader, errOut io.Writer) (*simulate.Experiment, error) {
	kinds, err := o.kinds()
	if err != nil {
		return nil, err
	}
	e := &simulate.Experiment{
		Policies: kinds, FirstSeed: o.Seed, Seeds: o.Shuffles, Arrived: o.Arrived, Strict: o.Strict, Sample: o.Sample,
	}
	if o.Against != "" {
		k, err := simulate.ParsePolicy(o.Against)
		if err != nil {
			return nil, err
		}
		e.Against = k.Name
	}
	if o.Published != "" {
		if e.Published, err = readFile(o.Published, simulate.ReadPublished); err != nil {
			return nil, err
		}
	}
	if o.FromCluster || o.FromDump != "" {
		l, err := o.live(ctx, connect, in)
		if err != nil {
			return nil, err
		}
		var w *simulate.Workload
		if e.Cluster, w, err = l.simulation(o.Resource, errOut); err != nil {
			return nil, err
		}
		e.Workloads = []*simulate.Workload{w}
		return e, nil
	}
	return e, o.readTrace(e)
}

// readFile opens a file and reads it.
func readFile[T any](path string, read func(r io.Reader, name string) (T, error)) (T, error) {
	f, err := os.Open(path)
	if err != nil {
		var none T
		return none, err
	}
	defer func() { _ = f.Close() }() // it was only read
	return read(f, path)
}

// readTrace reads the files of a trace.
func (o *Options) readTrace(e *simulate.Experiment) error {
	nodes := o.Nodes
	if nodes == "" {
		var err error
		if nodes, err = nodesOf(o.Trace); err != nil {
			return err
		}
	}
	var err error
	if e.Cluster, err = readFile(nodes, simulate.ReadNodes); err != nil {
		return err
	}
	files := o.Pods
	if len(files) == 0 {
		if files, err = o.podLists(); err != nil {
			return err
		}
	}
	for _, file := range files {
		name := strings.TrimPrefix(strings.TrimSuffix(filepath.Base(file), traceEnd), tracePods)
		w, err := readFile(file, func(r io.Reader, path string) (*simulate.Workload, error) { return simulate.ReadPods(r, path, name) })
		if err != nil {
			return err
		}
		if slices.ContainsFunc(e.Workloads, func(have *simulate.Workload) bool { return have.Name == name }) {
			return fmt.Errorf("two lists of pods are called %s", name)
		}
		e.Workloads = append(e.Workloads, w)
	}
	return nil
}

// nodesOf returns the list of nodes of a trace.
func nodesOf(dir string) (string, error) {
	path := filepath.Join(dir, traceNodes)
	_, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(dir); err != nil {
			return "", fmt.Errorf("--trace: %w", err)
		}
		return "", fmt.Errorf("--trace %s: there is no %s; name the list of nodes with --nodes", dir, traceNodes)
	}
	return path, err
}

// podLists returns the files of the chosen workloads.
func (o *Options) podLists() ([]string, error) {
	// Not filepath.Glob, to which a directory's name is a pattern.
	entries, err := os.ReadDir(o.Trace)
	if err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	var there []string
	for _, entry := range entries {
		if name, ok := strings.CutPrefix(entry.Name(), tracePods); ok && strings.HasSuffix(name, traceEnd) {
			there = append(there, strings.TrimSuffix(name, traceEnd))
		}
	}
	if len(there) == 0 {
		return nil, fmt.Errorf("--trace %s: there is no list of pods, called %sNAME%s; name one with --pods", o.Trace, tracePods, traceEnd)
	}
	chosen := o.Workloads
	switch {
	case slices.Contains(chosen, allWorkloads):
		chosen = there
	case len(chosen) == 0 && len(there) == 1:
		chosen = there
	case len(chosen) == 0:
		chosen = []string{traceWorkload}
	}
	files := make([]string, len(chosen))
	for i, name := range chosen {
		if !slices.Contains(there, name) {
			return nil, fmt.Errorf("--workload %s: %s has no %s%s%s; there are: %s", name, o.Trace, tracePods, name, traceEnd, strings.Join(there, ", "))
		}
		files[i] = filepath.Join(o.Trace, tracePods+name+traceEnd)
	}
	return files, nil
}
