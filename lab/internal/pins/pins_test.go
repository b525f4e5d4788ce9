package pins

import (
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"sigs.k8s.io/yaml"
)

const root = "../../.."

// TestEveryReferenceIsPinnedOrListed: a new base image or action does not come
// unnoticed, and the list has nothing that is pinned or gone.
func TestEveryReferenceIsPinnedOrListed(t *testing.T) {
	references, err := Find(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(references) < 4 {
		t.Errorf("found %v", references)
	}
	listed, err := os.ReadFile(filepath.Join(root, UnpinnedFile))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(list(references)), string(listed)); diff != "" {
		t.Errorf("%s is not what the files need (-want +file); pin the reference (make pin) or list it:\n%s", UnpinnedFile, diff)
	}
}

// job is one of a workflow.
type job struct {
	Permissions any
	Steps       []struct{ Uses string }
	Uses        string
}

// writes reports whether permissions allow to write anything.
func writes(permissions any) bool {
	switch p := permissions.(type) {
	case string:
		return p == "write-all"
	case map[string]any:
		for _, access := range p {
			if access == "write" {
				return true
			}
		}
	}
	return false
}

// TestJobsThatMayWriteRunOnlyPinnedActions: an action whose tag is moved gets no
// token that can change the repository, its releases or its packages.
func TestJobsThatMayWriteRunOnlyPinnedActions(t *testing.T) {
	workflows, err := filepath.Glob(filepath.Join(root, ".github", "workflows", "*.yaml"))
	if err != nil || len(workflows) == 0 {
		t.Fatal(workflows, err)
	}
	mayWrite := 0
	for _, path := range workflows {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var workflow struct {
			Permissions any
			Jobs        map[string]job
		}
		if err := yaml.Unmarshal(content, &workflow); err != nil {
			t.Fatal(err)
		}
		if workflow.Permissions == nil || writes(workflow.Permissions) {
			t.Errorf("%s: permissions are %v for all jobs; let single jobs write", filepath.Base(path), workflow.Permissions)
		}
		for name, j := range workflow.Jobs {
			if !writes(j.Permissions) {
				continue
			}
			mayWrite++
			for _, step := range j.Steps {
				if _, version, _ := strings.Cut(step.Uses, "@"); step.Uses != "" && !commit.MatchString(version) {
					t.Errorf("%s: job %s may write and runs %s, which is not pinned to a commit", filepath.Base(path), name, step.Uses)
				}
			}
		}
	}
	if mayWrite == 0 {
		t.Error("no job may write; the one that publishes has to")
	}
}

const dockerfile = `# syntax=docker/dockerfile:1
FROM --platform=$BUILDPLATFORM HOST/golang:1.26 AS sources
FROM sources AS build
COPY --from=build /a /b
COPY --from=HOST/other:2 /a /b
FROM scratch AS control
FROM HOST/base@sha256:1111111111111111111111111111111111111111111111111111111111111111 AS node
`

const workflow = `jobs:
  a:
    uses: ./.github/workflows/ci.yaml
  b:
    steps:
    - uses: owner/repo@v2
    - name: in a folder
      uses: owner/repo/sub@v2
    - uses: owner/done@2222222222222222222222222222222222222222 # v7
`

