package why

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// foreignNames are resources of other sharing systems, by their domain and what the rest
// begins with.
var foreignNames = []struct{ domain, prefix, system string }{
	{"nvidia.com", "gpumem", "HAMi"},
	{"nvidia.com", "gpucores", "HAMi"},
	{"nvidia.com", "gpu-core.percentage", "HAMi"},
	{"nvidia.com", "priority", "HAMi"},
	{"volcano.sh", "", "Volcano"},
	{"aliyun.com", "gpu-mem", "gpushare"},
	{"aliyun.com", "gpu-count", "gpushare"},
	{"enflame.com", "gcu-core", "HAMi"},
	{"enflame.com", "shared-gcu", "GCUShare's older releases"},
	{"enflame.com", "drs-gcu", "GCUShare's older releases"},
	{"iluvatar.ai", "", "HAMi"},
}

func foreignSystem(name v1.ResourceName) string {
	for _, f := range foreignNames {
		if strings.HasPrefix(string(name), f.domain+"/"+f.prefix) {
			return f.system
		}
	}
	return ""
}

// offeredNames are the extended resources that nodes offer, sorted.
func (w *world) offeredNames() []string {
	names := map[string]bool{}
	for _, n := range w.nodes {
		for name, amount := range n.allocatable {
			if amount > 0 && strings.Contains(string(name), "/") {
				names[string(name)] = true
			}
		}
		for _, in := range n.inventories {
			names[string(in.Resource)] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// nearest returns the name that is most like another, "" where none is like it.
func nearest(name string, names []string) string {
	best, least := "", len(name)/4+1
	for _, n := range names {
		if d := distance(name, n); d > 0 && d < least {
			best, least = n, d
		}
	}
	return best
}

// distance is the least number of letters to insert, delete or replace.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range a {
		diagonal := row[0]
		row[0] = i + 1
		for j := range b {
			above := row[j+1]
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			row[j+1] = min(row[j]+1, above+1, diagonal+cost)
			diagonal = above
		}
	}
	return row[len(b)]
}

// kin are offered resources of the same vendor, or with the same last word.
func kin(name string, names []string) []string {
	domain, last, _ := strings.Cut(name, "/")
	var out []string
	for _, n := range names {
		d, l, _ := strings.Cut(n, "/")
		if d == domain || cmp.Compare(l, last) == 0 {
			out = append(out, n)
		}
	}
	return out
}
