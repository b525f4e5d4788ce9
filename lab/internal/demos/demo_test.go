package demos

import (
	"slices"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
)

func TestExcerpt(t *testing.T) {
	const described = `Name:               n
Roles:              control-plane
Labels:             a/b=true
                    nvidia.com/gpu.count=2
Annotations:        x: y
Capacity:
  cpu:             2
  nvidia.com/gpu:  2
Allocatable:
  nvidia.com/gpu:  1
System Info:
  Kernel Version:  6
`
	want := "Name:               n\n...\nLabels:             a/b=true\n                    nvidia.com/gpu.count=2\n...\n" +
		"Capacity:\n  cpu:             2\n  nvidia.com/gpu:  2\nAllocatable:\n  nvidia.com/gpu:  1\n..."
	if got := excerpt(described, ""); got != want {
		t.Errorf("all of it:\n%s\nwant:\n%s", got, want)
	}
	got := excerpt(described, "nvidia.com/")
	for _, line := range []string{"nvidia.com/gpu.count=2", "Capacity:", "  nvidia.com/gpu:  1"} {
		if !strings.Contains(got, line) {
			t.Errorf("lines with nvidia.com/ lack %q:\n%s", line, got)
		}
	}
	if strings.Contains(got, "cpu") {
		t.Errorf("lines with nvidia.com/ have others:\n%s", got)
	}
}

func TestWithoutBoard(t *testing.T) {
	topology := vendorsim.Topology{Cards: append(vendorsim.GCUs(1, 1024), vendorsim.IXBoards(2, 2, 1024)...)}
	board := topology.Cards[1].Board
	if got := withoutBoard(topology, board); len(got.Cards) != 3 || len(topology.Cards) != 5 ||
		slices.ContainsFunc(got.Cards, func(c vendorsim.Card) bool { return c.Board == board }) {
		t.Errorf("without board %q there are %d cards, and %d before", board, len(got.Cards), len(topology.Cards))
	}
}

func TestNodes(t *testing.T) {
	for vendor, want := range map[string][]string{
		vendorsim.NVIDIA:   {"nvidia-uvm", "nvidia-uvm-tools", "nvidia3", "nvidiactl"},
		vendorsim.Iluvatar: {"iluvatar3", "itrctl"},
		vendorsim.Enflame:  {"gcu3"},
	} {
		if got := nodes(vendorsim.Card{Vendor: vendor, Minor: new(3)}); !slices.Equal(got, want) || !slices.IsSorted(got) {
			t.Errorf("%s: %v, want %v in order", vendor, got, want)
		}
	}
}
