package collect

import (
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/divvy-gpu/divvy/internal/report/inspect"
)

func TestUnknownNodeInALargeCluster(t *testing.T) {
	var all inspect.Report
	for i := range 30 {
		all.Nodes = append(all.Nodes, inspect.Node{Name: fmt.Sprintf("n%02d", i)})
	}
	err := unknownNode("text", all)
	if want := "n18, n19 and 10 more"; !strings.HasSuffix(err.Error(), want) {
		t.Errorf("error %q, want it to end with %q", err, want)
	}
	if got := unknownNode("text", inspect.Report{}).Error(); got != "text; no node does" {
		t.Errorf("error %q", got)
	}
}

func TestAmountIsBounded(t *testing.T) {
	list := v1.ResourceList{"huge": resource.MustParse("1e30"), "half": resource.MustParse("500m"), "less": resource.MustParse("-3"),
		"some": resource.MustParse("1k")}
	for name, want := range map[v1.ResourceName]int64{"half": 1, "less": 0, "some": 1000, "none": 0} {
		if got := amount(list, name); int64(got) != want {
			t.Errorf("%s: %d, want %d", name, got, want)
		}
	}
	if got := amount(list, "huge"); got <= 0 || got+got <= got {
		t.Errorf("huge: %d", got)
	}
}
