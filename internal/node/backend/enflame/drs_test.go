package enflame

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/backendtest"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

// toolFolder is where a release of the vendor's tools may have its programs.
const toolFolder = "/usr/local/efsmi/efsmi-1.14.0/bin"

// efsmiProgram is the stand-in for efsmi, compiled once.
var efsmiProgram = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "efsmi-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // in the temporary folder
	file, err := vendorsim.BuildEfsmi(context.Background(), dir)
	if err != nil {
		return nil, err
	}
	return os.ReadFile(file)
})

// withTool puts the stand-in for efsmi into a folder of the root.
func (r root) withTool(t *testing.T, folder string) {
	t.Helper()
	program, err := efsmiProgram()
	if err != nil {
		t.Fatal(err)
	}
	r.Put(filepath.Join(folder, "efsmi"), program)
}

// efsmi does what an administrator does.
func (r root) efsmi(t *testing.T, args string) {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), filepath.Join(r.Dir, toolFolder, "efsmi"), strings.Fields(args)...).CombinedOutput()
	if err != nil {
		t.Fatalf("efsmi %s: %v: %s", args, err, out)
	}
}

// drsCards are n cards of 48 GB.
func drsCards(n int) vendorsim.Topology { return vendorsim.Topology{Cards: vendorsim.GCUs(n, 49152)} }

// TestConformanceWithDRS: cards that are not in DRS mode are as they are without it.
func TestConformanceWithDRS(t *testing.T) {
	h := harness
	h.Open = func(t *testing.T, first vendorsim.Topology, o backend.Options) (backend.Backend, string) {
		t.Helper()
		r := newRoot(t)
		path := r.install(first)
		r.withTool(t, toolFolder)
		o.DRS = true
		return r.open(o), path
	}
	backendtest.Run(t, h)
}

// described is what a test compares of a device.
func described(found backend.Found) []string {
	var out []string
	for _, d := range found.Devices {
		text := fmt.Sprintf("%s %s %d", accel.IndexText(d.Index), d.ID, d.MemoryBytes>>30)
		if d.Partitioned {
			text += " partitioned"
		}
		if d.Parent != "" {
			text += fmt.Sprintf(" %s of %s", d.Profile, d.Parent)
		}
		out = append(out, text)
	}
	for _, f := range found.Faults {
		out = append(out, fmt.Sprintf("fault %s %s: %v", accel.IndexText(f.Index), f.ID, f.Err))
	}
	return out
}

// TestDRS: what an administrator does with efsmi is what is listed, without a restart.
func TestDRS(t *testing.T) {
	r := newRoot(t)
	path := r.install(drsCards(2))
	r.withTool(t, toolFolder)
	b := r.open(backend.Options{DRS: true})
	const uuid = "DRS-5d5f0000-0000-4000-8000-00000000000"
	expect := func(step string, want ...string) {
		t.Helper()
		if diff := cmp.Diff(want, described(backendtest.Found(t, b))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", step, diff)
		}
	}
	expect("cards alone", "0 GCU-U53000090100 48", "1 GCU-U53000090101 48")
	r.efsmi(t, "-i 1 --drs on")
	expect("an empty card", "0 GCU-U53000090100 48", "1 GCU-U53000090101 48 partitioned")
	r.efsmi(t, "-i 1 --drs --create-instance 0")
	r.efsmi(t, "-i 1 --drs --create-instance 2")
	expect("two instances", "0 GCU-U53000090100 48", "1 GCU-U53000090101 48 partitioned",
		"1:0 "+uuid+"1 8 1g.8gb of GCU-U53000090101", "1:1 "+uuid+"2 24 3g.24gb of GCU-U53000090101")

	edits, err := b.Edits(uuid + "2")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"ENFLAME_VISIBLE_DEVICES": "1", "TOPS_VISIBLE_DEVICES": uuid + "2"}
	if diff := cmp.Diff(want, edits.Env); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}
	if len(edits.DeviceNodes) != 1 || edits.DeviceNodes[0].Path != "/dev/gcu1" {
		t.Errorf("device nodes are %+v, want the card's", edits.DeviceNodes)
	}
	if _, err := b.Edits(uuid+"1", uuid+"2"); !errors.Is(err, errSeveralInstances) {
		t.Errorf("two instances for one container: %v", err)
	}
	if edits, err := b.Edits("GCU-U53000090100"); err != nil || edits.Env["TOPS_VISIBLE_DEVICES"] != "" {
		t.Errorf("a whole card: %v, %v", edits.Env, err)
	}

	if got := b.Labels(backend.Sharing{Replicas: 1})["enflame.com/gcu.count"]; got != "2" {
		t.Errorf("label of the count is %q, want that of the cards", got)
	}
	if _, err := b.Measure(t.Context(), uuid+"2"); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("the use of an instance: %v", err)
	}

	r.efsmi(t, "-i 1 --drs --destroy-instance 0")
	expect("one is gone and the other keeps its number", "0 GCU-U53000090100 48", "1 GCU-U53000090101 48 partitioned",
		"1:1 "+uuid+"2 24 3g.24gb of GCU-U53000090101")
	if _, err := b.Edits(uuid + "1"); err != nil {
		t.Errorf("an instance that is gone and whose number no other has: %v", err)
	}
	r.efsmi(t, "-i 1 --drs --create-instance 1")
	expect("the number is given again", "0 GCU-U53000090100 48", "1 GCU-U53000090101 48 partitioned",
		"1:0 "+uuid+"3 16 2g.16gb of GCU-U53000090101", "1:1 "+uuid+"2 24 3g.24gb of GCU-U53000090101")
	if _, err := b.Edits(uuid + "1"); err == nil {
		t.Error("an instance that is gone is given to a container")
	}

	sick := drsCards(2)
	sick.Cards[1].Unhealthy = true
	backendtest.Write(t, path, sick)
	for _, d := range backendtest.Found(t, b).Devices {
		if d.Health.Unhealthy != (d.Index != 0) {
			t.Errorf("device %s has health %+v; instances have that of their card", d.ID, d.Health)
		}
	}
	backendtest.Write(t, path, drsCards(2))
	r.efsmi(t, "-i 1 --drs --destroy-instance 1")
	r.efsmi(t, "-i 1 --drs --destroy-instance 2")
	r.efsmi(t, "-i 1 --drs off")
	expect("whole again", "0 GCU-U53000090100 48", "1 GCU-U53000090101 48")
}

