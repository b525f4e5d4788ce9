package nvidia

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
	"github.com/divvy-gpu/divvy/internal/node/backend/nvidia/cdispec"
)

const (
	// memoryLimitsHook sets limits that are not Divvy's, by cgroup, from variables that
	// the pod itself can set.
	memoryLimitsHook = "apply-cuda-memory-limits"
	// capabilityNodes is what the device nodes of the instances of MIG devices begin with.
	capabilityNodes = "dev/nvidia-caps/nvidia-cap"
	// allHooks stands for every hook.
	allHooks = "all"
)

// specifier is the backend.Specifier of a Backend. It describes what containers need
// by a process of its own that runs NVIDIA's library (see package cdispec), and
// trusts no answer of it.
type specifier struct {
	options backend.Options
	devices func() devicelist.Last
	library func() (*library, error)
	child   child
}

// SpecCause implements backend.Specifier.
func (s *specifier) SpecCause() (string, error) {
	r, last, err := s.request()
	if err != nil || len(r.Devices) == 0 {
		return "", err
	}
	file, err := libfile.Stat(r.Library)
	if err != nil {
		return "", fmt.Errorf("generate the CDI specification: %w", err)
	}
	cause, err := json.Marshal(r)
	if err != nil {
		return "", err
	}
	// The nodes appear one by one while the driver's modules are loaded.
	return fmt.Sprintf("%s; driver %s; %s; nodes %s", cause, last.Driver, file, strings.Join(s.nodes(), " ")), nil
}

// Specify implements backend.Specifier.
func (s *specifier) Specify(ctx context.Context) (backend.Specification, error) {
	out, err := s.specify(ctx)
	if err != nil {
		return backend.Specification{}, fmt.Errorf("generate the CDI specification: %w", err)
	}
	return out, nil
}

func (s *specifier) specify(ctx context.Context) (backend.Specification, error) {
	// The generator holds the driver too, so it ends when a pause begins.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	_, paused := s.options.Pause.Now()
	go func() {
		select {
		case <-ctx.Done():
		case <-paused:
			cancel(errors.New("the generator was stopped because the driver must not be used now"))
		}
	}()
	r, _, err := s.request()
	if err != nil {
		return backend.Specification{}, err
	}
	if len(r.Devices) == 0 {
		return backend.Specification{}, errors.New("there is no GPU")
	}
	in, err := json.Marshal(r)
	if err != nil {
		return backend.Specification{}, err
	}
	answer, err := s.child.run(ctx, s.options.CDI.Generator, s.options.CDI.Timeout, in)
	if cause := context.Cause(ctx); cause != nil {
		return backend.Specification{}, cause
	}
	if err != nil {
		return backend.Specification{}, err
	}
	var result cdispec.Result
	if err := json.Unmarshal(answer, &result); err != nil {
		return backend.Specification{}, fmt.Errorf("read the generator's answer: %w", err)
	}
	return examineSpec(r, s.options.HostRoot, result)
}

// request is what is asked of the generator. Its error is why it need not be asked.
func (s *specifier) request() (cdispec.Request, devicelist.Last, error) {
	last := s.devices()
	if len(last.Devices) == 0 {
		return cdispec.Request{}, last, nil
	}
	if why, _ := s.options.Pause.Now(); why.Unhealthy {
		return cdispec.Request{}, last, errors.New(why.Reason)
	}
	lib, err := s.library()
	if err != nil {
		return cdispec.Request{}, last, err
	}
	if lib == nil { // the driver is being replaced
		return cdispec.Request{}, last, errors.New("the driver's library is not loaded")
	}
	o := s.options
	hook, err := findHook(o)
	if err != nil {
		return cdispec.Request{}, last, err
	}
	_, devRoot := o.DeviceRoot()
	r := cdispec.Request{
		Kind:           cmp.Or(o.CDIKind, kind.CDI),
		Library:        lib.Path,
		DriverRoot:     o.DriverRoot,
		HostDriverRoot: onHost(o, o.DriverRoot),
		DevRoot:        filepath.Join(o.HostRoot, devRoot),
		HostDevRoot:    devRoot,
		HookPath:       hook,
		DisabledHooks:  append([]string{memoryLimitsHook}, o.CDI.DisabledHooks...),
		FeatureFlags:   o.CDI.FeatureFlags,
	}
	for _, d := range last.Devices {
		r.Devices = append(r.Devices, string(d.ID))
	}
	slices.Sort(r.Devices)
	return r, last, nil
}

// onHost returns the path on the host of one that this process sees.
func onHost(o backend.Options, path string) string {
	if below, err := filepath.Rel(o.HostRoot, path); err == nil && filepath.IsLocal(below) {
		return filepath.Join("/", below)
	}
	return path
}

// nodes returns the device nodes of NVIDIA that exist.
func (s *specifier) nodes() (names []string) {
	_, devRoot := s.options.DeviceRoot()
	for _, pattern := range []string{kind.File + "*", capabilityNodes + "*"} {
		found, err := filepath.Glob(filepath.Join(s.options.HostRoot, devRoot, pattern))
		if err != nil {
			continue // only a wrong pattern is an error
		}
		for _, path := range found {
			names = append(names, filepath.Base(path))
		}
	}
	return names
}

