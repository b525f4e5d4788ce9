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

func TestDecodeDevices(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want held
	}{
		"nothing":        {"", held{}},
		"no ids":         {`{"nvidia.com/gpu":null}`, held{}},
		"a whole device": {`{"nvidia.com/gpu":["GPU-1"]}`, held{"nvidia.com/gpu": {"GPU-1"}}},
		"sorted, each once": {
			`{"nvidia.com/gpu.shared":["GPU-2::1","GPU-1::0","GPU-2::1"],"iluvatar.com/gpu":["GPU-9"]}`,
			held{"nvidia.com/gpu.shared": {"GPU-1::0", "GPU-2::1"}, "iluvatar.com/gpu": {"GPU-9"}},
		},
	} {
		if got, err := DecodeDevices(tt.text); err != nil || !reflect.DeepEqual(got, tt.want) {
			t.Errorf("%s: read %v, %v; want %v", name, got, err, tt.want)
		}
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
		text, err := json.Marshal(got)
		if err != nil {
			t.Fatalf("decoded, but not encoded again: %v", err)
		}
		if len(text) > maxDevicesBytes { // escaping makes it longer
			return
		}
		if again, err := DecodeDevices(string(text)); err != nil || !reflect.DeepEqual(got, again) {
			t.Fatalf("%v became %v, %v", got, again, err)
		}
	})
}
