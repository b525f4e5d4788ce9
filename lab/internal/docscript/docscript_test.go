package docscript_test

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/lab/internal/docscript"
)

const page = `# A page

<!-- run: {page: bare, set: {NODE: lab-0, a.tar: /tmp/a.tar, d/: /tmp/d/}} -->
<!-- run: {after: echo first made} -->

1. In a list:

   ` + "```console" + `
   $ echo one NODE a.tar d/ aa.tar \
       two    # a note
   one NODE ...
   $ cat <<'EOF'
   $ not a command
   EOF
   ` + "```" + `

<!-- run: {before: "x=made", after: "echo last made"} -->
` + "```console" + `
$ echo $x NODES
` + "```" + `

<!-- run: {fails: true} -->
` + "```console" + `
$ true
$ false NODE
` + "```" + `

<!-- run: {by: TestX, why: "it needs two\nnodes"} -->
` + "```console" + `
$ exit 3
$ exit 4
` + "```" + `

<!-- run: {why: it needs a moon} -->
` + "```console" + `
$ exit 5
` + "```" + `

` + "```yaml" + `
make: something
` + "```" + `
`

func TestScript(t *testing.T) {
	p, err := docscript.Parse("page.md", []byte(page))
	if err != nil {
		t.Fatal(err)
	}
	if p.Lab != "bare" {
		t.Errorf("lab %q, want bare", p.Lab)
	}
	if here, elsewhere, nowhere := p.Runs(); here != 5 || elsewhere != 2 || nowhere != 1 {
		t.Errorf("%d commands here, %d elsewhere and %d nowhere, want 5, 2 and 1", here, elsewhere, nowhere)
	}
	out, err := exec.CommandContext(t.Context(), "bash", "-c", p.Script()).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	want := `
== page.md:9: echo one NODE a.tar d/ aa.tar \
    two    # a note
one lab-0 /tmp/a.tar /tmp/d/ aa.tar two

== page.md:12: cat <<'EOF'
$ not a command
EOF
$ not a command

== page.md:19: before

== page.md:19: echo $x NODES
made NODES

== page.md:24: true

== page.md:25: false NODE

== page.md: after
last made
first made
`
	if diff := cmp.Diff(want, string(out)); diff != "" {
		t.Errorf("output (-want +got):\n%s", diff)
	}
}

func TestBlocksOfAnotherRunner(t *testing.T) {
	p, err := docscript.Parse("page.md", []byte(page))
	if err != nil {
		t.Fatal(err)
	}
	part := p.Of("TestX")
	if here, elsewhere, _ := part.Runs(); here != 2 || elsewhere != 0 {
		t.Errorf("%d commands here and %d elsewhere, want 2 and 0", here, elsewhere)
	}
	out, err := exec.CommandContext(t.Context(), "bash", "-c", part.Script()).CombinedOutput()
	var exit *exec.ExitError
	if want := "\n== page.md:30: exit 3\n\n== page.md: after\n"; string(out) != want || !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("printed %q, %v; want %q and exit code 3", out, err, want)
	}
	if none, _, _ := p.Of("TestY").Runs(); none != 0 {
		t.Errorf("%d commands of a test that has none", none)
	}
}

func TestScriptStopsAtWhatFails(t *testing.T) {
	for name, text := range map[string]string{
		"a command":            "```console\n$ false\n$ echo gone on\n```\n",
		"in a pipe":            "```console\n$ false | cat\n$ echo gone on\n```\n",
		"a failure that works": "<!-- run: {fails: true} -->\n```console\n$ true\n```\n```console\n$ echo gone on\n```\n",
	} {
		t.Run(name, func(t *testing.T) {
			p, err := docscript.Parse("page.md", []byte("<!-- run: {after: echo cleaned} -->\n\n"+text))
			if err != nil {
				t.Fatal(err)
			}
			out, err := exec.CommandContext(t.Context(), "bash", "-c", p.Script()).CombinedOutput()
			if err == nil || strings.Contains(string(out), "\ngone on") || !strings.HasSuffix(string(out), "cleaned\n") {
				t.Errorf("error %v, output %s; want a failure at once, and the end of the page done", err, out)
			}
		})
	}
}

func TestBadPages(t *testing.T) {
	for name, test := range map[string]struct{ page, want string }{
		"an unknown key": {"<!-- run: {nod: a} -->\n", `page.md:1: a comment for running the page: error unmarshaling JSON`},
		"an unknown lab": {"<!-- run: {page: mine} -->\n",
			"page.md:1: page: mine: there is no such lab; there are bare, bare-vendors, installed and vendors"},
		"by without why":   {"<!-- run: {by: TestX} -->\n```console\n$ true\n```\n", "page.md:1: by needs why"},
		"no fence follows": {"\n<!-- run: {fails: true} -->\n\ntext\n", "page.md:2: no fence marked console follows this"},
		"no fence for a file": {"<!-- run: {file: a.txt} -->\n```console\n$ x\n```\n",
			"page.md:1: no fence that could show a.txt follows this"},
		"no command":        {"```console\nplain output\n```\n", `page.md:2: no line of this fence begins with "$ "`},
		"an unmarked fence": {"```\noutput\nkubectl get pods\n```\n", "page.md:3: a command in a fence that is not marked console"},
		"two before a fence": {"<!-- run: {fails: true} -->\n\n<!-- run: {before: x} -->\n```console\n$ x\n```\n",
			"page.md:1: no fence marked console follows this"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := docscript.Parse("page.md", []byte(test.page))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q in it", err, test.want)
			}
		})
	}
}
