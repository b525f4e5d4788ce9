package release

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"mvdan.cc/sh/v3/expand"
	"mvdan.cc/sh/v3/syntax"
)

var repository = filepath.Join("..", "..", "..")

// testStamp is what the tests build with.
var testStamp = Stamp{Version: "v9.8.7", Commit: "abcdef012345"}

// compilation is one call of "go build": what it is told, without where to put
// the programs and for which platform.
type compilation struct{ Environment, Flags []string }

// TestProgramsAreCompiledTheSameWayEverywhere compares the three places that say
// how: this package, the Makefile and the Dockerfile.
func TestProgramsAreCompiledTheSameWayEverywhere(t *testing.T) {
	want := map[string]compilation{}
	for program := range recipes {
		env, args := testStamp.command(program, "/out", Linux("amd64"))
		maps.Copy(want, compilations(t, append(env, append([]string{"go"}, args...)...)))
	}

	cmd := exec.Command("make", "-n", "build", "build-schedulers", "VERSION="+testStamp.Version, "COMMIT="+testStamp.Commit)
	cmd.Dir = repository
	// Where make itself runs this test, its own flags are not meant.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS") })
	script, err := cmd.Output()
	if err != nil {
		t.Fatalf("make -n build: %v", err)
	}
	if diff := cmp.Diff(want, fromScript(t, string(script))); diff != "" {
		t.Errorf("the Makefile compiles otherwise than this package (-package +Makefile):\n%s", diff)
	}

	inDocker := map[string]compilation{}
	for _, s := range stages(t) {
		for _, run := range s.runs {
			maps.Copy(inDocker, fromScript(t, run))
		}
	}
	delete(want, Kubectl) // has no image
	if diff := cmp.Diff(want, inDocker); diff != "" {
		t.Errorf("the Dockerfile compiles otherwise than this package (-package +Dockerfile):\n%s", diff)
	}
}

// TestSchedulersAreOfTheirMinor: the version that is written into a scheduler is that of the
// Kubernetes that its module has.
func TestSchedulersAreOfTheirMinor(t *testing.T) {
	for _, name := range Schedulers {
		r := recipes[name]
		content, err := os.ReadFile(filepath.Join(repository, r.folder, "go.mod"))
		if err != nil {
			t.Fatal(err)
		}
		minor := strings.TrimPrefix(name, "divvy-scheduler-")
		has := regexp.MustCompile(`(?m)k8s\.io/kubernetes (=> k8s\.io/kubernetes )?` + regexp.QuoteMeta(r.kubernetes) + `( |$)`)
		if !strings.HasPrefix(r.kubernetes, "v"+minor+".") || !has.Match(content) {
			t.Errorf("%s is built as %s, which is not what %s/go.mod has", name, r.kubernetes, r.folder)
		}
	}
}

// TestImagesAreTheSameFromDocker compares what the Dockerfile and ImageSpec say of
// the images.
func TestImagesAreTheSameFromDocker(t *testing.T) {
	for _, name := range slices.Concat(Images, Schedulers) {
		spec := ImageSpec(name, "file", nil, testStamp)
		s, found := stages(t)[name]
		if !found {
			t.Errorf("the Dockerfile has no target %s", name)
			continue
		}
		got := described{User: s.one("USER"), Entrypoint: s.list("ENTRYPOINT"), Environment: s.pairs(t, "ENV"), Labels: s.pairs(t, "LABEL")}
		want := described{User: spec.User, Entrypoint: spec.Entrypoint, Environment: map[string]string{}, Labels: spec.Labels}
		for _, e := range spec.Env {
			name, value, _ := strings.Cut(e, "=")
			want.Environment[name] = value
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("image %s from docker is another (-make images +Dockerfile):\n%s", name, diff)
		}
		if name == Node && !strings.HasSuffix(strings.Split(s.from, "@")[0], "-debian"+debianVersion) {
			t.Errorf("the Dockerfile takes %s, and make images the libraries of Debian %s", s.from, debianVersion)
		}
	}
}

type described struct {
	User                string
	Entrypoint          []string
	Environment, Labels map[string]string
}

// stage is one of the Dockerfile, by its name.
type stage struct {
	from         string
	runs         []string
	instructions []*parser.Node
}

func (s stage) one(instruction string) string { return strings.Join(s.list(instruction), " ") }

