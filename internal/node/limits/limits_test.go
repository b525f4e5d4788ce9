package limits

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/cgroup"
)

const (
	gpu     = accel.DeviceID("GPU-1")
	podUID  = "0a1b2c3d-0000-4000-8000-000000000001"
	mainID  = "3f0c9a1be4d27586a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718"
	sideID  = "77aa9a1be4d27586a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718"
	podPath = "/kubepods/burstable/pod" + podUID
	path    = podPath + "/" + mainID
)

// fakeDriver keeps limits by folder, of any device.
type fakeDriver struct {
	limits map[string]uint64
	// bare are groups without a controller; fail is the error of a call of a kind.
	bare map[string]bool
	fail map[string]error
	// off is added to what is set, and stuck limits are not cleared.
	off   uint64
	stuck bool
	calls []string
}

func newDriver() *fakeDriver {
	return &fakeDriver{limits: map[string]uint64{}, bare: map[string]bool{}, fail: map[string]error{}}
}

func (d *fakeDriver) SetLimit(_ context.Context, id accel.DeviceID, group string, bytes uint64) error {
	d.calls = append(d.calls, fmt.Sprintf("set %s %s %d", id, filepath.Base(group), bytes/MiB))
	if d.bare[group] {
		return fmt.Errorf("driver: %w", backend.ErrNoController)
	}
	if d.fail["set"] != nil {
		return d.fail["set"]
	}
	d.limits[group] = bytes + d.off
	return nil
}

func (d *fakeDriver) ClearLimit(_ context.Context, id accel.DeviceID, group string) error {
	d.calls = append(d.calls, fmt.Sprintf("clear %s %s", id, filepath.Base(group)))
	if d.fail["clear"] != nil {
		return d.fail["clear"]
	}
	if !d.stuck {
		delete(d.limits, group)
	}
	return nil
}

func (d *fakeDriver) Limit(_ context.Context, _ accel.DeviceID, group string) (backend.MemoryLimit, error) {
	if d.fail["get"] != nil {
		return backend.MemoryLimit{}, d.fail["get"]
	}
	for dir := group; dir != "/"; dir = filepath.Dir(dir) {
		if bytes, ok := d.limits[dir]; ok {
			return backend.MemoryLimit{Bytes: bytes}, nil
		}
	}
	return backend.MemoryLimit{}, fmt.Errorf("driver: %w", backend.ErrNoLimit)
}

func put(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func wantError(t *testing.T, what string, err error, want string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%s: %v, want %q", what, err, want)
	}
}

func TestNewGroup(t *testing.T) {
	for name, tt := range map[string]struct {
		path, scope, err string
	}{
		"a container":                {path, path, ""},
		"crun":                       {path + "/container", path, ""},
		"a pod":                      {podPath, "", "no container of a pod"},
		"the host":                   {"/system.slice/a.service", "", "no container of a pod"},
		"the top":                    {"/", "", "no container of a pod"},
		"another namespace":          {"/../pod" + podUID + "/" + mainID, "", "outside of the namespace"},
		"a path that goes elsewhere": {path + "/../../../system.slice", "", "outside of the namespace"},
	} {
		got, err := NewGroup("/cg", tt.path)
		if tt.err != "" {
			wantError(t, name, err, tt.err)
			continue
		}
		if want := (Group{Path: tt.path, Dir: "/cg" + tt.path, Scope: "/cg" + tt.scope}); err != nil || got != want {
			t.Errorf("%s: %+v, %v, want %+v", name, got, err, want)
		}
	}
}

