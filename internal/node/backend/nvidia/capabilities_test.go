package nvidia

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCapabilities(t *testing.T) {
	all := parseCapabilities(strings.Join([]string{
		"config 1", "monitor 2", "gpu0/gi1/access 12", "gpu0/gi1/ci0/access 13", "gpu0/gi1/ci1/access 14", "gpu3/gi7/access 129",
		"gpu3/gi7/ci0/access 130", "", "gpu0/gi2/access", "gpu0/gi2/access x", "gpu0/gi2/access -1", "gpu0/gi02/access 7",
		"gpu0/ci0/access 8", "gpu0/gi2/ci0/other 9", "gpu0/gi2/access 10 11", "gpu0/gi2/ci0/ci1/access 12", "gpu0/gi2/access 1048576",
		"gpu1/gi1/access 5", "gpu1/gi1/access 6",
	}, "\n"))
	want := capabilities{
		{0, 1, noInstance}: 12, {0, 1, 0}: 13, {0, 1, 1}: 14, {3, 7, noInstance}: 129, {3, 7, 0}: 130,
	}
	if diff := cmp.Diff(want, all, cmp.AllowUnexported(capability{})); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for _, tt := range []struct {
		gpu     int
		of      instance
		nodes   []string
		missing []string
	}{
		{0, instance{1, 1}, []string{"dev/nvidia-caps/nvidia-cap12", "dev/nvidia-caps/nvidia-cap14"}, nil},
		{3, instance{7, 0}, []string{"dev/nvidia-caps/nvidia-cap129", "dev/nvidia-caps/nvidia-cap130"}, nil},
		{3, instance{7, 1}, []string{"dev/nvidia-caps/nvidia-cap129"}, []string{"gpu3/gi7/ci1/access"}},
		{1, instance{1, 0}, nil, []string{"gpu1/gi1/access", "gpu1/gi1/ci0/access"}},
	} {
		nodes, missing := all.nodes(tt.gpu, tt.of)
		if !cmp.Equal(nodes, tt.nodes) || !cmp.Equal(missing, tt.missing) {
			t.Errorf("GPU %d, instance %v: nodes %q, missing %q", tt.gpu, tt.of, nodes, missing)
		}
	}
}

// FuzzCapabilities: what is read is written the same, and numbers are those of device
// files.
func FuzzCapabilities(f *testing.F) {
	f.Add("gpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\nmonitor 2")
	f.Add("gpu0/gi1/access 12\ngpu0/gi1/access 12")
	f.Add("gpu/gi/ci/access\t0\r\n/// 1\naccess 1")
	f.Fuzz(func(t *testing.T, text string) {
		got := parseCapabilities(text)
		var lines []string
		for c, number := range got {
			if number < 0 || number > maxMinor || c.gpu < 0 || c.gpuInstance < 0 || c.computeInstance < noInstance {
				t.Errorf("%q: %v is %d", text, c, number)
			}
			lines = append(lines, fmt.Sprintf("%s %d", c, number))
		}
		again := parseCapabilities(strings.Join(lines, "\n"))
		if !cmp.Equal(got, again, cmp.AllowUnexported(capability{})) {
			t.Errorf("%q: %v, and again %v", text, got, again)
		}
	})
}
