package version

import (
	"encoding/json"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

// built pretends a build with linker flags.
func built(t *testing.T) {
	t.Helper()
	v, c := Version, Commit
	t.Cleanup(func() { Version, Commit = v, c })
	Version, Commit = "v1.2.3", "abc1234"
}

func TestString(t *testing.T) {
	built(t)
	want := "divvy-node v1.2.3 (commit abc1234, " + runtime.Version() + ", " + runtime.GOOS + "/" + runtime.GOARCH + ")"
	if got := String("divvy-node"); got != want {
		t.Errorf("String() = %q, want %q", got, want)
	}
	Commit = ""
	if commit() == "" {
		t.Error("commit() is empty for a build without linker flags")
	}
}

func TestFormat(t *testing.T) {
	built(t)
	info := Of("x", API{Use: Serves, Name: "a.example", Versions: []string{"v1", "v1beta1"}},
		API{Use: Reads, Name: "b", Versions: []string{"2"}})

	text, err := info.Format("text")
	if err != nil {
		t.Fatal(err)
	}
	if want := String("x") + "\n  serves a.example v1, v1beta1\n  reads  b 2\n"; text != want {
		t.Errorf("text is\n%swant\n%s", text, want)
	}
	for name, decode := range map[string]func([]byte, any) error{
		"json": json.Unmarshal,
		"yaml": func(data []byte, into any) error { return yaml.UnmarshalStrict(data, into) },
	} {
		out, err := info.Format(name)
		if err != nil {
			t.Fatal(err)
		}
		var got Info
		if err := decode([]byte(out), &got); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(info, got); diff != "" {
			t.Errorf("%s does not come back as it was (-want +got):\n%s", name, diff)
		}
	}
	if _, err := info.Format("xml"); err == nil || !strings.Contains(err.Error(), "must be one of text, json, yaml") {
		t.Errorf("format xml: %v", err)
	}
}