func TestSet(t *testing.T) {
	leaf, err := NewGroup("/cg", path+"/a/b")
	if err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	without := func(groups ...string) func(*fakeDriver) {
		return func(d *fakeDriver) {
			for _, g := range groups {
				d.bare[g] = true
			}
		}
	}
	for name, tt := range map[string]struct {
		change func(*fakeDriver)
		where  string // of the limit
		err    string
	}{
		"in the group":                   {func(*fakeDriver) {}, leaf.Dir, ""},
		"above, without a controller":    {without(leaf.Dir), filepath.Dir(leaf.Dir), ""},
		"in the container's own group":   {without(leaf.Dir, leaf.Scope+"/a"), leaf.Scope, ""},
		"no controller in the container": {without(leaf.Dir, leaf.Scope+"/a", leaf.Scope), "", "no controller"},
		"a failure": {func(d *fakeDriver) { d.fail["set"] = broken }, "",
			"set the memory limit of " + leaf.Path + " on device GPU-1 to 3000 MiB: broken"},
		"a limit that cannot be read back": {func(d *fakeDriver) { d.fail["get"] = backend.ErrNoLimit }, leaf.Dir, "read back"},
		"a limit that is another one than set": {func(d *fakeDriver) { d.off = 1 }, leaf.Dir,
			"is 3145728001 bytes after it was set to 3145728000 bytes"},
	} {
		d := newDriver()
		tt.change(d)
		err := Set(t.Context(), d, gpu, leaf, 3000*MiB)
		if tt.err != "" {
			wantError(t, name, err, tt.err)
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, ok := d.limits[tt.where]; ok != (tt.where != "") || len(d.limits) > 1 {
			t.Errorf("%s: limits are %v, want one of %q", name, d.limits, tt.where)
		}
	}
}

func TestProbe(t *testing.T) {
	broken := errors.New("broken")
	for name, tt := range map[string]struct {
		change func(*fakeDriver)
		err    string
	}{
		"a driver that keeps limits":     {func(*fakeDriver) {}, ""},
		"a limit of a group above":       {func(d *fakeDriver) { d.limits["/own"] = 9 }, ""},
		"a driver that fails":            {func(d *fakeDriver) { d.fail["set"] = broken }, "broken"},
		"a driver that keeps nothing":    {func(d *fakeDriver) { d.fail["get"] = backend.ErrNoLimit }, "read back"},
		"a limit that cannot be cleared": {func(d *fakeDriver) { d.fail["clear"] = broken }, "clear the memory limit"},
		"a limit that stays":             {func(d *fakeDriver) { d.stuck = true }, "still 65 MiB"},
		"no controller":                  {func(d *fakeDriver) { d.bare["/own/group"] = true }, "no controller"},
	} {
		d := newDriver()
		tt.change(d)
		err := Probe(t.Context(), d, gpu, "/own/group")
		if tt.err == "" && err != nil {
			t.Errorf("%s: %v", name, err)
		} else if tt.err != "" {
			wantError(t, name, err, tt.err)
		}
		if _, left := d.limits["/own/group"]; left && !d.stuck && d.fail["clear"] == nil {
			t.Errorf("%s: the limit is left", name)
		}
	}
}

// hooked is a hook on a host with one container.
func hooked(t *testing.T) (Hook, string) {
	t.Helper()
	root := t.TempDir()
	put(t, root, map[string]string{
		"proc/42/cgroup": "0::" + path + "\n", "cg/cgroup.controllers": "dmem", "cg" + path + "/cgroup.procs": "42\n",
	})
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	return Hook{Device: gpu, Bytes: 3000 * MiB, ProcRoot: filepath.Join(root, "proc"), CgroupRoot: filepath.Join(root, "cg"),
		RecordDir: filepath.Join(root, "run/limits"), Now: func() time.Time { return at }}, root
}

const state = `{"ociVersion":"1.2.0","id":"` + mainID + `","status":"creating","pid":42,"bundle":"/b","annotations":{}}`

func (h Hook) run(t *testing.T, d *fakeDriver, state string) error {
	t.Helper()
	return h.Run(t.Context(), strings.NewReader(state), func() (Driver, error) { return d, nil })
}

func TestHookSetsAndRecords(t *testing.T) {
	h, root := hooked(t)
	d := newDriver()
	if err := h.run(t, d, state); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, "cg", path)
	if d.limits[dir] != 3000*MiB || len(d.limits) != 1 {
		t.Errorf("limits are %v", d.limits)
	}
	inode, err := cgroup.Inode(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []Record{{Container: mainID, Group: path, Inode: inode, Device: gpu, Bytes: 3000 * MiB,
		Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}}
	got, err := ReadRecords(h.RecordDir, h.CgroupRoot)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("records: %v\n%s", err, diff)
	}
	h.Bytes = 0
	if err := h.run(t, d, state); err != nil || len(d.limits) > 0 {
		t.Errorf("clear: %v, limits are %v", err, d.limits)
	}
}

func TestHookFails(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(root string, h *Hook, d *fakeDriver)
		state  string
		err    string
	}{
		"version 1": {func(root string, _ *Hook, _ *fakeDriver) {
			put(t, root, map[string]string{"proc/42/cgroup": "9:memory:" + path + "\n1:name=systemd:" + path + "\n"})
		}, state, "control groups v2 are required"},
		"both versions": {func(root string, _ *Hook, _ *fakeDriver) {
			put(t, root, map[string]string{"proc/42/cgroup": "9:memory:/x\n0::/kubepods/pod" + podUID + "/" + sideID + "\n"})
		}, state, "control groups v2 are required"},
		"no pod": {func(root string, _ *Hook, _ *fakeDriver) {
			put(t, root, map[string]string{"proc/42/cgroup": "0::/user.slice\n", "cg/user.slice/cgroup.procs": ""})
		}, state, `"/user.slice" belongs to no container of a pod`},
		"another namespace": {func(root string, _ *Hook, _ *fakeDriver) {
			put(t, root, map[string]string{"proc/42/cgroup": "0::/../.." + path + "\n"})
		}, state, "outside of the namespace"},
		"no process": {func(root string, _ *Hook, _ *fakeDriver) { _ = os.RemoveAll(filepath.Join(root, "proc/42")) }, state,
			"control group of process 42"},
		"no state":  {func(string, *Hook, *fakeDriver) {}, "", "the state of the container is not valid"},
		"a failure": {func(_ string, _ *Hook, d *fakeDriver) { d.fail["set"] = errors.New("broken") }, state, "broken"},
		"no record": {func(root string, h *Hook, _ *fakeDriver) {
			put(t, root, map[string]string{"run/limits": ""})
		}, state, "record the memory limit"},
	} {
		t.Run(name, func(t *testing.T) {
			h, root := hooked(t)
			d := newDriver()
			tt.change(root, &h, d)
			wantError(t, name, h.run(t, d, tt.state), tt.err)
			if records, _ := ReadRecords(h.RecordDir, h.CgroupRoot); len(records) > 0 {
				t.Errorf("recorded: %+v", records)
			}
		})
	}
	h, _ := hooked(t)
	missing := errors.New("no library")
	err := h.Run(t.Context(), strings.NewReader(state), func() (Driver, error) { return nil, missing })
	if !errors.Is(err, missing) {
		t.Errorf("without a driver: %v", err)
	}
}