// list returns the words of the last such instruction.
func (s stage) list(instruction string) []string {
	var words []string
	for _, n := range s.instructions {
		if strings.EqualFold(n.Value, instruction) {
			words = nil
			for w := n.Next; w != nil; w = w.Next {
				words = append(words, w.Value)
			}
		}
	}
	return words
}

// pairs returns the names and values of such instructions.
func (s stage) pairs(t *testing.T, instruction string) map[string]string {
	t.Helper()
	all := map[string]string{}
	words := s.list(instruction) // name, value, "=", and so on
	for i := 0; i+1 < len(words); i += 3 {
		value, err := expand.Literal(environment(), parseWord(t, words[i+1]))
		if err != nil {
			t.Fatal(err)
		}
		all[words[i]] = value
	}
	return all
}

func stages(t *testing.T) map[string]stage {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(repository, "build", "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := parser.Parse(bytes.NewReader(content))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]stage{}
	var name string
	for _, n := range parsed.AST.Children {
		s := all[name]
		switch strings.ToUpper(n.Value) {
		case "FROM":
			// FROM image AS name
			name = n.Next.Next.Next.Value
			s = stage{from: n.Next.Value}
		case "RUN":
			s.runs = append(s.runs, n.Next.Value)
		}
		s.instructions = append(s.instructions, n)
		all[name] = s
	}
	return all
}

func environment() *expand.Config {
	return &expand.Config{Env: expand.ListEnviron("VERSION="+testStamp.Version, "COMMIT="+testStamp.Commit,
		"TARGETOS=linux", "TARGETARCH=amd64")}
}

func parseWord(t *testing.T, text string) *syntax.Word {
	t.Helper()
	for word, err := range syntax.NewParser().WordsSeq(strings.NewReader(text)) {
		if err != nil {
			t.Fatalf("parse %q: %v", text, err)
		}
		return word
	}
	return &syntax.Word{}
}

// fromScript returns the calls of "go build" in a shell script.
func fromScript(t *testing.T, script string) map[string]compilation {
	t.Helper()
	file, err := syntax.NewParser().Parse(strings.NewReader(script), "")
	if err != nil {
		t.Fatalf("parse %q: %v", script, err)
	}
	all := map[string]compilation{}
	syntax.Walk(file, func(n syntax.Node) bool {
		call, isCall := n.(*syntax.CallExpr)
		if !isCall {
			return true
		}
		var words []string
		for _, a := range call.Assigns {
			if a.Value == nil {
				continue
			}
			value, err := expand.Literal(environment(), a.Value)
			if err != nil {
				t.Fatal(err)
			}
			words = append(words, a.Name.Value+"="+value)
		}
		args, err := expand.Fields(environment(), call.Args...)
		if err != nil {
			t.Fatal(err)
		}
		maps.Copy(all, compilations(t, append(words, args...)))
		return true
	})
	return all
}

// compilations reads a command with its environment before it, and returns one
// compilation for each program; none where it is another command than "go build".
func compilations(t *testing.T, words []string) map[string]compilation {
	t.Helper()
	i := slices.Index(words, "go")
	if i < 0 || len(words) < i+2 || words[i+1] != "build" {
		return nil
	}
	environment := map[string]string{}
	for _, word := range words[:i] {
		name, value, _ := strings.Cut(word, "=")
		environment[name] = value
	}
	var c compilation
	// The package sets more, which holds where nothing is said.
	for _, name := range []string{"CGO_CFLAGS", "CGO_ENABLED"} {
		if value, set := environment[name]; set {
			c.Environment = append(c.Environment, fmt.Sprintf("%s=%s", name, value))
		}
	}
	all := map[string]compilation{}
	var programs []string
	var out string
	for rest := words[i+2:]; len(rest) > 0; rest = rest[1:] {
		switch {
		case rest[0] == "-o":
			rest = rest[1:]
			out = rest[0]
		case rest[0] == ".": // of a module of its own
			programs = append(programs, filepath.Base(out))
		case strings.HasPrefix(rest[0], "./cmd/"):
			programs = append(programs, filepath.Base(rest[0]))
		default:
			c.Flags = append(c.Flags, rest[0])
		}
	}
	if len(programs) == 0 {
		t.Errorf("%q compiles no program", words)
	}
	for _, p := range programs {
		all[p] = c
	}
	return all
}
