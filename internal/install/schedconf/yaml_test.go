package schedconf

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// edit is one change of a test case.
type edit func(*document) error

func put(key string, value any, path ...any) edit {
	return func(d *document) error { return d.put(path, key, value) }
}

func insert(position int, value any, path ...any) edit {
	return func(d *document) error { return d.insert(path, position, value) }
}

func remove(path ...any) edit {
	return func(d *document) error { return d.remove(path...) }
}

func TestEdits(t *testing.T) {
	volume := map[string]any{"hostPath": map[string]any{"path": "/x", "type": "File"}, "name": "ours"}
	tests := map[string]struct {
		text string
		edit edit
		want string
	}{
		"last in a list, behind a comment": {
			"a:\n- x # why\n# about b\nb: 1\n", insert(-1, "w", "a"), "a:\n- x # why\n- w\n# about b\nb: 1\n",
		},
		"between two": {"a:\n  - x\n  # two\n  - z\n", insert(1, "w", "a"), "a:\n- x\n- w\n# two\n- z\n"},
		"first": {"a:\n  # one\n  - z\n", insert(0, volume, "a"),
			"a:\n- hostPath:\n    path: /x\n    type: File\n  name: ours\n# one\n- z\n"},
		"behind a block scalar": {
			"a:\n- |\n  one\n\n  two\n- b\n", insert(1, "w", "a"), "a:\n- |\n  one\n\n  two\n- w\n- b\n",
		},
		"line ends of Windows":   {"a:\r\n- x\r\nb: 1\r\n", insert(1, "w", "a"), "a:\n- x\n- w\nb: 1\n"},
		"a byte order mark":      {"\ufeffa:\n- x\n", insert(1, "w", "a"), "a:\n- x\n- w\n"},
		"a list in one line":     {"ä: {ö: [\"ü\", x]}\n", insert(-1, "w", "ä", "ö"), "ä: {ö: [\"ü\", x, w]}\n"},
		"JSON":                   {`{"a": [{"b": "yes"}, 1.0]}`, insert(1, "w", "a"), "\"a\":\n- \"b\": \"yes\"\n- w\n- 1.0\n"},
		"JSON, an empty map":     {`{"a": {}}`, put("k", "v", "a"), "\"a\":\n  k: v\n"},
		"a new key":              {"m:\n  a: 1 # one\n\nz: 2\n", put("b", "v", "m"), "m:\n  a: 1 # one\n  b: v\nz: 2\n"},
		"a new key at the end":   {"a: 1\n# the end\n", put("b", 2), "a: 1\n# the end\n\nb: 2\n"},
		"a map that is missing":  {"a: 1\n", put("k", "v", "b", "c"), "a: 1\nb:\n  c:\n    k: v\n"},
		"a key with nothing":     {"a:\nb: 1\n", insert(-1, "x", "a"), "a:\n- x\nb: 1\n"},
		"null":                   {"a: null # none\nb: 1\n", insert(-1, "x", "a"), "a: # none\n- x\nb: 1\n"},
		"an empty list":          {"a: []\nb: 1\n", insert(-1, "x", "a"), "a:\n- x\nb: 1\n"},
		"another value":          {"a: x # why\n", put("a", "w"), "a: w # why\n"},
		"a word that means more": {"a: x\n", put("a", "yes"), "a: \"yes\"\n"},
		"a word that stays":      {"a: yes\nb: 012\n", put("c", "n"), "a: yes\nb: 012\nc: \"n\"\n"},
		"take out an element":    {"a:\n- x\n- y # why\n- z\n", remove("a", 1), "a:\n- x\n- z\n"},
		"take out, comments around": {"a:\n- x\n# of y\n- y # why\n# of z\n- z\n", remove("a", 1),
			"a:\n- x\n# of y\n\n# of z\n- z\n"},
		"take out the only one":  {"a:\n  b:\n  - x\nc: 1\n", remove("a", "b", 0), "c: 1\n"},
		"take out a key":         {"m:\n  a: 1\n  b:\n    c: 1\n  d: 1\n", remove("m", "b"), "m:\n  a: 1\n  d: 1\n"},
		"take out the first key": {"# top\na: 1\nb: 2\n", remove("a"), "# top\nb: 2\n"},
		"take out nothing":       {"a:   1\n", remove("b"), "a:   1\n"},
		"an anchor elsewhere": {"x: &x {k: 1}\ny: *x\na:\n- b\n", insert(1, "c", "a"),
			"x: &x {k: 1}\ny: *x\na:\n- b\n- c\n"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			d, err := parse([]byte(tt.text))
			if err != nil {
				t.Fatal(err)
			}
			if err := tt.edit(d); err != nil {
				t.Fatal(err)
			}
			got, err := d.bytes()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestRejectedEdits(t *testing.T) {
	tests := map[string]struct {
		text string
		edit edit
		want string
	}{
		"nothing":               {"", nil, "empty"},
		"only a comment":        {"# nothing\n", nil, "empty"},
		"not UTF-8":             {"a: \xff\n", nil, "UTF-8"},
		"not YAML":              {"a: b: c\n", nil, "neither YAML nor JSON: mapping values"},
		"tabs":                  {"a:\n\tb: 1\n", nil, "line 2: found character that cannot start any token"},
		"two documents":         {"a: 1\n---\nb: 1\n", nil, "a second document"},
		"a list":                {"- a\n", nil, "not a mapping"},
		"a key twice":           {"a: 1\nb: {c: 1,\n  c: 2}\n", nil, `line 3: duplicate key "c", first in line 2`},
		"a key that is a map":   {"{a: 1}: b\n", nil, "a key is a mapping"},
		"an anchor":             {"a: &x\n- b\nc: *x\n", insert(1, "d", "a"), "an anchor or an alias"},
		"an alias":              {"a: &x\n- b\nc: *x\n", insert(1, "d", "c"), "an anchor or an alias"},
		"an anchor taken out":   {"a:\n  b: &x 1\n  d: 1\nc: *x\n", remove("a", "b"), "written in a form that cannot be changed"},
		"a list that is a map":  {"a: {}\n", insert(0, "d", "a"), "a is of another type"},
		"no such place":         {"a:\n- b\n", put("k", "v", "a", 1), "line 2: no a[1]"},
		"a map that is a value": {"a: 1\n", put("k", "v", "a"), "a is of another type"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			d, err := parse([]byte(tt.text))
			if err == nil && tt.edit != nil {
				if err = tt.edit(d); err == nil {
					_, err = d.bytes()
				}
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

// FuzzEdit checks on any text that what is put in is all that changes in what it holds, and
// that taking it out gives what it was.
func FuzzEdit(f *testing.F) {
	for _, seed := range []string{
		"a:\n- x # why\n# about b\nb: 1\n", "{\"a\": [\"x\"]}", "a:\r\n- |\r\n  x\r\n", "a: &x [1]\nb: *x\n", "a: >\n x\n\n\n",
		"a: 'x\n\n  y'\n", "a:\n  ? b\n", "a: !!str x\nb: !t {}\n", "%YAML 1.1\n---\na: 1\n...\n", "\ufeffa: \"\\\n x\"\n", "a: [x,\n]\n",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, err := parse([]byte(text))
		if err != nil || d.at("ours") != nil {
			return
		}
		if same, err := d.bytes(); err == nil && string(same) != text {
			t.Fatalf("%q became %q", text, same)
		}
		if d.put(nil, "ours", map[string]any{"name": "ours", "list": []any{"1", 2, false}}) != nil {
			return
		}
		grown, err := d.bytes()
		if err != nil {
			return
		}
		if d, err = parse(grown); err != nil {
			t.Fatal(err)
		}
		if err := d.remove("ours"); err != nil {
			t.Fatalf("%q: %v", grown, err)
		}
		was, err := parse([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		if !equal(was.root, d.root) {
			t.Errorf("%q became %q", text, grown)
		}
	})
}
