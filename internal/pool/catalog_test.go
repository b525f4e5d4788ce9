package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The catalog of the guides has these folders and no other.
func TestDefaultCatalog(t *testing.T) {
	c, err := DecodeCatalog(DefaultCatalogYAML())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c, DefaultCatalog()); diff != "" {
		t.Error(diff)
	}
	const libraries = "/opt/bitfusion/lib/x86_64-linux-gnu/bitfusion/lib/"
	const libraries2 = "/opt/bitfusion/lib/x86_64-linux-gnu/lib/"
	rows := []struct{ version, os, folder, libraries string }{
		{"450", "ubuntu18", "bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb", libraries},
		{"450", "ubuntu20", "bitfusion-client-ubuntu2004_4.5.0-4_amd64.deb", libraries},
		{"450", "centos7", "bitfusion-client-centos7-4.5.0-4.x86_64.rpm", libraries},
		{"450", "centos8", "bitfusion-client-centos8-4.5.0-4.x86_64.rpm", libraries},
		{"401", "ubuntu18", "bitfusion-client-ubuntu1804_4.0.1-5_amd64.deb", libraries},
		{"401", "ubuntu20", "bitfusion-client-ubuntu2004_4.0.1-5_amd64.deb", libraries},
		{"401", "centos7", "bitfusion-client-centos7-4.0.1-5.x86_64.rpm", libraries},
		{"401", "centos8", "bitfusion-client-centos8-4.0.1-5.x86_64.rpm", libraries},
		{"350", "ubuntu18", "bitfusion-client-ubuntu1804_3.5.0-5_amd64.deb", libraries},
		{"350", "ubuntu20", "bitfusion-client-ubuntu2004_3.5.0-5_amd64.deb", libraries},
		{"350", "centos7", "bitfusion-client-centos7-3.5.0-5.x86_64.rpm", libraries},
		{"350", "centos8", "bitfusion-client-centos8-3.5.0-5.x86_64.rpm", libraries},
		{"250", "ubuntu18", "bitfusion-client-ubuntu1804_2.5.1-13", libraries2},
		{"250", "ubuntu20", "bitfusion-client-ubuntu2004_2.5.1-13", libraries2},
		{"250", "centos7", "bitfusion-client-centos7-2.5.0-10", libraries2},
		{"250", "centos8", "bitfusion-client-centos8-2.5.1-13", libraries2},
	}
	if len(c.Clients) != len(rows) {
		t.Errorf("%d clients, want %d", len(c.Clients), len(rows))
	}
	for _, row := range rows {
		got, err := c.Find(row.version, row.os)
		if err != nil {
			t.Error(err)
			continue
		}
		root := "/bitfusion/" + row.folder
		want := &Client{
			Version: row.version, OS: row.os, Root: root, Binary: root + "/usr/bin/bitfusion", LibraryPath: root + row.libraries,
			OptSource: root + "/opt/bitfusion", SingleSecret: row.version == "250",
			Command: CommandForm{
				Shell: "/bin/bash", Percent: []string{"run", "-n", "${amount}", "-p", "${fraction}"},
				Memory: []string{"run", "-n", "${amount}", "-m", "${megabytes}"},
			},
		}
		if row.version == "250" {
			want.Image = "docker.io/bitfusiondeviceplugin/bitfusion-client:0.1.1"
		} else {
			want.Command.Separator, want.Command.Padded = []string{"--"}, true
		}
		if row.version >= "400" {
			want.Command.Filter = []string{"--filter", "${filter}"}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s %s: %s", row.version, row.os, diff)
		}
	}
	DefaultCatalogYAML()[0] = 'x'
	if DefaultCatalogYAML()[0] == 'x' {
		t.Error("a caller can change the text for others")
	}
}

