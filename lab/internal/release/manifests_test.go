package release

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/kustomize/kyaml/kio"
	"sigs.k8s.io/kustomize/kyaml/yaml"
)

// helm returns the helm that make builds once.
func helm(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("make", "--silent", "helm")
	cmd.Dir = repository
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS") })
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("make helm: %v", err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1]
}

// testImages stand for built ones.
func testImages() []Built {
	var all []Built
	for i, name := range Images {
		all = append(all, Built{Name: Registry + "/" + name, Tag: testStamp.Version, Digest: "sha256:" + strings.Repeat(string(rune('a'+i)),
			64)})
	}
	return all
}

// object is what tests ask of one object of a manifest.
type object struct {
	kind, namespace, name string
	node                  *yaml.RNode
}

func (o object) String() string { return o.kind + " " + o.namespace + "/" + o.name }

func parse(t *testing.T, manifest []byte) []object {
	t.Helper()
	nodes, err := (&kio.ByteReader{Reader: bytes.NewReader(manifest), OmitReaderAnnotations: true}).Read()
	if err != nil {
		t.Fatal(err)
	}
	var all []object
	for _, n := range nodes {
		all = append(all, object{n.GetKind(), n.GetNamespace(), n.GetName(), n})
	}
	return all
}

func names(objects []object) []string {
	var all []string
	for _, o := range objects {
		all = append(all, o.String())
	}
	slices.Sort(all)
	return all
}

func TestRender(t *testing.T) {
	program := helm(t)
	examples, err := filepath.Glob(filepath.Join(repository, "examples", "values", "*.yaml"))
	if err != nil || len(examples) == 0 {
		t.Fatalf("examples of values: %v, %v", examples, err)
	}
	for _, values := range append([]string{""}, examples...) {
		t.Run(filepath.Base(values), func(t *testing.T) {
			m, err := Render(t.Context(), program, repository, values, "divvy-x", testStamp, testImages())
			if err != nil {
				t.Fatal(err)
			}
			install := parse(t, m.Install)
			if install[0].String() != "Namespace /"+Namespace {
				t.Errorf("the first object is %s, want the namespace", install[0])
			}
			for part, manifest := range map[string][]byte{"install": m.Install, "before": m.Before, "after": m.After} {
				for _, o := range parse(t, manifest) {
					text := o.node.MustString()
					for _, word := range []string{"helm.sh/", "managed-by: Helm", "annotations: {}", "randAlphaNum"} {
						if strings.Contains(text, word) {
							t.Errorf("%s: %s has %q", part, o, word)
						}
					}
					if label := o.node.GetLabels()["app.kubernetes.io/version"]; label != "" && label != testStamp.Version {
						t.Errorf("%s: %s says that it is of version %s", part, o, label)
					}
					if o.kind == "Secret" && (strings.Contains(text, "\ndata:") || strings.Contains(text, "\nstringData:")) {
						t.Errorf("%s: %s has content:\n%s", part, o, text)
					}
				}
				for line := range strings.Lines(string(manifest)) {
					image, found := strings.CutPrefix(strings.TrimLeft(line, " -"), "image: ")
					image = strings.Trim(strings.TrimSpace(image), `"`)
					if found && strings.HasPrefix(image, Registry) &&
						!slices.ContainsFunc(testImages(), func(b Built) bool { return b.Reference() == image }) {
						t.Errorf("%s: image %s is not one of the release, by its digest", part, image)
					}
				}
			}
			ownScheduler := filepath.Base(values) == "dedicated.yaml"
			if told := strings.Contains(string(m.Install), "has to be of the cluster's version"); told != ownScheduler {
				t.Errorf("it has a kube-scheduler: %t, and the manifest tells to choose its version: %t", ownScheduler, told)
			}
			needsKey := strings.Contains(string(m.Install), "secretName: "+grantSecret)
			if told := strings.Contains(string(m.Install), "#   kubectl create secret generic "+grantSecret); told != needsKey {
				t.Errorf("a key is needed: %t, and the manifest tells how to make one: %t", needsKey, told)
			}
		})
	}
}

