package wire

import (
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

func TestSetup(t *testing.T) {
	many := make([]SetupFinding, 40)
	for i := range many {
		many[i] = SetupFinding{"cdi-stale", strings.Repeat("é", 4000)}
	}
	escaped := slices.Repeat([]SetupFinding{{"cdi-stale", strings.Repeat("<", 4000)}}, 40)
	if _, err := EncodeSetup(&NodeSetup{Findings: escaped}); err != nil {
		t.Error(err)
	}
	for name, s := range map[string]*NodeSetup{
		"none":     nil,
		"detected": {Injection: []string{"cdi"}, Detected: "cdi", Why: "containerd adds CDI devices"},
		"pinned": {Injection: []string{"environment", "deviceNodes"}, Pinned: true, Detected: "cdi", Why: "so",
			Findings: []SetupFinding{{"cdi-conflict", "a and b"}}},
	} {
		t.Run(name, func(t *testing.T) {
			text, err := EncodeSetup(s)
			if err != nil {
				t.Fatal(err)
			}
			got, err := DecodeSetup(text)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(s, got); diff != "" {
				t.Errorf("decoded (-want +got):\n%s", diff)
			}
		})
	}
	text, err := EncodeSetup(&NodeSetup{Injection: []string{"cdi"}, Detected: "cdi", Findings: many})
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeSetup(text)
	if err != nil || len(got.Findings) != maxFindings || len(got.Findings[0].What) > maxFinding || !utf8.ValidString(got.Findings[0].What) {
		t.Errorf("too much: %v, %d findings", err, len(got.Findings))
	}
	for _, bad := range []string{"{", `{"v":2,"injection":["cdi"],"detected":"cdi","why":""}`,
		`{"v":1,"injection":["cdi"],"detected":"cdi","why":"","findings":[{"kind":"","what":"x"}]}`} {
		if _, err := DecodeSetup(bad); err == nil {
			t.Errorf("%s was read", bad)
		}
	}
}