// Guards W22: a pod that does not say is told what to add.
func TestClientsThatAreNotFound(t *testing.T) {
	c := DefaultCatalog()
	withDefaults := *c
	withDefaults.DefaultOS, withDefaults.DefaultVersion = "ubuntu20", "401"
	half := *c
	half.DefaultOS = "centos7"
	for _, tt := range []struct {
		catalog           *Catalog
		version, os, want string
	}{
		{c, "", "", "the pod does not select a client; add the annotations bitfusion-client/version (450, 401, 350, 250) and " +
			"bitfusion-client/os (ubuntu18, ubuntu20, centos7, centos8)"},
		{c, "450", "", "the pod does not select a client; add the annotation bitfusion-client/os (ubuntu18, ubuntu20, centos7, centos8)"},
		{c, "", "ubuntu18", "the pod does not select a client; add the annotation bitfusion-client/version (450, 401, 350, 250)"},
		{c, "451", "ubuntu18", `annotation bitfusion-client/version: unknown client "451"; use one of 450, 401, 350, 250`},
		{c, "450", "Ubuntu18", `annotation bitfusion-client/os: no client for "Ubuntu18"; use one of ubuntu18, ubuntu20, centos7, centos8`},
		{&half, "", "", "add the annotation bitfusion-client/version (450"},
		{&Catalog{}, "1", "2", `unknown client "1"; use one of none`},
		{&Catalog{}, "", "", "version (none) and"},
		{&Catalog{Clients: []Client{{Version: "1", OS: "a"}, {Version: "2", OS: "b"}}},
			"1", "b", `no client "1" for "b"; client 1 exists for a, and for b there are clients 2`},
	} {
		got, err := tt.catalog.Find(tt.version, tt.os)
		if err == nil || got != nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q %q: %v and %v, want %q", tt.version, tt.os, got, err, tt.want)
		}
	}
	for _, tt := range []struct{ version, os, wantVersion, wantOS string }{
		{"", "", "401", "ubuntu20"}, {"450", "", "450", "ubuntu20"}, {"", "centos8", "401", "centos8"},
		{"250", "centos7", "250", "centos7"},
	} {
		if got, err := withDefaults.Find(tt.version, tt.os); err != nil || got.Version != tt.wantVersion || got.OS != tt.wantOS {
			t.Errorf("%q %q with defaults: %+v and %v", tt.version, tt.os, got, err)
		}
	}
}

const head = "apiVersion: pool.divvy.dev/v1alpha1\nkind: ClientCatalog\n"