// TestRenderedHooks says which objects help to remove Divvy, and when.
func TestRenderedHooks(t *testing.T) {
	m, err := Render(t.Context(), helm(t), repository, "", "divvy", testStamp, testImages())
	if err != nil {
		t.Fatal(err)
	}
	before, after := names(parse(t, m.Before)), names(parse(t, m.After))
	for _, want := range []string{"Job divvy-system/divvy-uninstall", "DaemonSet divvy-system/divvy-uninstall-node",
		"ServiceAccount divvy-system/divvy-uninstall"} {
		if !slices.Contains(before, want) {
			t.Errorf("before has no %s: %q", want, before)
		}
	}
	for _, want := range []string{"Namespace /divvy-system", "Job divvy-system/divvy-uninstall-after",
		"ServiceAccount divvy-system/divvy-uninstall"} {
		if !slices.Contains(after, want) {
			t.Errorf("after has no %s: %q", want, after)
		}
	}
	for _, o := range parse(t, m.Install) {
		if strings.Contains(o.name, "uninstall") {
			t.Errorf("%s is installed", o)
		}
	}
	for _, line := range uninstallCommands("divvy") {
		if !bytes.Contains(m.Before, []byte("#   "+line+"\n")) {
			t.Errorf("the manifest does not tell: %s", line)
		}
	}
}

// TestInstallPageTellsTheCommands that the manifests tell.
func TestInstallPageTellsTheCommands(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(repository, "docs", "install.md"))
	if err != nil {
		t.Fatal(err)
	}
	commands := uninstallCommands("divvy")
	for line := range strings.Lines(string(installHeader(testStamp, "divvy", "", true, true))) {
		if command, found := strings.CutPrefix(strings.TrimSpace(line), "#   "); found {
			commands = append(commands, command)
		}
	}
	for _, command := range commands {
		if !strings.Contains(string(page), "\n$ "+command+"\n") {
			t.Errorf("docs/install.md does not tell: %s", command)
		}
	}
	if len(commands) != 8 {
		t.Errorf("%d commands, want 8", len(commands))
	}
}