// TestDRSIsOff: without the option nothing is asked of the program, and there are no instances.
func TestDRSIsOff(t *testing.T) {
	r := newRoot(t)
	r.install(drsCards(1))
	r.Put("/usr/bin/efsmi", []byte("no program"))
	if got := uuids(t, r.open(backend.Options{})); got != "U53000090100" {
		t.Errorf("devices are %q", got)
	}
}

// TestDRSWithoutATool: a card whose mode is not known is not offered.
func TestDRSWithoutATool(t *testing.T) {
	for name, tt := range map[string]struct {
		put  func(root)
		want string
	}{
		"not there": {func(root) {}, "efsmi not found; looked in "},
		"no program": {func(r root) { r.Put("/usr/bin/efsmi", []byte("no program")) },
			"efsmi: fork/exec "},
		"it fails": {func(r root) { r.withTool(t, "/usr/bin") }, "efsmi: exit status 1: efsmi: the driver is not loaded"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoot(t)
			r.install(drsCards(1))
			tt.put(r)
			if got := reason(t, r.open(backend.Options{DRS: true})); !strings.HasPrefix(got, tt.want) {
				t.Errorf("reason is %q, want %s...", got, tt.want)
			}
		})
	}
}

func TestParseCards(t *testing.T) {
	const table = "+----+\n| 0 Enflame S60-X | 1.0 | 00:01:00.0 |\n| 35C 75W / 300W | 0MiB / 49152MiB | Disable |\n|----+---|\n" +
		"| 1 S60 | 1.0 | 0000:3B:00.0 x |\n| 35C 75W / 300W | 0MiB / 49152MiB | DRS |\n+====+\n"
	for name, tt := range map[string]struct {
		text string
		want []drsCard
		err  string
	}{
		"two cards": {table, []drsCard{{0, "00:01:00.0", "Disable"}, {1, "0000:3b:00.0", "DRS"}}, ""},
		"without spaces around a slash": {"| 0 S60 | 1 | 00:01:00.0 |\n| 35C P0 75W/300W | 0MiB/49152MiB | 3% | DRS |\n",
			[]drsCard{{0, "00:01:00.0", "DRS"}}, ""},
		"nothing":            {"", nil, "efsmi: the table has no line with a PCI address"},
		"an error":           {"Segmentation fault\n", nil, "efsmi: the table has no line with a PCI address"},
		"no second line":     {"| 0 S60 | 1 | 00:01:00.0 |\n+--+\n", nil, "efsmi: the second line of card 0 is missing"},
		"a short second one": {"| 0 S60 | 1 | 00:01:00.0 |\n| 35C | DRS |\n", nil, "the second line of card 0 has no sixth word"},
		"no number":          {"| a S60 | 1 | 00:01:00.0 |\n", nil, `"a" is not the number of a card`},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseCards(tt.text)
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("error is %v, want %q", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(drsCard{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseInstances(t *testing.T) {
	const uuid = "5d5f0000-0000-4000-8000-000000000001"
	for name, tt := range map[string]struct {
		text string
		want []drsInstance
		err  string
	}{
		"none": {"GCU 0: S60 (UUID: GCU-U1)\n", nil, ""},
		"in a sentence": {"GCU 0: S60 (UUID: GCU-U1)\n  DRS 1g.6gb Device 0: (UUID: DRS-" + uuid + ")\n",
			[]drsInstance{{uuid, "1g.6gb"}}, ""},
		"in a table":         {"| 0 | 3g.24gb | " + uuid + " |\n", []drsInstance{{uuid, "3g.24gb"}}, ""},
		"a uuid of any form": {"profile=1g.6gb, uuid=X12\n", []drsInstance{{"X12", "1g.6gb"}}, ""},
		"by position": {"| Index | Profile | Instance ID | UUID |\n| 0 1g.6gb 3 T0012a |\n| 0 | 2g.12gb | 4 | T0012b |\n",
			[]drsInstance{{"T0012a", "1g.6gb"}, {"T0012b", "2g.12gb"}}, ""},
		"no uuid":           {"| 0 | 3g.24gb |\n", nil, `"| 0 | 3g.24gb |" is not the line of one instance`},
		"two profiles":      {"1g.6gb 2g.12gb uuid: X\n", nil, "is not the line of one instance"},
		"no profile at all": {"1g.6gbx 0g.6gb uuid: X\n", nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseInstances(tt.text)
			if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
				t.Errorf("error is %v, want %q", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(drsInstance{})); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func FuzzParseEfsmi(f *testing.F) {
	f.Add("| 0 S60 | 1 | 00:01:00.0 |\n| 35C 75W / 300W | 0MiB / 49152MiB | DRS |\n")
	f.Add("DRS 1g.6gb (UUID: DRS-x)\n")
	f.Fuzz(func(_ *testing.T, text string) {
		_, _ = parseCards(text)
		instances, _ := parseInstances(text)
		for _, one := range instances {
			_ = one.memoryBytes()
		}
	})
}

// TestWithInstances: the cases that the stand-in cannot show.
func TestWithInstances(t *testing.T) {
	card := func(index int, id accel.DeviceID) *devicelist.Device {
		return &devicelist.Device{Device: accel.Device{Index: index, ID: id, MemoryBytes: 48 << 30}, Minor: index}
	}
	at := func(c accel.DeviceID, card, n int) drsPlace { return drsPlace{c, accel.PartitionIndex(card, n)} }
	cards := func() listing { return listing{Devices: []*devicelist.Device{card(0, "a"), card(1, "b")}} }
	gone := cards()
	gone.Devices, gone.Faults = gone.Devices[:1], []backend.Fault{{Index: 1, ID: "b", Err: errors.New("lost")}}
	for name, tt := range map[string]struct {
		l         listing
		instances map[accel.DeviceID][]drsInstance
		errs      map[accel.DeviceID]error
		before    map[accel.DeviceID]drsPlace
		want      []string
	}{
		"a list that cannot be read": {cards(), nil, map[accel.DeviceID]error{"b": errors.New("odd")},
			map[accel.DeviceID]drsPlace{"DRS-x": at("b", 1, 2)},
			[]string{"0 a 48", "fault 1 b: card 1: odd", "fault 1:2 DRS-x: card 1: odd"}},
		"a card that is lost": {gone, nil, nil, map[accel.DeviceID]drsPlace{"DRS-x": at("b", 1, 0)},
			[]string{"0 a 48", "fault 1 b: lost", "fault 1:0 DRS-x: lost"}},
		"one uuid on two cards": {cards(), map[accel.DeviceID][]drsInstance{"a": {{"x", "1g.6gb"}}, "b": {{"x", "1g.6gb"}}}, nil, nil,
			[]string{"0 a 48 partitioned", "1 b 48 partitioned",
				"fault 0:0 DRS-x: DRS instance 0:0: several DRS instances have its uuid x",
				"fault 1:0 DRS-x: DRS instance 1:0: several DRS instances have its uuid x"}},
		"a uuid that cannot be one": {cards(), map[accel.DeviceID][]drsInstance{"a": {{"x/y", "1g.6gb"}, {"z", "2g.12gb"}}}, nil, nil,
			[]string{"0 a 48 partitioned", "1 b 48", "0:1 DRS-z 12 2g.12gb of a",
				`fault 0:0 : DRS instance 0:0: its uuid "x/y" has characters other than letters, digits and -_.: in it`}},
		"another card's number counts for nothing": {cards(), map[accel.DeviceID][]drsInstance{"a": {{"x", "1g.6gb"}}}, nil,
			map[accel.DeviceID]drsPlace{"DRS-x": at("b", 1, 5)},
			[]string{"0 a 48 partitioned", "1 b 48", "0:0 DRS-x 6 1g.6gb of a"}},
	} {
		t.Run(name, func(t *testing.T) {
			l, _ := withInstances(tt.l, tt.instances, tt.errs, tt.before)
			found := backend.Found{Faults: l.Faults}
			for _, d := range l.Devices {
				found.Devices = append(found.Devices, d.Device)
			}
			if diff := cmp.Diff(tt.want, described(found)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestUnknownMode: a card whose mode efsmi names otherwise is not offered.
func TestUnknownMode(t *testing.T) {
	if _, err := cardAt([]drsCard{{0, "01:00.0", "DRS"}, {1, "01:00.0", "DRS"}}, "0000:01:00.0"); err == nil {
		t.Error("one of two cards at the same address was taken")
	}
	if got, err := cardAt([]drsCard{{0, "01:00.0", "DRS"}, {3, "02:00.0", "SRIOV"}}, "0000:02:00.0"); err != nil || got.index != 3 {
		t.Errorf("%+v, %v", got, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := (&drs{tool: newTool(backend.Options{DriverRoot: t.TempDir()})}).add(ctx, listing{
		Devices: []*devicelist.Device{{}}}); err == nil {
		t.Error("no error of a discovery that was given up")
	}
}
