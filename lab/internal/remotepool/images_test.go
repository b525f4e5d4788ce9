package remotepool

import (
	"archive/tar"
	"cmp"
	"crypto/tls"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/lab/internal/image"
	"github.com/divvy-gpu/divvy/lab/internal/pki"
)

func newAuthority() (tls.Certificate, error) {
	a, err := pki.NewAuthority("stranger")
	if err != nil {
		return tls.Certificate{}, err
	}
	server, err := a.Issue(pki.Profile{CommonName: "server", Names: []string{"127.0.0.1"}, Server: true})
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := server.KeyPEM()
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(server.CertificatePEM(), key)
}

// unpack writes the files of an image into a folder.
func unpack(t *testing.T, spec image.Spec) string {
	t.Helper()
	img, err := image.Build(spec)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	content, err := layers[0].Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer content.Close() //nolint:errcheck // read from memory
	root := t.TempDir()
	for r := tar.NewReader(content); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return root
		}
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(root, header.Name)
		switch header.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(path, 0o755)
		case tar.TypeLink:
			err = os.Link(filepath.Join(root, header.Linkname), path)
		case tar.TypeReg:
			var data []byte
			if data, err = io.ReadAll(r); err == nil {
				err = os.WriteFile(path, data, header.FileInfo().Mode())
			}
		default:
			t.Fatalf("%s has type %c", header.Name, header.Typeflag)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestCatalogMatchesClientImages: every client of the default catalog is in the
// published image that its pods get.
func TestCatalogMatchesClientImages(t *testing.T) {
	program := filepath.Join(t.TempDir(), "bitfusion")
	write(t, program, "program")
	specs, err := ClientSpecs(program)
	if err != nil {
		t.Fatal(err)
	}
	images := map[string]string{}
	for _, spec := range specs {
		images[spec.Name] = unpack(t, spec)
		for _, tool := range copyTools {
			if _, err := os.Stat(filepath.Join(images[spec.Name], "bin", tool)); err != nil {
				t.Errorf("image %s: %v", spec.Name, err)
			}
		}
	}
	for _, c := range pool.DefaultCatalog().Clients {
		name := cmp.Or(c.Image, defaultClientImage(t))
		root, published := images[name]
		if !published {
			t.Errorf("client %s for %s: there is no image %s", c.Version, c.OS, name)
			continue
		}
		for path, want := range map[string]string{
			c.Binary: "program", filepath.Join(c.LibraryPath, LibraryName): "a stand-in\n",
			filepath.Join(c.OptSource, VersionFile): c.Version[:1] + ".",
		} {
			if data, err := os.ReadFile(filepath.Join(root, path)); err != nil || !strings.HasPrefix(string(data), want) {
				t.Errorf("client %s for %s: image %s has %q in %s, %v; want %q", c.Version, c.OS, name, data, path, err, want)
			}
		}
	}
}

// defaultClientImage is the chart's value pool.client.image.
func defaultClientImage(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile("../../../charts/divvy/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var values struct {
		Pool struct {
			Client struct {
				Image string `json:"image"`
			} `json:"client"`
		} `json:"pool"`
	}
	if err := yaml.Unmarshal(data, &values); err != nil {
		t.Fatal(err)
	}
	return values.Pool.Client.Image
}

func script(t *testing.T, content []byte, env []string, args ...string) (string, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "script")
	write(t, path, string(content))
	cmd := exec.Command("bash", append([]string{path}, args...)...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestBenchmarkNeedsTheClient(t *testing.T) {
	args := []string{"/benchmark/tf_cnn_benchmarks.py", "--local_parameter_device=gpu", "--batch_size=32", "--model=inception3"}
	if out, err := script(t, python, nil, args...); err == nil || !strings.Contains(out, "no GPU") {
		t.Errorf("without a GPU: %v\n%s", err, out)
	}
	out, err := script(t, python, []string{"BITFUSION_GPUS=0", "BITFUSION_MEMORY_MB=8080"}, args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"Model:       inception3", "Batch size:  32 global", "with 8080 MB memory", "Devices:     ['/gpu:0']",
		"100\timages/sec: ", "total images/sec: 199.65"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

func TestOtherClient(t *testing.T) {
	out, err := script(t, rgpu, nil, "attach", "--gpus", "2", "--share", "50", "--pick", "a=b", "--", "bash", "-c", `echo "$RGPU_GPUS; $0"`,
		"x y")
	if want := "rgpu: attached 2 GPUs, 50 percent of each, picked by a=b\n2; x y\n"; err != nil || out != want {
		t.Errorf("printed %q, %v; want %q", out, err, want)
	}
	for _, args := range [][]string{nil, {"attach"}, {"attach", "--gpus", "1", "--", "true"},
		{"attach", "--gpus", "1", "--share", "5", "true"}, {"attach", "--share"}} {
		if out, err := script(t, rgpu, nil, args...); err == nil || !strings.Contains(out, "usage") {
			t.Errorf("rgpu %v: %v\n%s", args, err, out)
		}
	}
}