func TestFindReportsWhatItCannotRead(t *testing.T) {
	for text, want := range map[string]string{
		"FROM a@sha256:12": "no digest",
		"    - uses: a/b@2222222222222222222222222222222222222222": "needs its tag as a comment",
		"    - uses: a/b":              "has no version",
		"    - {uses: a/b@v1}":         "not looked for",
		"    container: golang:1":      "not looked for",
		"      image: postgres:1":      "not looked for",
		"    - uses: \"a/b@v1\" # x y": "not looked for",
	} {
		_, err := inFile(".github/workflows/x.yaml", text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// TestPin resolves images of a registry and actions of a repository, and writes them.
func TestPin(t *testing.T) {
	dir := t.TempDir()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	push := func(reference string, platforms ...string) string {
		t.Helper()
		var index v1.ImageIndex = empty.Index
		for _, p := range platforms {
			img, err := random.Image(10, 1)
			if err != nil {
				t.Fatal(err)
			}
			platform, err := v1.ParsePlatform(p)
			if err != nil {
				t.Fatal(err)
			}
			index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: platform}})
		}
		tag, err := name.ParseReference(reference)
		if err != nil {
			t.Fatal(err)
		}
		if err := remote.WriteIndex(tag, index); err != nil {
			t.Fatal(err)
		}
		d, err := index.Digest()
		if err != nil {
			t.Fatal(err)
		}
		return d.String()
	}
	golang := push(host+"/golang:1.26", "linux/amd64", "linux/arm64")
	other := push(host+"/other:2", "linux/amd64", "linux/arm64")
	push(host+"/small:1", "linux/amd64")
	action := repository(t, filepath.Join(dir, "git", "owner", "repo"))

	write := func(file, content string) {
		t.Helper()
		path := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_, mine, _ := strings.Cut(dockerfile, "\n") // the first image is elsewhere
	mine = strings.ReplaceAll(mine, "HOST", host)
	write("build/Dockerfile", mine)
	write(".github/workflows/x.yaml", workflow)
	resolver := Resolver{Git: "file://" + filepath.Join(dir, "git"), Platforms: []string{"linux/amd64", "linux/arm64"}}
	references, err := Find(dir)
	if err != nil {
		t.Fatal(err)
	}
	var unpinned []string
	for _, r := range references {
		if r.Pin == "" {
			unpinned = append(unpinned, r.String())
		}
	}
	if want := []string{"image " + host + "/golang:1.26", "image " + host + "/other:2", "action owner/repo@v2",
		"action owner/repo/sub@v2"}; !slices.Equal(unpinned, want) {
		t.Errorf("found %q without a pin, want %q", unpinned, want)
	}
	resolved, err := resolver.Resolve(t.Context(), references)
	if err != nil {
		t.Fatal(err)
	}
	if err := Write(dir, resolved); err != nil {
		t.Fatal(err)
	}
	want := strings.NewReplacer("golang:1.26", "golang:1.26@"+golang, "other:2", "other:2@"+other).Replace(mine)
	if diff := cmp.Diff(want, read(t, dir, "build/Dockerfile")); diff != "" {
		t.Errorf("Dockerfile (-want +got):\n%s", diff)
	}
	want = strings.NewReplacer("repo@v2", "repo@"+action+" # v2", "sub@v2", "sub@"+action+" # v2").Replace(workflow)
	if diff := cmp.Diff(want, read(t, dir, ".github/workflows/x.yaml")); diff != "" {
		t.Errorf("workflow (-want +got):\n%s", diff)
	}
	if got := read(t, dir, UnpinnedFile); got != listHeader {
		t.Errorf("%s has\n%s", UnpinnedFile, got)
	}
	again, err := Find(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(resolved, again); diff != "" {
		t.Errorf("read again (-written +read):\n%s", diff)
	}
	if record := string(Record(again)); !strings.Contains(record, "action owner/repo@v2 "+action+"\n") ||
		!strings.Contains(record, "image "+host+"/golang:1.26 "+golang+"\n") {
		t.Errorf("recorded\n%s", record)
	}

	for text, want := range map[string]string{
		"FROM " + host + "/small:1":    "has no image for linux/arm64",
		"FROM " + host + "/missing:1":  "resolve image " + host + "/missing:1",
		"    - uses: owner/repo@v3":    "resolve action owner/repo@v3",
		"    - uses: owner/repo/no@v2": "has no action",
	} {
		found, err := inFile("x", text)
		if err != nil || len(found) != 1 {
			t.Fatalf("%s: %v, %v", text, found, err)
		}
		if _, err := resolver.Resolve(t.Context(), found); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// repository makes a repository with an action, one more in a folder, and an
// annotated tag v2. It returns the commit.
func repository(t *testing.T, dir string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(dir, "sub"), 0o750); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"action.yml", "sub/action.yaml"} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte("name: x\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var out []byte
	for _, args := range [][]string{
		{"init", "--quiet"},
		{"add", "."},
		{"-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "--quiet", "-m", "x"},
		{"-c", "user.name=t", "-c", "user.email=t@example.com", "tag", "-a", "-m", "x", "v2"},
		{"rev-parse", "HEAD"},
	} {
		cmd := exec.Command("git", append([]string{"-C", dir}, args...)...)
		var err error
		if out, err = cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	return strings.TrimSpace(string(out))
}

func read(t *testing.T, dir, file string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}
