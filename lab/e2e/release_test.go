//go:build e2e

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/divvy-gpu/divvy/lab/internal/debian"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/release"
)

// TestRelease makes what a release is delivered as, with the libraries of Debian
// in the node's image, as "make images" does. It runs the images and shows the
// manifests to the API server, as a person without helm would; nothing of the
// installation is changed.
func TestRelease(t *testing.T) {
	ctx := begin(t, guide)
	dir := t.TempDir()
	stamp, err := release.ReadStamp(ctx, lab.CLI.Repository)
	must(t, err)
	stamp.Version = "v0.0.0-e2e"
	cache, err := os.UserCacheDir()
	must(t, err)
	images := filepath.Join(dir, "images")
	built, err := release.BuildImages(ctx, release.ImageOptions{
		Repository: lab.CLI.Repository, Dir: images, Stamp: stamp, Images: release.Images, Architectures: []string{runtime.GOARCH},
		Base:   release.Debian(debian.Archive{Dir: filepath.Join(cache, "divvy", "debian"), Suite: release.Suite}),
		Report: func(string) {},
	})
	must(t, err)
	out := filepath.Join(dir, "release")
	must(t, release.Make(ctx, release.Options{
		Repository: lab.CLI.Repository, Dir: out, Images: images, Helm: lab.Cluster.Program("helm"), Stamp: stamp, Report: func(string) {},
	}))

	// In a namespace of containerd's that kubelet does not look into.
	ctr := func(args ...string) (string, error) {
		return lab.CLI.Command(ctx, "", lab.Cluster.Program("ctr"),
			append([]string{"--address", layout.ContainerdSocket, "--namespace", "divvy-release"}, args...)...)
	}
	for i, name := range release.Images {
		t.Run(name, func(t *testing.T) {
			archives := []string{
				fmt.Sprintf("%s-%s-linux-%s.tar", name, stamp.Version, runtime.GOARCH),
				fmt.Sprintf("%s-%s.oci.tar", name, stamp.Version),
			}
			image := built[i].Name + ":" + built[i].Tag
			for _, archive := range archives {
				if _, err := ctr("images", "import", filepath.Join(images, archive)); err != nil {
					t.Fatalf("import %s: %v", archive, err)
				}
				said, err := ctr("run", "--rm", image, name, "/usr/bin/"+name, "version", "-o", "json")
				if err != nil {
					t.Fatalf("run what was in %s: %v", archive, err)
				}
				var about struct{ Program, Version, Commit string }
				if err := json.Unmarshal([]byte(said), &about); err != nil || about.Program != name || about.Version != stamp.Version ||
					about.Commit != stamp.Commit {
					t.Errorf("the image from %s says that it is %+v, %v", archive, about, err)
				}
				if _, err := ctr("images", "remove", "--sync", image); err != nil {
					t.Error(err)
				}
			}
		})
	}

	dryRun := []string{"apply", "--server-side", "--force-conflicts", "--field-manager=e2e", "--dry-run=server", "--validate=strict",
		"--warnings-as-errors"}
	for name, args := range map[string][]string{
		"manifest":              {"--filename=" + filepath.Join(out, "divvy.yaml")},
		"manifest for the pool": {"--filename=" + filepath.Join(out, "divvy-pool.yaml")},
		"before removing":       {"--filename=" + filepath.Join(out, "divvy-uninstall.yaml")},
		"after removing":        {"--filename=" + filepath.Join(out, "divvy-uninstall-after.yaml")},
		"kustomize base":        {"--kustomize=" + filepath.Join(out, "kustomize", "base")},
		"overlay over the base": {"--kustomize=" + filepath.Join(out, "kustomize", "overlays", "example")},
	} {
		t.Run(name, func(t *testing.T) {
			said, err := lab.CLI.Kubectl(ctx, append(dryRun, args...)...)
			if err != nil {
				t.Fatal(err)
			}
			if n := strings.Count(said, "(server dry run)"); n < 6 {
				t.Errorf("the API server took %d objects:\n%s", n, said)
			}
		})
	}
}