// findHook returns the path on the host of the program that hooks run, "" where the
// configuration wants none.
func findHook(o backend.Options) (string, error) {
	if slices.Contains(o.CDI.DisabledHooks, allHooks) {
		return "", nil
	}
	places := backend.CDIHookPlaces
	if o.CDI.HookPath != "" {
		places = []string{o.CDI.HookPath}
	}
	for _, place := range places {
		path, err := securejoin.SecureJoin(o.HostRoot, place)
		if err != nil {
			continue // a loop of links, for example
		}
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return place, nil
		}
	}
	return "", fmt.Errorf("the program that runs NVIDIA's CDI hooks is not on the host: no executable %s; install NVIDIA's container "+
		"toolkit, or set cdiHookPath", strings.Join(places, ", "))
}

// examineSpec returns what an answer of the generator describes, if it is what was
// asked for and a container can be started with it.
func examineSpec(r cdispec.Request, hostRoot string, result cdispec.Result) (backend.Specification, error) {
	spec := result.Spec
	out := backend.Specification{
		Devices: map[accel.DeviceID]cdispecs.ContainerEdits{}, Failed: map[accel.DeviceID]error{},
	}
	switch {
	case spec == nil:
		return out, errors.New("the generator's answer has no specification")
	case spec.Kind != r.Kind:
		return out, fmt.Errorf("the generator's answer is of kind %q, not %q", spec.Kind, r.Kind)
	}
	out.Common = spec.ContainerEdits
	if err := examineEdits(spec.ContainerEdits, hostRoot); err != nil {
		return out, err
	}
	if !slices.ContainsFunc(spec.ContainerEdits.Mounts, isDriverLibrary) {
		return out, fmt.Errorf("%s has no libcuda.so of the driver's version", r.HostDriverRoot)
	}
	for _, d := range spec.Devices {
		id := accel.DeviceID(d.Name)
		if !slices.Contains(r.Devices, d.Name) {
			return out, fmt.Errorf("the generator's answer describes %q, which is no device of this node", d.Name)
		}
		err := parser.ValidateDeviceName(d.Name)
		if err == nil {
			err = examineEdits(d.ContainerEdits, hostRoot)
		}
		if err == nil && !hasNodes(d) {
			err = fmt.Errorf("%s/dev lacks a device node of it", strings.TrimSuffix(r.HostDevRoot, "/"))
		}
		if err != nil {
			out.Failed[id] = fmt.Errorf("describe device %s in CDI: %w", id, err)
			continue
		}
		out.Devices[id] = d.ContainerEdits
	}
	for _, name := range r.Devices {
		id := accel.DeviceID(name)
		if _, ok := out.Devices[id]; !ok && out.Failed[id] == nil {
			out.Failed[id] = fmt.Errorf("describe device %s in CDI: %s", id, cmp.Or(result.Failed[name], "the generator's answer lacks it"))
		}
	}
	return out, nil
}

// examineEdits returns why a runtime could not make the edits: they are not valid, or
// have a path that only this container has.
func examineEdits(edits cdispecs.ContainerEdits, hostRoot string) error {
	if err := (&cdi.ContainerEdits{ContainerEdits: &edits}).Validate(); err != nil {
		return err
	}
	if hostRoot == "/" {
		return nil
	}
	var paths []string
	for _, n := range edits.DeviceNodes {
		paths = append(paths, n.Path, n.HostPath)
	}
	for _, m := range edits.Mounts {
		paths = append(paths, m.HostPath, m.ContainerPath)
	}
	for _, h := range edits.Hooks {
		paths = append(paths, h.Path)
		for _, arg := range h.Args {
			// Links are "<target>::<link>", and flags may be "--flag=<path>".
			paths = append(paths, strings.FieldsFunc(arg, func(c rune) bool { return c == ':' || c == '=' })...)
		}
	}
	for _, p := range paths {
		if p == hostRoot || strings.HasPrefix(p, strings.TrimSuffix(hostRoot, "/")+"/") {
			return fmt.Errorf("the generator's answer has %s, which is no path of the host", p)
		}
	}
	return nil
}

func isDriverLibrary(m *cdispecs.Mount) bool {
	return strings.HasPrefix(filepath.Base(m.ContainerPath), "libcuda.so.")
}

// hasNodes reports whether a device has the nodes without which nothing runs on it: that
// of its GPU, and for a MIG device those of its GPU instance and of its compute instance.
// The library leaves out what does not exist.
func hasNodes(d cdispecs.Device) bool {
	gpus, capabilities := 0, 0
	for _, n := range d.ContainerEdits.DeviceNodes {
		number, ok := strings.CutPrefix(n.Path, "/"+kind.File)
		switch {
		case ok && number != "" && strings.Trim(number, "0123456789") == "":
			gpus++
		case strings.HasPrefix(n.Path, "/"+capabilityNodes):
			capabilities++
		}
	}
	return gpus == 1 && (capabilities == 2 || !strings.HasPrefix(d.Name, "MIG-"))
}