func TestParseState(t *testing.T) {
	for name, tt := range map[string]struct{ text, err string }{
		"a runtime's":      {state, ""},
		"no JSON":          {"{", "not valid"},
		"no id":            {`{"pid":1}`, "no valid id"},
		"a path as id":     {`{"id":"../x","pid":1}`, "no valid id"},
		"a very long id":   {`{"id":"` + strings.Repeat("a", 1000) + `","pid":1}`, "no valid id"},
		"no process":       {`{"id":"a","status":"stopped"}`, "no process"},
		"a PID as a text":  {`{"id":"a","pid":"1"}`, "not valid"},
		"a number too big": {`{"id":"a","pid":99999999999999999999}`, "not valid"},
	} {
		_, err := ParseState([]byte(tt.text))
		if tt.err == "" && err != nil {
			t.Errorf("%s: %v", name, err)
		} else if tt.err != "" {
			wantError(t, name, err, tt.err)
		}
	}
	_, err := ReadState(strings.NewReader(strings.Repeat(" ", maxState+1)))
	wantError(t, "a long text", err, "exceeds")
}

func TestReadRecords(t *testing.T) {
	h, root := hooked(t)
	if got, err := ReadRecords(h.RecordDir, h.CgroupRoot); err != nil || len(got) > 0 {
		t.Errorf("without the folder: %v, %v", got, err)
	}
	if err := h.run(t, newDriver(), state); err != nil {
		t.Fatal(err)
	}
	valid, err := ReadRecords(h.RecordDir, h.CgroupRoot)
	if err != nil || len(valid) != 1 {
		t.Fatal(valid, err)
	}
	lost := valid[0]
	lost.Lost = lost.Time.Add(time.Hour)
	other := lost
	other.Container = sideID // its group has another inode
	gone := lost
	gone.Container, gone.Group = "gone", podPath+"/gone"
	for _, r := range []Record{lost, other, gone} {
		if r == other {
			r.Inode++
		}
		if err := r.Write(h.RecordDir); err != nil {
			t.Fatal(err)
		}
	}
	moved, err := json.Marshal(lost)
	if err != nil {
		t.Fatal(err)
	}
	put(t, root, map[string]string{"run/limits/x.json": "{", "run/limits/a.GPU-1.json": string(moved), "run/limits/b.json" + ".tmp": "{"})
	got, err := ReadRecords(h.RecordDir, h.CgroupRoot)
	if diff := cmp.Diff([]Record{lost}, got); diff != "" {
		t.Error(diff)
	}
	wantError(t, "a file that is none", err, "x.json")
	wantError(t, "one under another name", err, "a.GPU-1.json is the record of container")
	for _, r := range []Record{other, gone} {
		if _, err := os.Stat(filepath.Join(h.RecordDir, r.name())); !os.IsNotExist(err) {
			t.Errorf("the record of %s stays: %v", r.Container, err)
		}
	}
	for _, r := range []Record{{Container: "../x", Device: gpu}, {Container: "x", Device: "../../x"}} {
		wantError(t, "a name that leads elsewhere", r.Write(h.RecordDir), "not valid")
	}
}

func FuzzParseState(f *testing.F) {
	f.Add([]byte(state))
	f.Add([]byte(`{"id":"a","pid":-1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := ParseState(text)
		if err != nil {
			return
		}
		name := Record{Container: s.ID, Device: gpu}.name()
		if s.PID <= 0 || filepath.Base(name) != name || strings.HasPrefix(name, ".") || len(name) > 255 {
			t.Errorf("%+v, record %q", s, name)
		}
	})
}

func FuzzGroup(f *testing.F) {
	f.Add("0::" + path + "\n")
	f.Add("1:name=systemd:/a\n0::" + path + "/../x\n")
	f.Add("0::" + path + "//container\n")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := cgroup.Unified(text)
		if err != nil {
			return
		}
		g, err := NewGroup("/cg", p)
		if err != nil {
			return
		}
		if !strings.HasPrefix(g.Scope, "/cg/") || g.Dir != g.Scope && !strings.HasPrefix(g.Dir, g.Scope+"/") ||
			strings.Contains(g.Dir+"/", "/../") || !strings.Contains(g.Scope, "pod") {
			t.Errorf("%q: %+v", text, g)
		}
	})
}
