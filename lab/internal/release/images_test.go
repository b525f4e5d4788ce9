package release

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/lab/internal/debian"
	images "github.com/divvy-gpu/divvy/lab/internal/image"
)

// libraries returns those of this machine, which its divvy-node can use, as if
// they were of a package. Debian's own are taken in the lab's tests.
func libraries(t *testing.T) func(context.Context, string) ([]images.File, []debian.Package, error) {
	t.Helper()
	program, err := exec.LookPath("gcc")
	if err != nil {
		t.Fatal(err)
	}
	return func(context.Context, string) ([]images.File, []debian.Package, error) {
		files, err := images.Libraries(program, VendorLibraryNeeds()...)
		for i, f := range files {
			if files[i].Content, err = os.ReadFile(f.Source); err != nil {
				return nil, nil, err
			}
			files[i].Source = ""
		}
		return files, []debian.Package{{Name: "libc6", Version: "2.36-9", Architecture: runtime.GOARCH, Source: "glibc"}}, err
	}
}

// sourcesIn copies what programs are built from to another place, so that nobody
// changes it meanwhile.
func sourcesIn(t *testing.T, from, dir string) string {
	t.Helper()
	for _, folder := range []string{"api", "cmd", "internal"} {
		if err := os.CopyFS(filepath.Join(dir, folder), os.DirFS(filepath.Join(from, folder))); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"go.mod", "go.sum", "LICENSE"} {
		content, err := os.ReadFile(filepath.Join(from, file))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, file), content, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// buildImages builds both images for this machine's architecture.
func buildImages(t *testing.T, from, to string) []Built {
	t.Helper()
	stamp := testStamp
	stamp.Time = time.Unix(1_700_000_000, 0)
	built, err := BuildImages(t.Context(), ImageOptions{
		Repository: from, Dir: to, Stamp: stamp, Images: Images, Architectures: []string{runtime.GOARCH},
		Base: libraries(t), Report: func(string) {},
	})
	if err != nil {
		t.Fatal(err)
	}
	return built
}

// TestImages builds both images twice, from different folders and with different
// umasks, and looks at what came out.
func TestImages(t *testing.T) {
	first := filepath.Join(t.TempDir(), "images")
	sources := sourcesIn(t, repository, filepath.Join(t.TempDir(), "checkout"))
	built := buildImages(t, sources, first)

	t.Run("two builds, one digest", func(t *testing.T) {
		from := sourcesIn(t, sources, filepath.Join(t.TempDir(), "a", "longer", "path", "of", "another", "checkout"))
		second := filepath.Join(t.TempDir(), "elsewhere")
		old := syscall.Umask(0o077)
		again := buildImages(t, from, second)
		syscall.Umask(old)
		if diff := cmp.Diff(built, again); diff != "" {
			t.Errorf("(-first +second):\n%s", diff)
		}
		if diff := cmp.Diff(read(t, first, sumsFile), read(t, second, sumsFile)); diff != "" {
			t.Errorf("files differ (-first +second):\n%s", diff)
		}
	})
	for _, b := range built {
		program := filepath.Base(b.Name)
		t.Run(program, func(t *testing.T) { checkImage(t, first, b, program) })
	}
	t.Run("push", func(t *testing.T) { checkPush(t, first, built) })
}

func checkImage(t *testing.T, dir string, b Built, program string) {
	t.Helper()
	at, err := layout.FromPath(filepath.Join(dir, program))
	if err != nil {
		t.Fatal(err)
	}
	img := imageIn(t, at, b.Digest, b.Platforms[runtime.GOARCH])
	config, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	user := UserID
	if program == Node {
		user = ""
	}
	if config.OS != "linux" || config.Architecture != runtime.GOARCH || config.Config.User != user ||
		config.Created.Unix() != 1_700_000_000 {
		t.Errorf("configuration: %s/%s, user %q, of %v; want user %q", config.OS, config.Architecture, config.Config.User, config.Created,
			user)
	}
	if diff := cmp.Diff(testStamp.Labels(program), config.Config.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	for _, label := range []string{"source", "version", "revision", "licenses"} {
		if config.Config.Labels["org.opencontainers.image."+label] == "" {
			t.Errorf("no label for %s", label)
		}
	}
	files := filesOf(t, img)
	programs := []string{"usr/bin/" + program}
	if program == Node {
		programs = append(programs, "usr/bin/"+Hook)
	}
	if mode := files["tmp/"]; mode != fs.ModeDir|fs.ModeSticky|0o777 {
		t.Errorf("/tmp is %v", mode)
	}
	for name, mode := range files {
		if mode&(fs.ModeSetuid|fs.ModeSetgid) != 0 || mode.Perm()&0o002 != 0 && mode.Type() != fs.ModeSymlink && name != "tmp/" {
			t.Errorf("/%s is %v", name, mode)
		}
		if slices.Contains([]string{"sh", "bash", "dash", "busybox"}, path.Base(name)) && !strings.HasSuffix(name, "/") {
			t.Errorf("there is a shell: /%s", name)
		}
		if strings.Contains("/"+name, "/bin/") && !strings.HasSuffix(name, "/") && !slices.Contains(programs, name) {
			t.Errorf("there is another program: /%s", name)
		}
	}
	for _, module := range []string{"", "std/", "github.com/spf13/cobra/", "k8s.io/client-go/"} {
		names := slices.Collect(maps.Keys(files))
		if !slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(n, "usr/share/doc/"+program+"/"+module+"LICENSE") }) {
			t.Errorf("the license of %q is not in the image", module)
		}
	}
	for _, name := range programs {
		if mode := files[name]; mode != 0o755 {
			t.Errorf("/%s is %v", name, mode)
		}
	}
	checkSBOM(t, read(t, dir, program+"-"+testStamp.Version+"-linux-"+runtime.GOARCH+".cdx.json"), b, program)

	if program != Control {
		return
	}
	// A static program runs without its image, too.
	out, err := exec.Command(extract(t, img, "usr/bin/"+program), "version", "-o", "json").Output()
	if err != nil {
		t.Fatal(err)
	}
	var about struct{ Version, Commit string }
	if err := json.Unmarshal(out, &about); err != nil || about.Version != testStamp.Version || about.Commit != testStamp.Commit {
		t.Errorf("the program says it is %+v, %v", about, err)
	}
}

