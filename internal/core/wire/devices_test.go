package wire

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

type held = map[accel.Resource][]string

func TestDevicesRoundTrip(t *testing.T) {
	for name, tt := range map[string]struct {
		held held
		text string
		back held
	}{
		"nothing":        {nil, "", held{}},
		"no ids":         {held{"nvidia.com/gpu": nil}, "", held{}},
		"a whole device": {held{"nvidia.com/gpu": {"GPU-1"}}, `{"nvidia.com/gpu":["GPU-1"]}`, held{"nvidia.com/gpu": {"GPU-1"}}},
		"sorted, each once": {
			held{"nvidia.com/gpu.shared": {"GPU-2::1", "GPU-1::0", "GPU-2::1"}, "iluvatar.com/gpu": {"GPU-9"}},
			`{"iluvatar.com/gpu":["GPU-9"],"nvidia.com/gpu.shared":["GPU-1::0","GPU-2::1"]}`,
			held{"nvidia.com/gpu.shared": {"GPU-1::0", "GPU-2::1"}, "iluvatar.com/gpu": {"GPU-9"}},
		},
	} {
		text, err := EncodeDevices(tt.held)
		if err != nil || text != tt.text {
			t.Errorf("%s: got %s, %v; want %s", name, text, err, tt.text)
		}
		if back, err := DecodeDevices(text); err != nil || !reflect.DeepEqual(back, tt.back) {
			t.Errorf("%s: read %v, %v; want %v", name, back, err, tt.back)
		}
	}
	ids := []string{"b", "a"}
	if _, err := EncodeDevices(held{"r": ids}); err != nil || ids[0] != "b" {
		t.Errorf("the caller's list was changed: %v, %v", ids, err)
	}
}

func TestDevicesRefuseGarbage(t *testing.T) {
	for _, s := range []string{
		"x", "[]", `{"r":"GPU-1"}`, `{"r":[1]}`, `{"r":[""]}`, `{"":["a"]}`, `{"r":["a"]} {}`,
		`{"r":["` + strings.Repeat("a", 300) + `"]}`, `{"r":["` + strings.Repeat(`a","`, 40000) + `"]}`,
	} {
		got, err := DecodeDevices(s)
		if se := (*SyntaxError)(nil); !errors.As(err, &se) {
			t.Errorf("%.40s: got %v, %v", s, got, err)
		}
	}
	for _, h := range []held{{"": {"a"}}, {"r": {""}}, {"r": {"\xff"}}, {"r": manyIDs(20000)}} {
		if got, err := EncodeDevices(h); err == nil {
			t.Errorf("wrote %.60s", got)
		}
	}
}

// Whoever may create pods may write the annotation, and reports print the ids.
func TestForgedDevicesCannotSteerATerminal(t *testing.T) {
	for _, id := range []string{"x::\x1b[2J", "GPU-1\n  0  healthy", "GPU-1\r", "GPU-1::\u202e0", "GPU 1", "GPU-é"} {
		text, err := json.Marshal(held{"nvidia.com/gpu": {id}})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := DecodeDevices(string(text)); err == nil {
			t.Errorf("%q was read as %q", text, got)
		}
	}
}

func manyIDs(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = "GPU-" + strings.Repeat("a", i%200)
		out[i] += string(rune('a'+i%26)) + string(rune('a'+i/26%26)) + string(rune('a'+i/676%26))
	}
	return out
}

// FuzzDecodeDevices: garbage is a *SyntaxError; what is read can be written, and
// reads the same again.
func FuzzDecodeDevices(f *testing.F) {
	f.Add(`{"iluvatar.com/gpu":["GPU-9"],"nvidia.com/gpu.shared":["GPU-1::0","GPU-2::1"]}`)
	f.Add(`{"r":null}`)
	f.Add(`null`)
	f.Fuzz(func(t *testing.T, s string) {
		got, err := DecodeDevices(s)
		if err != nil {
			if se := (*SyntaxError)(nil); !errors.As(err, &se) {
				t.Fatalf("error %T %v, want a *SyntaxError", err, err)
			}
			return
		}
		text, err := EncodeDevices(got)
		if err != nil {
			if !strings.Contains(err.Error(), "at most") { // escaping makes it longer
				t.Fatalf("decoded, but not encoded again: %v", err)
			}
			return
		}
		if again, err := DecodeDevices(text); err != nil || !reflect.DeepEqual(got, again) {
			t.Fatalf("%v became %v, %v", got, again, err)
		}
	})
}
