package backend_test

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

func TestLabelValue(t *testing.T) {
	for text, want := range map[string]string{
		"BI-V150":                "BI-V150",
		" NVIDIA A100 80GB ":     "NVIDIA-A100-80GB",
		"(rev. 2)":               "rev.-2",
		"Größe":                  "Gr--e",
		"---":                    "",
		"":                       "",
		strings.Repeat("a", 70):  strings.Repeat("a", 63),
		strings.Repeat("a-", 40): strings.Repeat("a-", 31) + "a",
	} {
		if got := backend.LabelValue(text); got != want {
			t.Errorf("LabelValue(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestMostFrequent(t *testing.T) {
	devices := func(models ...string) []accel.Device {
		var out []accel.Device
		for i, m := range models {
			out = append(out, accel.Device{Index: i, Model: m})
		}
		return out
	}
	for _, tt := range []struct {
		models []string
		want   int
	}{
		{[]string{"a"}, 0},
		{[]string{"a", "b", "b"}, 1},
		{[]string{"b", "a", "a", "b"}, 0}, // equally many
	} {
		if got := backend.MostFrequent(devices(tt.models...)).Index; got != tt.want {
			t.Errorf("MostFrequent(%v) is device %d, want %d", tt.models, got, tt.want)
		}
	}
}

func TestLabelValueOfNames(t *testing.T) {
	for text, want := range map[string]string{
		"NVIDIA A100-SXM4-80GB":  "NVIDIA-A100-SXM4-80GB",
		" Iluvatar (BI-V150) ":   "Iluvatar--BI-V150",
		"":                       "",
		"---":                    "",
		"燧原":                     "",
		"S60\x00":                "S60",
		"12.4":                   "12.4",
		strings.Repeat("a", 99):  strings.Repeat("a", 63),
		strings.Repeat("a ", 99): strings.Repeat("a-", 31) + "a",
	} {
		if got := backend.LabelValue(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

func FuzzLabelValue(f *testing.F) {
	f.Add("NVIDIA A100 (80 GB)")
	f.Add(strings.Repeat("é", 40))
	f.Fuzz(func(t *testing.T, text string) {
		if got := backend.LabelValue(text); len(validation.IsValidLabelValue(got)) > 0 || backend.LabelValue(got) != got {
			t.Fatalf("%q became %q: %v", text, got, validation.IsValidLabelValue(got))
		}
	})
}
