package supervisor

import (
	"path/filepath"
	"strings"
	"testing"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
)

// A configuration is refused exactly when a socket of one of its resources
// cannot be made: the check names sockets as package deviceplugin does.
func TestSocketsThatCannotBeMadeAreRefused(t *testing.T) {
	const (
		longest = 107        // sun_path of unix(7)
		aside   = len("~99") // after the name of a socket that cannot be taken
	)
	for _, names := range [][]accel.Resource{
		{"nvidia.com/gpu"},
		{"nvidia.com/gpu", "nvidia.org/gpu"},
		{"nvidia.com/gpu", "nvidia.org/gpu.shared", "nvidia.org/gpu"},
		{"kubelet.com/sock", "a-b.com/c", "a.com/b-c"},
	} {
		sockets := deviceplugin.SocketNames(names...)
		for folder := range 100 {
			c := config.Default()
			c.KubeletDir = "/" + strings.Repeat("k", folder)
			c.Resources = nil
			dir := filepath.Join(c.KubeletDir, "device-plugins")
			want := len(filepath.Join(dir, "kubelet.sock")) > longest
			for i, name := range names {
				c.Resources = append(c.Resources, config.Resource{Name: string(name), Vendor: "nvidia", Mode: config.ModeExclusive})
				want = want || len(filepath.Join(dir, sockets[i]))+aside > longest
			}
			if got := config.Validate(c, []string{"nvidia"}); want != (len(got) > 0) {
				t.Errorf("%v in a folder of %d letters, sockets %v: %q", names, folder, sockets, got)
			}
		}
	}
}