// imageIn returns one architecture's image of a layout.
func imageIn(t *testing.T, path layout.Path, index, platform string) v1.Image {
	t.Helper()
	hash := func(text string) v1.Hash {
		h, err := v1.NewHash(text)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	whole, err := path.ImageIndex()
	if err != nil {
		t.Fatal(err)
	}
	all, err := whole.ImageIndex(hash(index))
	if err != nil {
		t.Fatal(err)
	}
	img, err := all.Image(hash(platform))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

func checkSBOM(t *testing.T, text string, b Built, program string) {
	t.Helper()
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(strings.NewReader(text), cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		t.Fatal(err)
	}
	if c := bom.Metadata.Component; c.Name != b.Name || c.Version != b.Tag || !strings.Contains(c.PackageURL, b.Platforms[runtime.GOARCH]) {
		t.Errorf("it describes %s %s, %s", c.Name, c.Version, c.PackageURL)
	}
	urls := map[string]bool{}
	for _, c := range *bom.Components {
		if c.PackageURL == "" || urls[c.PackageURL] {
			t.Errorf("component %s has no address of its own: %q", c.Name, c.PackageURL)
		}
		urls[c.PackageURL] = true
	}
	wants := []string{"pkg:golang/std@" + strings.TrimPrefix(runtime.Version(), "go"), "pkg:golang/github.com/spf13/cobra@",
		"pkg:golang/k8s.io/client-go@"}
	if program == Node {
		wants = append(wants, "pkg:golang/github.com/%21n%21v%21i%21d%21i%21a/go-nvml@|pkg:golang/github.com/NVIDIA/go-nvml@",
			"pkg:deb/debian/libc6@2.36-9?arch="+runtime.GOARCH+"&distro=debian-12&upstream=glibc")
	}
	for _, want := range wants {
		found := false
		for url := range urls {
			for alternative := range strings.SplitSeq(want, "|") {
				found = found || strings.HasPrefix(strings.ToLower(url), strings.ToLower(alternative))
			}
		}
		if !found {
			t.Errorf("%s is not among what %s is made of", want, program)
		}
	}
}

// checkPush pushes to a registry, and finds the images and their SBOMs there.
func checkPush(t *testing.T, dir string, built []Built) {
	t.Helper()
	server := httptest.NewServer(newRegistry())
	defer server.Close()
	to := strings.TrimPrefix(server.URL, "http://") + "/team"
	if got := valuesIn(t, dir); got != (imageValues{Registry, testStamp.Version}) {
		t.Errorf("before the push the values name %+v", got)
	}
	pushed, err := Push(t.Context(), PushOptions{Dir: dir, Registry: to + "/"})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := valuesIn(t, dir), (imageValues{to, testStamp.Version}); got != want || pushed.Registry != to || pushed.Tag != want.Tag {
		t.Errorf("the values name %+v and Push %s:%s, want %+v", got, pushed.Registry, pushed.Tag, want)
	}
	for i, b := range built {
		if want := to + "/" + Images[i] + "@" + b.Digest; pushed.References[i] != want {
			t.Errorf("pushed %s, want %s", pushed.References[i], want)
		}
		tag, err := name.ParseReference(to + "/" + Images[i] + ":" + pushed.Tag)
		if err != nil {
			t.Fatal(err)
		}
		index, err := remote.Index(tag)
		if err != nil {
			t.Fatal(err)
		}
		if digest, err := index.Digest(); err != nil || digest.String() != b.Digest {
			t.Errorf("the registry has %v, %v; want %s", digest, err, b.Digest)
		}
		listed, err := remote.Referrers(tag.Context().Digest(b.Platforms[runtime.GOARCH]))
		if err != nil {
			t.Fatal(err)
		}
		belongs, err := listed.IndexManifest()
		if err != nil || len(belongs.Manifests) != 1 {
			t.Fatalf("what belongs to %s: %+v, %v; want one document", Images[i], belongs, err)
		}
		document, err := remote.Get(tag.Context().Digest(belongs.Manifests[0].Digest.String()))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(document.Manifest, []byte(`"artifactType":"application/vnd.cyclonedx+json"`)) {
			t.Errorf("the document that belongs to %s is no SBOM: %s", Images[i], document.Manifest)
		}
	}
	checkRejectedPushes(t, dir)
}

// checkRejectedPushes: errors of registries say what to do.
func checkRejectedPushes(t *testing.T, dir string) {
	t.Helper()
	images := newRegistry()
	locked := func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "me" || password != "secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		images.ServeHTTP(w, r)
	}
	old := func(w http.ResponseWriter, r *http.Request) {
		content, err := io.ReadAll(r.Body)
		if r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/manifests/") &&
			(err != nil || bytes.Contains(content, []byte("cyclonedx"))) {
			http.Error(w, `{"errors":[{"code":"MANIFEST_INVALID","message":"unknown artifact"}]}`, http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(content))
		images.ServeHTTP(w, r)
	}
	private := httptest.NewServer(http.HandlerFunc(locked))
	defer private.Close()
	unknown := httptest.NewUnstartedServer(images)
	unknown.Config.ErrorLog = log.New(io.Discard, "", 0)
	unknown.StartTLS()
	defer unknown.Close()
	rejecting := httptest.NewServer(http.HandlerFunc(old))
	defer rejecting.Close()
	host := func(s *httptest.Server) string { _, host, _ := strings.Cut(s.URL, "//"); return host }
	t.Setenv("DOCKER_CONFIG", t.TempDir())

	for name, test := range map[string]struct {
		options PushOptions
		want    string
	}{
		"not built": {PushOptions{Dir: t.TempDir(), Registry: host(private)}, "run make images first"},
		"no login": {PushOptions{Dir: dir, Registry: host(private) + "/team"},
			"log in with an account that may push there: docker login " + host(private)},
		"unknown CA": {PushOptions{Dir: dir, Registry: host(unknown)}, "SSL_CERT_DIR"},
		"no name":    {PushOptions{Dir: dir, Registry: "Registry Of Mine"}, `push image divvy-node to "Registry Of Mine"`},
		"SBOM invalid": {PushOptions{Dir: dir, Registry: "http://" + host(rejecting)},
			"the images are pushed; the registry rejected their SBOMs"},
	} {
		_, err := Push(t.Context(), test.options)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
		var documents *SBOMError
		if got := errors.As(err, &documents); got != (name == "SBOM invalid") {
			t.Errorf("%s: an SBOMError: %t", name, got)
		}
	}
	if got, want := valuesIn(t, dir), (imageValues{host(rejecting), testStamp.Version}); got != want {
		t.Errorf("after a registry without SBOMs the values name %+v, want %+v", got, want)
	}

	login := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, host(private), base64.StdEncoding.EncodeToString([]byte("me:secret")))
	if err := os.WriteFile(filepath.Join(os.Getenv("DOCKER_CONFIG"), "config.json"), []byte(login), 0o600); err != nil {
		t.Fatal(err)
	}
	if pushed, err := Push(t.Context(), PushOptions{Dir: dir, Registry: host(private) + "/team", Tag: "v2"}); err != nil ||
		pushed.Tag != "v2" {
		t.Errorf("with docker's login: %+v, %v", pushed, err)
	}
}

func TestAdviceForARegistryWithoutTLS(t *testing.T) {
	repository, err := name.NewRepository("registry.example.com:5000/divvy")
	if err != nil {
		t.Fatal(err)
	}
	err = advise(errors.New("http: server gave HTTP response to HTTPS client"), repository.Registry)
	if !strings.Contains(err.Error(), "IMAGE_REPO=http://registry.example.com:5000/") {
		t.Errorf("got %v", err)
	}
	other := errors.New("connection refused")
	if err := advise(other, repository.Registry); !errors.Is(err, other) || err.Error() != other.Error() {
		t.Errorf("another error became %v", err)
	}
}

// newRegistry returns an empty registry.
func newRegistry() http.Handler {
	return registry.New(registry.WithReferrersSupport(true), registry.Logger(log.New(io.Discard, "", 0)))
}

// imageValues are what the values of the chart say of images.
type imageValues struct{ Registry, Tag string }

func valuesIn(t *testing.T, dir string) imageValues {
	t.Helper()
	var values struct{ Image imageValues }
	if err := yaml.UnmarshalStrict([]byte(read(t, dir, ValuesFile)), &values); err != nil {
		t.Fatal(err)
	}
	return values.Image
}

// TestTagFollowsContent: nodes would not pull a tag again that they have.
func TestTagFollowsContent(t *testing.T) {
	tag := func(version string, digest byte) string {
		var built []Built
		for _, image := range Images {
			built = append(built, Built{Name: Registry + "/" + image, Tag: version, Digest: "sha256:" + strings.Repeat(string(digest), 64)})
		}
		return defaultTag(built)
	}
	if got := tag("v1.2.3", 'a'); got != "v1.2.3" {
		t.Errorf("the tag of a commit is %s", got)
	}
	first, again, other := tag("0a1b2c3-dirty", 'a'), tag("0a1b2c3-dirty", 'a'), tag("0a1b2c3-dirty", 'b')
	if first != again || first == other || !strings.HasPrefix(first, "0a1b2c3-dirty-") {
		t.Errorf("the tags of changed checkouts are %s, %s with the same content and %s with other", first, again, other)
	}
}

func TestBuildImagesRefusesAVersionThatIsNoTag(t *testing.T) {
	_, err := BuildImages(t.Context(), ImageOptions{Stamp: Stamp{Version: "v1+build"}, Dir: filepath.Join(t.TempDir(), "x")})
	if err == nil || !strings.Contains(err.Error(), `"v1+build" cannot be an image's tag`) {
		t.Errorf("got %v", err)
	}
}

func read(t *testing.T, dir, name string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

// each calls visit for every file of an image.
func each(t *testing.T, img v1.Image, visit func(*tar.Header, io.Reader)) {
	t.Helper()
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range layers {
		content, err := l.Uncompressed()
		if err != nil {
			t.Fatal(err)
		}
		for r := tar.NewReader(content); ; {
			header, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			visit(header, r)
		}
	}
}

func filesOf(t *testing.T, img v1.Image) map[string]fs.FileMode {
	t.Helper()
	all := map[string]fs.FileMode{}
	each(t, img, func(h *tar.Header, _ io.Reader) { all[h.Name] = h.FileInfo().Mode() })
	return all
}

// extract writes a file of an image to disk and returns its path there.
func extract(t *testing.T, img v1.Image, file string) string {
	t.Helper()
	var content bytes.Buffer
	each(t, img, func(h *tar.Header, r io.Reader) {
		if h.Name == file {
			if _, err := io.Copy(&content, r); err != nil {
				t.Fatal(err)
			}
		}
	})
	path := filepath.Join(t.TempDir(), filepath.Base(file))
	if err := os.WriteFile(path, content.Bytes(), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}