func TestRenderSaysWhatIsWrong(t *testing.T) {
	values := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(values, []byte("memoryUnit: 7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Render(t.Context(), helm(t), repository, values, "divvy", testStamp, nil)
	if err == nil || !strings.Contains(err.Error(), "values.yaml of the examples") || !strings.Contains(err.Error(), "memoryUnit") {
		t.Errorf("the error does not name the file and the value: %v", err)
	}
}

// testRelease makes the files of a release but for kubectl-divvy.
func testRelease(t *testing.T, dir string) {
	t.Helper()
	digests := filepath.Join(dir, "images", digestsFile)
	var text strings.Builder
	for _, i := range testImages() {
		text.WriteString(i.Reference() + "\n" + i.Name + "@" + i.Digest + " linux/amd64\n")
	}
	if err := writeFile(digests, []byte(text.String())); err != nil {
		t.Fatal(err)
	}
	stamp := testStamp
	stamp.Time = time.Unix(1_700_000_000, 0)
	err := Make(t.Context(), Options{
		Repository: repository, Dir: filepath.Join(dir, "release"), Images: filepath.Join(dir, "images"), Helm: helm(t), Stamp: stamp,
		Report: func(string) {},
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestMake(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	testRelease(t, first)
	testRelease(t, second)
	read := func(name string) string {
		content, err := os.ReadFile(filepath.Join(first, "release", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	sums := read(sumsFile)
	other, err := os.ReadFile(filepath.Join(second, "release", sumsFile))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sums, string(other)); diff != "" {
		t.Errorf("two releases of one checkout differ (-first +second):\n%s", diff)
	}
	for _, name := range []string{"divvy.yaml", "divvy-uninstall.yaml", "divvy-uninstall-after.yaml",
		"divvy-nvidia.yaml", "divvy-pool.yaml", "divvy-9.8.7.tgz",
		"divvy-kustomize-v9.8.7.tar.gz", "digests.txt", "krew.yaml"} {
		if !strings.Contains(sums, "  "+name+"\n") {
			t.Errorf("no checksum of %s", name)
		}
	}
	cmd := exec.Command("sha256sum", "--check", "--strict", "--quiet", sumsFile)
	cmd.Dir = filepath.Join(first, "release")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("sha256sum: %v: %s", err, out)
	}
	chart := untar(t, filepath.Join(first, "release", "divvy-9.8.7.tgz"))
	var about struct {
		Version     string `yaml:"version"`
		AppVersion  string `yaml:"appVersion"`
		KubeVersion string `yaml:"kubeVersion"`
	}
	if err := yaml.Unmarshal(chart["divvy/Chart.yaml"], &about); err != nil {
		t.Fatal(err)
	}
	if about.Version != "9.8.7" || about.AppVersion != "v9.8.7" || about.KubeVersion == "" {
		t.Errorf("the chart says %+v", about)
	}
	if len(untar(t, filepath.Join(first, "release", "divvy-kustomize-v9.8.7.tar.gz"))) < 4 {
		t.Error("the archive for kustomize is not whole")
	}
}

// TestKustomize builds each base and the overlay as "kubectl apply -k" does.
func TestKustomize(t *testing.T) {
	dir := t.TempDir()
	testRelease(t, dir)
	build := func(name string) []object {
		t.Helper()
		resources, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(),
			filepath.Join(dir, "release", "kustomize", name))
		if err != nil {
			t.Fatalf("kustomize %s: %v", name, err)
		}
		text, err := resources.AsYaml()
		if err != nil {
			t.Fatal(err)
		}
		return parse(t, text)
	}
	for base, manifest := range map[string]string{"base": "divvy.yaml", "nvidia": "divvy-nvidia.yaml", "pool": "divvy-pool.yaml"} {
		content, err := os.ReadFile(filepath.Join(dir, "release", manifest))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(names(parse(t, content)), names(build(base))); diff != "" {
			t.Errorf("base %s has other objects than %s (-manifest +kustomize):\n%s", base, manifest, diff)
		}
	}
	changed := 0
	for _, o := range build(filepath.Join("overlays", "example")) {
		text := o.node.MustString()
		if strings.Contains(text, "image: "+Registry) {
			t.Errorf("%s has an image of the base:\n%s", o, text)
		}
		if o.String() == "DaemonSet divvy-system/divvy-node" && strings.Contains(text, "example.com/pool: accelerators") {
			changed++
		}
	}
	if changed != 1 {
		t.Error("the patch of the overlay does not change divvy-node")
	}
}

func TestMakeWantsImagesOfTheSameVersion(t *testing.T) {
	digest := strings.Repeat("1", 64)
	node, control := fmt.Sprintf("%s/divvy-node:v1@sha256:%s\n", Registry, digest), fmt.Sprintf("%s/divvy-control:v1@sha256:%s\n", Registry,
		digest)
	tests := map[string]struct{ content, want string }{
		"none":            {want: "run make images first"},
		"another version": {content: node + control, want: "are of version v1, and the release is v9.8.7"},
		"one is missing":  {content: node, want: "names 1 images with all architectures, and there are 2"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if tt.content != "" {
				if err := writeFile(filepath.Join(dir, digestsFile), []byte(tt.content)); err != nil {
					t.Fatal(err)
				}
			}
			err := Make(t.Context(), Options{Helm: "helm", Images: dir, Stamp: testStamp, Dir: filepath.Join(dir, "out")})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestChartVersion(t *testing.T) {
	for version, want := range map[string]string{"v1.2.3": "1.2.3", "1.2.3": "1.2.3", "v1.2.3-rc.1": "1.2.3-rc.1"} {
		if got, err := chartVersion(repository, version); err != nil || got != want {
			t.Errorf("chart of %s: %s, %v; want %s", version, got, err, want)
		}
	}
	for version, suffix := range map[string]string{"0123456-dirty": "-dev.g0123456-dirty", "v1.2": "-dev.gv1-2"} {
		if got, err := chartVersion(repository, version); err != nil || !strings.HasSuffix(got, suffix) || !semantic.MatchString(got) {
			t.Errorf("chart of %s: %s, %v; want a version that ends in %s", version, got, err, suffix)
		}
	}
}

func untar(t *testing.T, path string) map[string][]byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	unzipped, err := gzip.NewReader(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for r := tar.NewReader(unzipped); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[header.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}
