package snapshot

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func TestObjectsAreComparedWithoutWhatChangesByItself(t *testing.T) {
	lease := func(holder, renewed, version string) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
			"metadata": map[string]any{"name": "a", "namespace": "n", "resourceVersion": version,
				"managedFields": []any{map[string]any{"manager": version}}},
			"spec": map[string]any{"holderIdentity": holder, "renewTime": renewed},
		}}
	}
	node := func(heartbeat, status string) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{"name": "a"},
			"status": map[string]any{"conditions": []any{map[string]any{"type": "Ready", "status": status,
				"lastHeartbeatTime": heartbeat}}},
		}}
	}
	event := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "Event", "metadata": map[string]any{"name": "a",
		"namespace": "n"}}}
	mine := Exception{Kind: "Lease", Namespace: "n", Name: "a", Reason: "a test"}
	take := func(exceptions []Exception, objects ...*unstructured.Unstructured) Snapshot {
		s := Snapshot{}
		for _, o := range objects {
			if err := s.add(o, exceptions); err != nil {
				t.Fatal(err)
			}
		}
		return s
	}
	tests := map[string]struct {
		before, after []*unstructured.Unstructured
		more          []Exception
		want          []string // beginnings
	}{
		"a renewed lease": {[]*unstructured.Unstructured{lease("x", "1", "1")}, []*unstructured.Unstructured{lease("x", "2", "2"), event},
			nil, nil},
		"another holder": {[]*unstructured.Unstructured{lease("x", "1", "1")}, []*unstructured.Unstructured{lease("y", "1", "1")}, nil,
			[]string{"coordination.k8s.io/v1 Lease n/a: differs"}},
		"a heartbeat": {[]*unstructured.Unstructured{node("1", "True")}, []*unstructured.Unstructured{node("2", "True")}, nil, nil},
		"a condition": {[]*unstructured.Unstructured{node("1", "True")}, []*unstructured.Unstructured{node("1", "False")}, nil,
			[]string{"v1 Node /a: differs"}},
		"an object is gone": {[]*unstructured.Unstructured{node("1", "True")}, nil, nil, []string{"v1 Node /a: is gone"}},
		"an object more":    {nil, []*unstructured.Unstructured{node("1", "True")}, nil, []string{"v1 Node /a: was not there"}},
		"an exception":      {nil, []*unstructured.Unstructured{lease("x", "1", "1")}, []Exception{mine}, nil},
		"of another name": {nil, []*unstructured.Unstructured{lease("x", "1", "1")}, []Exception{{Kind: "Lease", Name: "b"}},
			[]string{"coordination.k8s.io/v1 Lease n/a: was not there"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			exceptions := slices.Concat(Always, tc.more)
			got := Diff(take(exceptions, tc.before...), take(exceptions, tc.after...))
			if len(got) != len(tc.want) {
				t.Fatalf("got %q, want %q", got, tc.want)
			}
			for i, want := range tc.want {
				if !strings.HasPrefix(got[i], want) {
					t.Errorf("got %q, want %q", got[i], want)
				}
			}
		})
	}
}

func TestFilesAreComparedByWhatTheyAre(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, content string, mode os.FileMode) {
		if err := os.WriteFile(path(name), []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(path("sub"), 0o755))
	write("same", "a", 0o600)
	write("content", "a", 0o600)
	write("mode", "a", 0o600)
	write("gone", "a", 0o600)
	write("sub/left-out", "a", 0o600)
	must(os.Symlink("same", path("link")))
	take := func() Snapshot {
		s, err := Files([]string{dir, path("never")}, []string{path("sub/left-out")})
		must(err)
		return s
	}
	before := take()
	if before[path("never")] != "not there" {
		t.Errorf("a folder that is not there is %q", before[path("never")])
	}
	if diff := Diff(before, take()); diff != nil {
		t.Errorf("nothing changed, and it says %q", diff)
	}
	write("content", "b", 0o600)
	write("sub/left-out", "b", 0o600)
	must(os.Chmod(path("mode"), 0o644))
	must(os.Remove(path("gone")))
	must(os.Remove(path("link")))
	must(os.Symlink("content", path("link")))
	l, err := net.Listen("unix", path("socket"))
	must(err)
	defer l.Close() //nolint:errcheck // the test is over
	var got []string
	for _, line := range Diff(before, take()) {
		name, what, _ := strings.Cut(strings.TrimPrefix(line, dir+"/"), ": ")
		what, _, _ = strings.Cut(what, " (")
		got = append(got, name+" "+what)
	}
	if diff := cmp.Diff([]string{"content differs", "gone is gone", "link differs", "mode differs", "socket was not there"},
		got); diff != "" {
		t.Errorf("differences (-want +got):\n%s", diff)
	}
}
