package docscript_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/lab/internal/docscript"
)

// TestOutput compares what a command prints with what a page shows below it.
func TestOutput(t *testing.T) {
	for name, test := range map[string]struct {
		shown, printed string
		differs        bool
	}{
		"nothing is shown":             {shown: "", printed: "anything"},
		"equal":                        {shown: "one\ntwo", printed: "one\ntwo\n"},
		"other text":                   {shown: "one\ntwo", printed: "one\ntoo\n", differs: true},
		"nothing is printed":           {shown: "one", printed: "", differs: true},
		"a line more":                  {shown: "one", printed: "one\ntwo\n", differs: true},
		"a line less":                  {shown: "one\ntwo", printed: "two\n", differs: true},
		"more in the line":             {shown: "one", printed: "one two\n", differs: true},
		"no special characters":        {shown: "a.c (b)", printed: "abc (b)\n", differs: true},
		"empty lines around":           {shown: "\none\n\n", printed: "\n\none\n\n\n"},
		"an empty line within":         {shown: "one\n\ntwo", printed: "one\ntwo\n", differs: true},
		"lines left out":               {shown: "one\n...\nfive", printed: "one\ntwo\nthree\nfour\nfive\n"},
		"no lines to leave out":        {shown: "one\n...\ntwo", printed: "one\ntwo\n"},
		"lines left out at the end":    {shown: "one\n...", printed: "one\ntwo\n"},
		"an end that is missing":       {shown: "one\n...\nfive", printed: "one\ntwo\nthree\n", differs: true},
		"the first of two is too late": {shown: "...\ntwo\none", printed: "one\ntwo\none\n"},
		"the wrong order":              {shown: "...\ntwo\n...\none\n...", printed: "one\ntwo\nthree\n", differs: true},
		"the rest of a line left out":  {shown: "one ...", printed: "one two three\n"},
		"the middle of a line":         {shown: "one ... three", printed: "one two three\n"},
		"a line that begins otherwise": {shown: "one ...", printed: "two one three\n", differs: true},

		"the width of columns":   {shown: "NAME   AGE\na      1m", printed: "NAME        AGE   \na           3d\n"},
		"the depth of a line":    {shown: "  name: a", printed: "    name: a\n", differs: true},
		"spaces that are needed": {shown: "one two", printed: "onetwo\n", differs: true},

		"ages":                    {shown: "a 13d\nb 2m3s", printed: "a 5s\nb 7h\n"},
		"a number that is no age": {shown: "a 13", printed: "a 14\n", differs: true},
		"durations":               {shown: "0.3 s, 8 ms", printed: "12.25 s, 4500 ms\n"},
		"times": {shown: "2022-09-06T07:40:43Z until 2027-09-17",
			printed: "2026-01-02T03:04:05.678Z until 2026-12-31\n"},
		"no time": {shown: "2022-09-06T07:40:43Z", printed: "yesterday\n", differs: true},
		"UIDs": {shown: `"uid": "2713cdab-6ec7-40be-a0e6-bf144efb0098"`,
			printed: "\"uid\": \"00000000-0000-4000-8000-000000000000\"\n"},
		"short UIDs": {shown: `["GPU-1f0c...","GPU-9ab2…"]`, printed: `["GPU-3b1f0e52-0000-4000-8000-000000000000","GPU-0"]` +
			"\n"},
		"another list": {shown: `["GPU-1f0c..."]`, printed: `["GPU-1","GPU-2"]` + "\n", differs: true},
		"digests":      {shown: "sha256:" + strings.Repeat("0a", 32), printed: "sha256:" + strings.Repeat("f1", 32) + "\n"},
		"addresses":    {shown: "10.202.122.248:56001", printed: "127.0.0.1:56001\n"},
		"ports":        {shown: "10.202.122.248:56001", printed: "10.202.122.248:56002\n", differs: true},
		"versions":     {shown: "v1.37.1 v0.1.0", printed: "v1.37.0-beta.1 0a1b2c3d4e5f-dirty\n"},
		"a version before a stop": {shown: "Kubernetes v1.37.1, Divvy v0.1.0.",
			printed: "Kubernetes v1.30.0+k3s1, Divvy 0a1b2c3-dirty.\n"},
		"names of a DaemonSet":     {shown: "divvy-node-7xk2p Running", printed: "divvy-node-bcdfg Running\n"},
		"names of a Deployment":    {shown: "divvy-extender-6d5c8b7f9c-x2x4z", printed: "divvy-extender-bcdfg24567-bcdfg\n"},
		"names of another":         {shown: "divvy-node-7xk2p", printed: "divvy-pool-7xk2p\n", differs: true},
		"names that are written":   {shown: "gcushare-pod-1", printed: "gcushare-pod-2\n", differs: true},
		"the page's word":          {shown: "NODE divvy-node", printed: "lab-0 divvy-node\n"},
		"the word in a heading":    {shown: "NODE  READY", printed: "NODE    READY\n"},
		"neither word nor meaning": {shown: "NODE ready", printed: "lab-1 ready\n", differs: true},
	} {
		t.Run(name, func(t *testing.T) {
			page := "<!-- run: {set: {NODE: lab-0}} -->\n```console\n$ show\n" + test.shown + "\n```\n"
			p, err := docscript.Parse("page.md", []byte(page))
			if err != nil {
				t.Fatal(err)
			}
			if err := p.CheckOutput(p.Blocks[0].Commands[0], test.printed); (err != nil) != test.differs {
				t.Errorf("error %v, want one: %t", err, test.differs)
			}
		})
	}
}

// TestWrongOutput runs a page that shows what its commands do not print.
func TestWrongOutput(t *testing.T) {
	p, err := docscript.Parse("page.md", []byte(`# A page

`+"```console"+`
$ printf 'one\ntwo'
one
...
$ printf '%s\n' a b c d
a
x
...
d
$ printf '{"a":1}'

{"a":2}
`+"```"+`
`))
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "bash", "-c", p.Script()).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	want := `page.md:7: printf '%s\n' a b c d: the page shows (-), the command printed (+):
  a
- x
  ...
  d
page.md:12: printf '{"a":1}': the page shows (-), the command printed (+):
- {"a":2}
+ {"a":1}`
	err = p.Check(string(out))
	if err == nil {
		t.Fatal("no error")
	}
	if diff := cmp.Diff(want, err.Error()); diff != "" {
		t.Errorf("error (-want +got):\n%s", diff)
	}
	if err := p.Check("nothing"); err == nil || !strings.Contains(err.Error(), "page.md:4: the command did not run: printf") {
		t.Errorf("error %v for a page that did not run", err)
	}
}

// TestExcerpt compares a fence with the file that it shows.
func TestExcerpt(t *testing.T) {
	p, err := docscript.Parse("page.md", []byte("<!-- run: {file: a.txt} -->\n```\none\n...\n  three\n```\n\n```\nno file\n```\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []docscript.Excerpt{{Line: 3, Shown: []string{"one", "...", "  three"}, File: "a.txt"}}
	if diff := cmp.Diff(want, p.Excerpts); diff != "" {
		t.Fatalf("excerpts (-want +got):\n%s", diff)
	}
	if err := p.CheckFile(want[0], "one\ntwo\n  three\n"); err != nil {
		t.Error(err)
	}
	const diff = "page.md:3: the page shows (-), a.txt has (+):\n  one\n  ...\n-   three"
	if err := p.CheckFile(want[0], "one\n  four\n"); err == nil || err.Error() != diff {
		t.Errorf("error %v, want %s", err, diff)
	}
}
