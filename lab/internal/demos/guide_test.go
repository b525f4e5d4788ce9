package demos

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const report = `{
    "nodes": [
        {
            "name": "n",
            "devices": [
                {
                    "id": 0,
                    "pods": [
                        {
                            "name": "p"
                        }
                    ]
                },
                {
                    "id": 1,
                    "pods": []
                },
                {
                    "id": 2,
                    "pods": []
                },
                {
                    "id": 3,
                    "pods": []
                }
            ]
        }
    ]
}`

func TestAbridge(t *testing.T) {
	want := `{
    "nodes": [
        {
            "name": "n",
            "devices": [
                {
                    "id": 0,
                    "pods": [
                        {
                            "name": "p"
                        }
                    ]
                },
                ......
                {
                    "id": 3,
                    "pods": []
                }
            ]
        }
    ]
}`
	if got := abridge(report, 1); got != want {
		t.Errorf("abridged to the first and the last device:\n%s\nwant:\n%s", got, want)
	}
	if got := abridge(report, 3); got != report {
		t.Errorf("with nothing to leave out:\n%s\nwant it unchanged", got)
	}
}

func TestWithUnits(t *testing.T) {
	for number, units := range map[string]int64{"1": 4, "2": 8, "3": 12, "4": 20} {
		name := "gcushare-pod-" + number
		example, err := os.ReadFile(filepath.Join("..", "..", "..", "examples", name+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		manifest, err := withUnits(example, units*10)
		if err != nil {
			t.Fatal(err)
		}
		var before, after corev1.Pod
		if err := yaml.Unmarshal(example, &before); err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal([]byte(manifest), &after); err != nil {
			t.Fatal(err)
		}
		was, is := before.Spec.Containers[0], after.Spec.Containers[0]
		if got := was.Resources.Limits[product.Resource]; got.Value() != units {
			t.Errorf("examples/%s.yaml asks for %d units, the guide's pod for %d", name, got.Value(), units)
		}
		if got := is.Resources.Limits[product.Resource]; after.Name != name || is.Image != cluster.ShellImage || got.Value() != units*10 {
			t.Errorf("%s with %d units became pod %q of image %s with %d units", name, units*10, after.Name, is.Image, got.Value())
		}
	}
}

func TestFold(t *testing.T) {
	if got, want := fold([]string{"core", "fd", "full", "gcu0", "null"}, 10), "core  fd\nfull  gcu0\nnull"; got != want {
		t.Errorf("folded to %q, want %q", got, want)
	}
}

func TestEnd(t *testing.T) {
	var out strings.Builder
	s := New("demo", &testenv.Env{Cluster: &cluster.Cluster{}}, &out)
	s.Checks.Equal("cards", 1, 1)
	if err := s.End(); err != nil || !strings.Contains(out.String(), "demo: 1 checks: all are as they should be") {
		t.Errorf("after a good check: %v, %q", err, out.String())
	}
	s.Checks.Equal("cards", 1, 2)
	if err := s.End(); err == nil || !strings.Contains(out.String(), "demo: 2 checks: 1 DIFFER") {
		t.Errorf("after a bad check: %v, %q", err, out.String())
	}
}

func TestWantedAndShownAgree(t *testing.T) {
	node := audit.Node{}
	for id := range 8 {
		node.Devices = append(node.Devices, audit.Device{ID: id, Total: 160})
	}
	node.Devices[1].Used = 120
	node.Devices[1].Pods = []audit.Occupant{{Name: "a", Used: 40}, {Name: "b", Used: 80}}
	want := wanted([]holding{{"a", 1, 40}, {"b", 1, 80}}, 10)
	got := shown(node)
	for id := range 8 {
		if got[id] != want[id] {
			t.Errorf("card %d: shown %q, wanted %q", id, got[id], want[id])
		}
	}
	if want[1] != "120 of 160 used, a holds 40, b holds 80" {
		t.Errorf("card 1: wanted %q", want[1])
	}
}