func TestPresentForm(t *testing.T) {
	c, err := DecodeCatalog([]byte(head + `
defaults: {version: 450, os: ubuntu18}
clients:
- &first
  version: 450 # a number is taken as it is written
  os: ubuntu18
  image: registry.example:5000/clients/bitfusion@sha256:0123
  root: /bitfusion/a/
  command: bitfusion
- version: "4.10"
  os: any
  root: /bitfusion/b
  binary: /bitfusion/b/bin/gpurun
  libraryPath: /bitfusion/b/lib:/opt/bitfusion/lib:/bitfusion/b/lib64/
  optSource: /bitfusion/b/share
  singleSecret: true
  command:
    shell: /bin/sh
    percent: [attach, "--gpus=${amount}", "--share=${percent}", "${fraction}/${units}"]
    memory: ["${amount}x${megabytes}", 7]
    filter: [--where, "${filter}"]
    separator: [--, run]
- version: "1"
  os: any
  root: /bitfusion/c
  command: bitfusion-2
  libraryPath: ""
  optSource: ""
  singleSecret: false
- version: "2"
  os: any
  root: /bitfusion/d
  binary: /bitfusion/d/x
  command: {percent: [a]}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := &Catalog{DefaultVersion: "450", DefaultOS: "ubuntu18", Clients: []Client{
		{
			Version: "450", OS: "ubuntu18", Image: "registry.example:5000/clients/bitfusion@sha256:0123", Root: "/bitfusion/a",
			Binary: "/bitfusion/a/usr/bin/bitfusion", LibraryPath: "/bitfusion/a/opt/bitfusion/lib/x86_64-linux-gnu/bitfusion/lib/",
			OptSource: "/bitfusion/a/opt/bitfusion", Command: namedForm("bitfusion"),
		},
		{
			Version: "4.10", OS: "any", Root: "/bitfusion/b", Binary: "/bitfusion/b/bin/gpurun",
			LibraryPath: "/bitfusion/b/lib:/opt/bitfusion/lib:/bitfusion/b/lib64/", OptSource: "/bitfusion/b/share", SingleSecret: true,
			Command: CommandForm{
				Shell: "/bin/sh", Percent: []string{"attach", "--gpus=${amount}", "--share=${percent}", "${fraction}/${units}"},
				Memory: []string{"${amount}x${megabytes}", "7"}, Filter: []string{"--where", "${filter}"}, Separator: []string{"--", "run"},
			},
		},
		{Version: "1", OS: "any", Root: "/bitfusion/c", Binary: "/bitfusion/c/usr/bin/bitfusion", Command: namedForm("bitfusion-2")},
		{Version: "2", OS: "any", Root: "/bitfusion/d", Binary: "/bitfusion/d/x", Command: CommandForm{Percent: []string{"a"}}},
	}}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Error(diff)
	}
}

// Tables as the original's releases shipped them. Guards W25 and W26: no row makes
// the program panic, and % in a path means nothing.
func TestTableOfTheOriginal(t *testing.T) {
	c, err := DecodeCatalog([]byte(`
BitfusionClients:
  - BitfusionVersion: "450"
    OSVersion: "ubuntu18"
    BinaryPath: "/bitfusion/bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb/usr/bin/bitfusion"
    EnvVariable: "/bitfusion/bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb/opt/bitfusion/lib/x86_64-linux-gnu/bitfusion/lib/"
  - BitfusionVersion: "350"
    OSVersion: "centos7"
    BinaryPath: "/bitfusion/bitfusion-client-centos7-3.5.0-5.x86_64.rpm/usr/bin/bitfusion"
    EnvVariable: "/bitfusion/bitfusion-client-centos7-3.5.0-5.x86_64.rpm/opt/bitfusion/lib/x86_64-linux-gnu/bitfusion/lib/"
  - BitfusionVersion: 250
    OSVersion: "ubuntu18"
    BinaryPath: "/bitfusion/bitfusion-client-ubuntu1804_2.5.1-13/usr/bin/bitfusion"
    EnvVariable: "/bitfusion/bitfusion-client-ubuntu1804_2.5.1-13/opt/bitfusion/lib/x86_64-linux-gnu/lib/:$LD_LIBRARY_PATH"
  - {BitfusionVersion: "own", OSVersion: "any", BinaryPath: "/bitfusion/no%sopt/bitfusion", EnvVariable: ""}
  - {BitfusionVersion: "own2", OSVersion: "any", BinaryPath: "/bitfusion/x/bin/bitfusion",
    EnvVariable: "/bitfusion/x/lib:/bitfusion/x/opt/bitfusion/lib:${LD_LIBRARY_PATH}"}
  - {BitfusionVersion: "own3", OSVersion: "any", BinaryPath: "/bitfusion/x/bin/bitfusion", EnvVariable: "/opt/bitfusion/lib"}
`))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ version, os string }{{"450", "ubuntu18"}, {"350", "centos7"}, {"250", "ubuntu18"}} {
		got, err := c.Find(tt.version, tt.os)
		if err != nil {
			t.Fatal(err)
		}
		want := *client(t, tt.version, tt.os)
		want.Image = "" // the table names none
		if diff := cmp.Diff(&want, got); diff != "" {
			t.Errorf("%s is not as in the default catalog: %s", tt.version, diff)
		}
	}
	want := []Client{
		{Version: "own", OS: "any", Root: "/bitfusion/no%sopt", Binary: "/bitfusion/no%sopt/bitfusion", Command: namedForm("bitfusion")},
		{
			Version: "own2", OS: "any", Root: "/bitfusion/x", Binary: "/bitfusion/x/bin/bitfusion",
			LibraryPath: "/bitfusion/x/lib:/bitfusion/x/opt/bitfusion/lib",
			OptSource:   "/bitfusion/x/opt/bitfusion", Command: namedForm("bitfusion"),
		},
		{Version: "own3", OS: "any", Root: "/bitfusion/x", Binary: "/bitfusion/x/bin/bitfusion", LibraryPath: "/opt/bitfusion/lib",
			Command: namedForm("bitfusion")},
	}
	if diff := cmp.Diff(want, c.Clients[3:]); diff != "" {
		t.Error(diff)
	}
	got, _, _, err := c.Clients[3].Wrap(Request{Amount: 1, Percent: 50}, nil, []string{"a b"}, nil)
	if text := "/bitfusion/no%sopt/bitfusion run -n 1 -p 0.500000  -- a b"; err != nil || got[2] != text {
		t.Errorf("%q and %v, want %q", got, err, text)
	}
}

// All mistakes are told at once, each with its line.
func TestMistakesOfCatalogs(t *testing.T) {
	one := head + "clients:\n- {version: '1', os: a, root: /bitfusion/a, command: bitfusion%s}\n"
	many := strings.Builder{}
	for i := range maxClients + 1 {
		fmt.Fprintf(&many, "- {version: '%d', os: a, root: /bitfusion/a, command: bitfusion}\n", i)
	}
	tests := map[string]struct {
		text string
		want []string
	}{
		"nothing":       {"", []string{"it is empty; write apiVersion: pool.divvy.dev/v1alpha1, kind: ClientCatalog and clients"}},
		"a comment":     {"# nothing\n", []string{"it is empty; write"}},
		"null":          {"~\n", []string{"it is empty; write"}},
		"no YAML":       {"a: [", []string{"it is not YAML: line 1"}},
		"a tab":         {"clients:\n\t- a", []string{"it is not YAML"}},
		"no text":       {"\xff\xfe\x00", []string{"it is not YAML"}},
		"a list":        {"- a\n", []string{"line 1: keys are expected here: apiVersion, kind, defaults, clients, BitfusionClients"}},
		"two documents": {fmt.Sprintf(one, "") + "---\na: b\n", []string{"more than one YAML document; only one is supported"}},
		"too large":     {head + "# " + strings.Repeat("x", MaxCatalog), []string{"bytes; a catalog has at most 1048576"}},
		"no head": {"clients: []\n", []string{
			"line 1: apiVersion: it is missing; write apiVersion: pool.divvy.dev/v1alpha1",
			"line 1: kind: it is missing; write kind: ClientCatalog", "line 1: clients: there is no client",
		}},
		"another head": {"apiVersion: v1\nkind: List\nclients: {}\n", []string{`line 1: apiVersion: "v1" is not known`,
			`line 2: kind: "List" is not known`, "line 3: clients: this is a list of clients"}},
		"no clients": {head, []string{"line 1: clients: the list of clients is missing"}},
		"too many": {head + "clients:\n" + many.String(),
			[]string{"line 4: clients: 1001 clients; a catalog has at most 1000"}},
		"both forms": {fmt.Sprintf(one, "") + "BitfusionClients: []\n", []string{"line 1: apiVersion: this key and " +
			"BitfusionClients belong to different formats", "line 2: kind: this", "line 4: clients: this",
			"line 5: BitfusionClients: there is no client"}},
		"a key that is unknown": {fmt.Sprintf(one, ", libarypath: /x"),
			[]string{`line 4: clients[0]: unknown key "libarypath"; valid keys are version, os, image, root, binary, libraryPath, ` +
				`optSource, command, singleSecret`}},
		"unknown at the top": {"client: []\n" + fmt.Sprintf(one, ""), []string{`line 1: unknown key "client"`}},
		"a key twice":        {fmt.Sprintf(one, ", os: b"), []string{`line 4: clients[0]: duplicate key "os"`}},
		"a merge":            {fmt.Sprintf(one, ", <<: {os: b}"), []string{`line 4: clients[0]: unknown key "<<"`}},
		"fields missing": {head + "clients:\n- {}\n", []string{
			`line 4: clients[0].version: it is missing; write such as "450"`,
			"line 4: clients[0].os: it is missing; write such as ubuntu18",
			"line 4: clients[0].root: it is missing; write such as /bitfusion/client",
			"line 4: clients[0].command: it is missing; write bitfusion or bitfusion-3 or bitfusion-2, or the words of the client",
		}},
		"fields empty": {head + "clients:\n- {version: '', os: ~, root: [], command: true}\n", []string{
			"line 4: clients[0].version: it is empty", "line 4: clients[0].os: a text is expected here",
			"line 4: clients[0].root: a text is expected here", "line 4: clients[0].command: a text is expected here",
		}},
		"names": {head + "clients:\n- {version: '4 5', os: a/b, image: 'x y', root: /bitfusion/a, command: bitfusion}\n", []string{
			`line 4: clients[0].version: "4 5" is not accepted`, `line 4: clients[0].os: "a/b" is not accepted`,
			`line 4: clients[0].image: "x y" is not an image name`,
		}},
		"doubles": {fmt.Sprintf(one, "") + "- {version: '1', os: a, root: /bitfusion/b, command: bitfusion}\n",
			[]string{"line 5: duplicate client 1 for a, first in line 4"}},
		"a form unknown": {strings.Replace(fmt.Sprintf(one, ""), "command: bitfusion", "command: bitfusion-9", 1),
			[]string{`line 4: clients[0].command: "bitfusion-9" is not known; write bitfusion or bitfusion-3 or bitfusion-2, or the ` +
				`words of the client`}},
		"paths elsewhere": {head + "clients:\n- {version: '1', os: a, root: /usr, binary: /usr/bin/x, command: bitfusion, libraryPath: " +
			"'/usr/a:/bitfusion/b:rel', optSource: /bitfusion/c}\n", []string{`line 4: clients[0].root: "/usr" is not below /bitfusion`,
			`line 4: clients[0].libraryPath: "/bitfusion/b" is not below /usr`, `line 4: clients[0].libraryPath: "rel" is not a valid path`,
			`line 4: clients[0].optSource: "/bitfusion/c" is not below /usr`}},
		"hostile paths": {head + "clients:\n- {version: '1', os: a, root: /bitfusion/../etc, binary: '/bitfusion/a;id', command: " +
			"bitfusion, libraryPath: '/bitfusion/a/$(X)', optSource: '/bitfusion/a//b'}\n", []string{
			`line 4: clients[0].root: "/bitfusion/../etc" is not a clean path; write /etc`,
			`line 4: clients[0].binary: "/bitfusion/a;id" is not a valid path`,
			`line 4: clients[0].libraryPath: "/bitfusion/a/$(X)" is not a valid path`,
			`line 4: clients[0].optSource: "/bitfusion/a//b" is not a clean path; write /bitfusion/a/b`,
		}},
		"the mount itself": {strings.Replace(fmt.Sprintf(one, ""), "/bitfusion/a", "/bitfusion/", 1),
			[]string{`line 4: clients[0].root: "/bitfusion" is not below /bitfusion`}},
		"a folder as program": {fmt.Sprintf(one, ", binary: /bitfusion/a"),
			[]string{`line 4: clients[0].binary: "/bitfusion/a" is not below /bitfusion/a`}},
		"no binary": {strings.Replace(fmt.Sprintf(one, ""), "command: bitfusion", "command: {percent: [a]}", 1),
			[]string{"line 4: clients[0].binary: it is missing; it is predefined only for the commands " +
				"bitfusion, bitfusion-3, bitfusion-2"}},
		"a secret": {fmt.Sprintf(one, ", singleSecret: 'yes'"),
			[]string{"line 4: clients[0].singleSecret: true or false is expected here"}},
		"an alias of a client": {head + "clients:\n- &a {version: '1', os: a, root: /bitfusion/a, command: bitfusion}\n- *a\n",
			[]string{"line 5: duplicate client 1 for a, first in line 4"}},
		"defaults": {fmt.Sprintf(one, "") + "defaults: {version: 2, os: b, arch: c}\n", []string{
			`line 5: defaults: unknown key "arch"; valid keys are version, os`, `line 5: defaults.version: there is no client for "2"`,
			`line 5: defaults.os: there is no client for "b"`,
		}},
		"defaults that do not meet": {fmt.Sprintf(one, "") + "- {version: '2', os: b, root: /bitfusion/a, command: bitfusion}\ndefaults: " +
			"{version: 2, os: a}\n", []string{"line 6: defaults: there is no client 2 for a"}},
		"command forms": {head + `clients:
- {version: '1', os: a, root: /bitfusion/a, binary: /bitfusion/a/b, command: {}}
- version: '2'
  os: a
  root: /bitfusion/a
  binary: /bitfusion/a/b
  command:
    shell: bash
    percent: ["${megabytes}", "$HOME", "$(X)", "${amount"]
    memory: run
    filter: [--filter]
    separator: ["${amount}", [], {}]
    separators: []
`, []string{
			"line 4: clients[0].command: words for requests by percent and by memory are both missing; write at least one of them",
			`line 10: clients[1].command.shell: "bash" is not an absolute path of a shell`,
			`line 11: clients[1].command.percent[0]: ${megabytes} is unknown; use ${amount}, ${units}, ${percent}, ${fraction}`,
			`line 11: clients[1].command.percent[1]: "$HOME" contains a $ that does not begin a placeholder`,
			`line 11: clients[1].command.percent[2]: "$(X)" contains a $`,
			`line 11: clients[1].command.percent[3]: "${amount" contains a $`,
			`line 12: clients[1].command.memory: this is a list of words, such as ["run", "-n", "${amount}"]`,
			"line 13: clients[1].command.filter: the words do not contain ${filter}, so filters would be lost",
			"line 14: clients[1].command.separator[0]: ${amount} is unknown; use none", "line 14: clients[1].command.separator[1]: a " +
				"text is expected here", "line 14: clients[1].command.separator[2]: a text is expected here",
			`line 15: clients[1].command: unknown key "separators"; valid keys are shell, percent, memory, filter, separator`,
		}},
		"too many keys": {head + "x: &x {" + strings.Repeat("a: b, ", 100) + "}\nclients:\n- *x\n", []string{
			`line 3: unknown key "x"`, "line 3: clients[0]: 100 keys; valid keys are version",
		}},
		"too many words": {strings.Replace(fmt.Sprintf(one, ", binary: /bitfusion/a/b"), "command: bitfusion",
			"command: {percent: ["+strings.Repeat("a,", 65)+"]}", 1),
			[]string{"line 4: clients[0].command.percent: 65 words; write at most 64"}},
		"the original's rows (W25)": {`BitfusionClients:
- {BitfusionVersion: "450", OSVersion: "a", BinaryPath: "/usr/bin/bitfusion", EnvVariable: ""}
- {BitfusionVersion: "450", OSVersion: "b", BinaryPath: "/bitfusion/bitfusion", EnvVariable: "x"}
- {BitfusionVersion: "450", OSVersion: "c", BinaryPath: "/bitfusion/a/../../bin/sh", EnvVariable: "/bitfusion/b/opt/bitfusion/lib"}
- {BitfusionVersion: "450", OsVersion: "d"}
- text
`, []string{
			`line 2: BitfusionClients[0].BinaryPath: "/usr/bin/bitfusion" is not in a folder below /bitfusion`,
			`line 3: BitfusionClients[1].BinaryPath: "/bitfusion/bitfusion" is not in a folder below /bitfusion`,
			`line 4: BitfusionClients[2].BinaryPath: "/bitfusion/a/../../bin/sh" is not a clean path; write /bin/sh`,
			`line 4: BitfusionClients[2].EnvVariable: "/bitfusion/b/opt/bitfusion/lib" is not below /bitfusion/a`,
			`line 5: BitfusionClients[3]: unknown key "OsVersion"; valid keys are BitfusionVersion, OSVersion, BinaryPath, EnvVariable`,
			"line 5: BitfusionClients[3].OSVersion: it is missing",
			"line 5: BitfusionClients[3].BinaryPath: it is missing", "line 5: BitfusionClients[3].EnvVariable: it is missing",
			"line 6: BitfusionClients[4]: keys are expected here",
		}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c, err := DecodeCatalog([]byte(tt.text))
			var wrong *CatalogError
			if !errors.As(err, &wrong) || c != nil {
				t.Fatalf("%v and %v", c, err)
			}
			for i, m := range wrong.Mistakes {
				if i >= len(tt.want) || !strings.Contains(m, tt.want[i]) {
					t.Errorf("mistake %d: %s", i, m)
				}
				if !strings.Contains(err.Error(), m) {
					t.Errorf("the error does not say %q", m)
				}
			}
			if len(wrong.Mistakes) != len(tt.want) {
				t.Errorf("%d mistakes, want %d", len(wrong.Mistakes), len(tt.want))
			}
		})
	}
}

func TestMistakesAreBounded(t *testing.T) {
	_, err := DecodeCatalog([]byte(head + "clients:\n" + strings.Repeat("- {}\n", maxClients)))
	var wrong *CatalogError
	if !errors.As(err, &wrong) || len(wrong.Mistakes) != maxMistakes+1 || wrong.Mistakes[maxMistakes] != "and 3950 more" {
		t.Errorf("%d bytes of mistakes", len(err.Error()))
	}
}

// What is said once and repeated by aliases costs no more than it should.
func TestAliasesAreBounded(t *testing.T) {
	words := strings.Repeat("$,", maxWords)
	text := head + "x: &x {percent: [" + words + "], memory: [" + words + "], filter: [" + words + "], separator: [" + words + "]}\n" +
		"y: &y {version: 1, os: a, root: /bitfusion/a, binary: /bitfusion/a/b, command: *x}\nclients:\n" + strings.Repeat("- *y\n",
		maxClients)
	_, err := DecodeCatalog([]byte(text))
	if err == nil || len(err.Error()) > 1<<16 {
		t.Errorf("%v", err)
	}
}

func FuzzDecodeCatalog(f *testing.F) {
	for _, seed := range []string{
		string(DefaultCatalogYAML()), "", head + "clients: []", "a: &a [*a]", "a: &a {b: *a}", "? [a]\n: b", "<<: {clients: []}",
		head + "clients: &c\n- *c\n",
		"BitfusionClients:\n- {BitfusionVersion: 450, OSVersion: a, BinaryPath: /bitfusion/a/b, " +
			"EnvVariable: /bitfusion/a/opt/bitfusion/}\n",
		head + "clients:\n- {version: 1, os: a, root: /bitfusion/a, binary: /bitfusion/a/b, command: {shell: /bin/sh, percent: " +
			"['${amount}'], filter: ['${filter}']}}\ndefaults: {version: 1}\n",
		"BitfusionClients:\n- &a {BitfusionVersion: '', OSVersion: '', BinaryPath: /bitfusion/, EnvVariable: " +
			"'/opt/bitfusion/:$LD_LIBRARY_PATH'}\n- *a\n", "!!binary a", "--- !!set {a, b}", "%YAML 9.9\n---\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := DecodeCatalog(data)
		if err != nil {
			var wrong *CatalogError
			if !errors.As(err, &wrong) || len(wrong.Mistakes) == 0 || c != nil || len(err.Error()) > 1<<20 {
				t.Fatalf("%d bytes of error", len(err.Error()))
			}
			return
		}
		if len(c.Clients) == 0 {
			t.Fatal("no client")
		}
		for _, k := range c.Clients {
			if got, err := c.Find(k.Version, k.OS); err != nil || !cmp.Equal(*got, k) {
				t.Fatalf("client %s for %s: %v", k.Version, k.OS, err)
			}
			if !strings.HasPrefix(k.Root, MountPath+"/") || !strings.HasPrefix(k.Binary, k.Root+"/") || k.OptSource != "" &&
				!strings.HasPrefix(k.OptSource, k.Root+"/") {
				t.Fatalf("%+v", k)
			}
			for _, p := range append(filepath.SplitList(k.LibraryPath), k.Root, k.Binary, k.OptSource) {
				if p != "" && (strings.ContainsAny(p, "$ '\"`;&|\\\n") || slices.Contains(strings.Split(p, "/"), "..")) {
					t.Fatalf("the path %q", p)
				}
			}
			filters := []string{"device.id=0"}
			if len(k.Command.Filter) == 0 {
				filters = nil
			}
			for _, r := range []Request{{Amount: 1, Percent: 50}, {Amount: 1, MemoryBytes: 1_000_000}} {
				got, _, _, err := k.Wrap(r, filters, []string{"python x.py"}, nil)
				if err == nil && (len(got) == 0 || !strings.Contains(strings.Join(got, "\x00"), k.Binary)) {
					t.Fatalf("%+v: %q", k, got)
				}
			}
		}
	})
}

func BenchmarkDecodeCatalog(b *testing.B) {
	data := DefaultCatalogYAML()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeCatalog(data); err != nil {
			b.Fatal(err)
		}
	}
}

// The catalogs of the examples, where there are any, can be read.
func TestExampleCatalogs(t *testing.T) {
	files, err := filepath.Glob("../../examples/catalog/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(data), "BitfusionClients:") || strings.Contains(string(data), Kind) {
			if _, err := DecodeCatalog(data); err != nil {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
}
