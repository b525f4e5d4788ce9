package supervisor

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// with is a discovery of a GPU and a MIG device of each of the profiles.
func with(profiles ...string) backend.Found {
	found := backend.Found{Devices: []accel.Device{{ID: "GPU-0", Partitioned: true}}}
	for i, p := range profiles {
		found.Devices = append(found.Devices, accel.Device{
			Index: accel.PartitionIndex(0, i), ID: accel.DeviceID("MIG-" + p), Parent: "GPU-0", Profile: p,
		})
	}
	return found
}

func TestProfilesComeAtOnceAndGoLater(t *testing.T) {
	start := time.Date(2026, 7, 1, 10, 0, 0, 0, time.UTC)
	faulty := with()
	faulty.Faults = []backend.Fault{{Index: 0, ID: "GPU-0", Err: errors.New("lost")}}
	silent := with()
	silent.Silent = true
	odd := with()
	odd.Faults = []backend.Fault{{Index: accel.PartitionIndex(0, 0), Err: errors.New("a part"), Cause: accel.CauseNotOffered}}
	type step struct {
		after time.Duration
		found backend.Found
		err   error
		want  string
	}
	for name, steps := range map[string][]step{
		"one after the other": {{0, with("1g.5gb+me"), nil, "1g.5gb.me old"}, {0, with("2g.10gb"), nil, "1g.5gb.me 2g.10gb old"}},
		"one goes": {
			{0, with("a"), nil, "a old"},
			{59 * time.Second, with("a"), nil, "a old"},
			{time.Second, with("a"), nil, "a"},
		},
		"one comes back in time": {
			{0, with(), nil, "old"},
			{59 * time.Second, with("old"), nil, "old"},
			{time.Minute, with(), nil, "old"},
		},
		"a GPU fails meanwhile": {
			{0, with(), nil, "old"},
			{50 * time.Second, faulty, nil, "old"},
			{time.Minute, with(), nil, "old"},
		},
		"the library fails": {
			{0, backend.Found{}, errors.New("no driver"), "old"},
			{time.Hour, backend.Found{}, errors.New("no"), "old"},
		},
		"the library is silent":      {{0, silent, nil, "old"}, {time.Hour, silent, nil, "old"}},
		"one that is not offered":    {{0, odd, nil, "old"}, {time.Minute, odd, nil, ""}},
		"all at once, and none left": {{0, with(), nil, "old"}, {time.Minute, with(), nil, ""}, {0, with("a"), nil, "a"}},
	} {
		t.Run(name, func(t *testing.T) {
			p, now := newProfiles(), start
			p.recall([]accel.Resource{"nvidia.com/mig-old", "nvidia.com/gpu", "enflame.com/mig-x"})
			for i, s := range steps {
				now = now.Add(s.after)
				p.discovered("nvidia", s.found, s.err, now)
				p.discovered("enflame", backend.Found{}, nil, now)
				if got := strings.Join(p.wanted(now)["nvidia"], " "); got != s.want {
					t.Errorf("step %d: profiles %q, want %q", i, got, s.want)
				}
			}
		})
	}
}

const mixed = "vendors: {nvidia: {migStrategy: mixed}}\nresources:\n- {name: nvidia.com/gpu, vendor: nvidia, mode: exclusive}\n"

func resourcesOf(a *fakeAgent) []string {
	var out []string
	for _, r := range a.config.Resources {
		out = append(out, r.Name)
	}
	return out
}

// TestNewProfilesTakeThePlaceOfTheAgent: a profile that appears is offered without a
// restart, on the way that another configuration takes.
func TestNewProfilesTakeThePlaceOfTheAgent(t *testing.T) {
	d := prepare(t, mixed)
	if err := os.MkdirAll(filepath.Join(d.dir, "state"), 0o750); err != nil {
		t.Fatal(err)
	}
	// What an earlier run offered is offered from the start.
	if err := os.WriteFile(filepath.Join(d.dir, "state/slots-nvidia.com_mig-3g.20gb.json"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	d.start()
	first := d.agent(0)
	if diff := cmp.Diff([]string{"nvidia.com/gpu", "nvidia.com/mig-3g.20gb"}, resourcesOf(first)); diff != "" {
		t.Errorf("at the start (-want +got):\n%s", diff)
	}
	d.s.profiles.discovered("nvidia", with("1g.5gb", "3g.20gb"), nil, time.Now())
	second := d.agent(1)
	want := []string{"nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb"}
	if diff := cmp.Diff(want, resourcesOf(second)); diff != "" {
		t.Errorf("with another profile (-want +got):\n%s", diff)
	}
	hasAll(t, first.did(), "yielded", "left")
	hasAll(t, d.event("PartitionsChanged"), "1g.5gb, 3g.20gb")
	if string(second.from.Memory["of"]) != `"what was before"` {
		t.Error("the second agent does not know what the first one did")
	}

	// An edit keeps the profiles.
	d.write("injection: environment\n" + mixed)
	if third := d.agent(2); !slices.Equal(resourcesOf(third), want) {
		t.Errorf("after an edit, resources are %q", resourcesOf(third))
	}
	d.write("injection: environment\n" + strings.ReplaceAll(mixed, "mixed", "single"))
	if fourth := d.agent(3); !slices.Equal(resourcesOf(fourth), []string{"nvidia.com/gpu"}) {
		t.Errorf("by another strategy, resources are %q", resourcesOf(fourth))
	}
	d.s.profiles.discovered("nvidia", with("2g.10gb"), nil, time.Now())
	time.Sleep(2 * keepInterval)
	if d.count() != 4 {
		t.Error("a profile that is not a resource replaced the agent")
	}
}

// TestProfilesOfTwoVendors: those of one vendor are not gone because the other has none.
func TestProfilesOfTwoVendors(t *testing.T) {
	p, now := newProfiles(), time.Date(2026, 7, 1, 10, 0, 0, 0, time.UTC)
	p.recall([]accel.Resource{"nvidia.com/mig-1g.5gb", "enflame.com/drs-gcu-1g.6gb", "enflame.com/drs-gcu"})
	for range 2 {
		p.discovered("nvidia", with(), nil, now)
		p.discovered("enflame", with("1g.6gb", "3g.24gb"), nil, now)
		now = now.Add(retireAfter)
	}
	want := map[string][]string{"nvidia": nil, "enflame": {"1g.6gb", "3g.24gb"}}
	if diff := cmp.Diff(want, p.wanted(now)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := names(p.wanted(now)); got != "1g.6gb, 3g.24gb" {
		t.Errorf("for people: %q", got)
	}
}

// TestProfilesThatCannotBeOffered: the agent goes on with those before.
func TestProfilesThatCannotBeOffered(t *testing.T) {
	d := prepare(t, mixed)
	d.start()
	d.agent(0)
	d.s.profiles.discovered("nvidia", with(strings.Repeat("9", 80)), nil, time.Now())
	hasAll(t, d.event("ConfigurationRejected"), "the resources of the node's partitions cannot be offered")
	if d.count() != 1 || d.agents[0].stopped.Load() {
		t.Error("the agent was touched")
	}
}
