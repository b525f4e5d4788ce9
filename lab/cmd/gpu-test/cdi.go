package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
)

// toolkitModule is the library that generates Divvy's specification.
const toolkitModule = "github.com/NVIDIA/nvidia-container-toolkit"

// specification compares Divvy's CDI specification with that of NVIDIA's toolkit.
func (t *test) specification(ctx context.Context) error {
	t.title("CDI specification")
	divvys, hooks, err := t.divvysSpec(ctx)
	if err != nil {
		t.checks.NoError("Divvy generates a CDI specification", err)
		return nil
	}
	t.checks.Equal("devices of Divvy's CDI specification", len(divvys.Devices), len(t.found.Devices))
	counts := table{Head: []string{"specification", "devices", "device nodes", "mounts", "hooks", "variables"},
		Rows: [][]string{countsOf("Divvy", divvys)}}
	program := findProgram(toolkitPlaces(t.options))
	if program == "" {
		t.table(counts)
		t.note("There is no nvidia-ctk, so there is no other specification to compare with.")
		return nil
	}
	theirs, release, err := toolkitsSpec(ctx, program)
	if err != nil {
		t.checks.NoError("nvidia-ctk cdi generate", err)
		return nil
	}
	counts.Rows = append(counts.Rows, countsOf("nvidia-ctk", theirs))
	t.table(counts)
	setting := comparison{hooks: hooks, driver: t.found.Driver, release: libraryRelease(), theirRelease: release,
		names: map[string]string{}, inMIGMode: map[string]bool{}}
	for _, d := range t.found.Devices {
		setting.names[string(d.ID)], setting.names[fmt.Sprint(d.Index)] = string(d.ID), string(d.ID)
	}
	for _, gpu := range t.inspected.GPUs {
		setting.inMIGMode[gpu.UUID] = gpu.inMIGMode()
	}
	t.note("nvidia-ctk is of release %s; Divvy has the library of release %s.", release, setting.release)
	t.showDifferences(setting.compare(divvys, theirs))
	return nil
}

// toolkitPlaces are where nvidia-ctk can be: in PATH, and where the GPU operator puts it.
func toolkitPlaces(o options) []string {
	if o.nvidiaCTK != "" {
		return []string{o.nvidiaCTK}
	}
	return []string{"nvidia-ctk", "/usr/local/nvidia/toolkit/nvidia-ctk"}
}

// findProgram returns the first program that exists, "" for none.
func findProgram(places []string) string {
	for _, place := range places {
		if path, err := exec.LookPath(place); err == nil {
			return path
		}
	}
	return ""
}

func (r *record) showDifferences(all []difference) {
	rows := table{Head: []string{"only in", "what", "why"}}
	unexplained := 0
	for _, d := range all {
		rows.Rows = append(rows.Rows, []string{d.In, d.What, cmp.Or(d.Why, "**unexplained**")})
		if d.Why == "" {
			unexplained++
		}
	}
	if len(all) > 0 {
		r.table(rows)
	}
	r.checks.True("every difference from nvidia-ctk's specification is explained", unexplained == 0,
		fmt.Sprintf("%d differences, %d unexplained", len(all), unexplained))
}

func countsOf(name string, s *cdispecs.Spec) []string {
	edits := []cdispecs.ContainerEdits{s.ContainerEdits}
	for _, d := range s.Devices {
		edits = append(edits, d.ContainerEdits)
	}
	var nodes, mounts, hooks, variables int
	for _, e := range edits {
		nodes, mounts, hooks, variables = nodes+len(e.DeviceNodes), mounts+len(e.Mounts), hooks+len(e.Hooks), variables+len(e.Env)
	}
	row := []string{name}
	for _, n := range []int{len(s.Devices), nodes, mounts, hooks, variables} {
		row = append(row, fmt.Sprint(n))
	}
	return row
}

// divvysSpec returns the specification that the daemon would write. Where the program for
// NVIDIA's hooks is missing, it is one without hooks.
func (t *test) divvysSpec(ctx context.Context) (spec *cdispecs.Spec, hooks bool, err error) {
	b := t.backend
	hooks = true
	if specifier, ok := b.(backend.Specifier); !ok {
		return nil, false, errors.New("the backend describes no devices in CDI")
	} else if _, cause := specifier.SpecCause(); cause != nil {
		t.note("Divvy's specification has no hooks: %v.", cause)
		o := t.backendOptions()
		o.CDI.DisabledHooks = []string{"all"}
		if b, err = vendors.New(vendor, o); err != nil {
			return nil, false, err
		}
		defer func() { err = errors.Join(err, b.Close()) }()
		if _, err := b.Discover(ctx); err != nil {
			return nil, false, err
		}
		hooks = false
	}
	parts, err := b.(backend.Specifier).Specify(ctx)
	if err != nil {
		return nil, hooks, err
	}
	spec = &cdispecs.Spec{ContainerEdits: parts.Common}
	for _, id := range slices.Sorted(maps.Keys(parts.Devices)) {
		spec.Devices = append(spec.Devices, cdispecs.Device{Name: string(id), ContainerEdits: parts.Devices[id]})
	}
	for _, id := range slices.Sorted(maps.Keys(parts.Failed)) {
		t.checks.NoError("a device is described", parts.Failed[id])
	}
	spec.Kind, err = cdiKind(b, ids(t.found))
	return spec, hooks, err
}

func cdiKind(b backend.Backend, ids []accel.DeviceID) (string, error) {
	edits, err := b.Edits(ids...)
	if err != nil {
		return "", err
	}
	if len(edits.CDIDevices) == 0 {
		return "", errors.New("the devices have no names in CDI")
	}
	return edits.CDIDevices[0].Kind, nil
}

// toolkitsSpec returns the specification that nvidia-ctk generates, and its release.
func toolkitsSpec(ctx context.Context, program string) (*cdispecs.Spec, string, error) {
	limited, cancel := context.WithTimeout(ctx, partLimit)
	defer cancel()
	said := new(bytes.Buffer)
	cmd := exec.CommandContext(limited, program, "--version")
	cmd.Stdout, cmd.WaitDelay = said, time.Second
	if err := cmd.Run(); err != nil {
		return nil, "", fmt.Errorf("%s --version: %w", program, errors.Join(err, limited.Err()))
	}
	spec := new(cdispecs.Spec)
	if err := ask(ctx, spec, program, "cdi", "generate", "--format=json"); err != nil {
		return nil, "", err
	}
	return spec, cmp.Or(releases.FindString(said.String()), unknownRelease), nil
}

var releases = regexp.MustCompile(`\d+\.\d+\.\d+\S*`)

const unknownRelease = "unknown"

// libraryRelease is that of the toolkit's library in this program.
func libraryRelease() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return unknownRelease
	}
	for _, m := range info.Deps {
		if m.Path == toolkitModule {
			return strings.TrimPrefix(m.Version, "v")
		}
	}
	return unknownRelease
}
