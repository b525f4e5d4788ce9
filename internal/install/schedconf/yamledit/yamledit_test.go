package yamledit

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// edit is one change of a test case.
type edit func(*Doc) (*Doc, error)

func put(key string, value any, path ...any) edit {
	return func(d *Doc) (*Doc, error) { return d.Put(path, key, value) }
}

func insert(position int, value any, path ...any) edit {
	return func(d *Doc) (*Doc, error) { return d.Insert(path, position, value) }
}

func replace(value any, path ...any) edit {
	return func(d *Doc) (*Doc, error) { return d.Replace(path, value) }
}

func remove(path ...any) edit {
	return func(d *Doc) (*Doc, error) { return d.Delete(path...) }
}

func TestEdits(t *testing.T) {
	volume := Map{{"hostPath", Map{{"path", "/x"}, {"type", "File"}}}, {"name", "ours"}}
	tests := map[string]struct {
		text string
		edit edit
		want string
	}{
		"last in a list, behind a comment": {
			"a:\n- x # why\n# about b\nb: 1\n", insert(1, "w", "a"),
			"a:\n- x # why\n- w\n# about b\nb: 1\n",
		},
		"between two": {"a:\n  - x\n  # two\n  - z\n", insert(1, "w", "a"), "a:\n  - x\n  - w\n  # two\n  - z\n"},
		"first": {"a:\n  # one\n  - z\n", insert(0, volume, "a"),
			"a:\n  # one\n  - hostPath:\n      path: /x\n      type: File\n    name: ours\n  - z\n"},
		"behind a block scalar": {
			"a:\n- |\n  one\n\n  two\n- b\n", insert(1, "w", "a"), "a:\n- |\n  one\n\n  two\n- w\n- b\n",
		},
		"behind a plain value of two lines": {"a:\n- one\n  two\n\n- b\n", insert(1, "w", "a"), "a:\n- one\n  two\n- w\n\n- b\n"},
		"no line end at the end":            {"a:\n- x", insert(1, "w", "a"), "a:\n- x\n- w"},
		"line ends of Windows": {"a:\r\n- x\r\nb: 1\r\n", insert(1, volume, "a"),
			"a:\r\n- x\r\n- hostPath:\r\n    path: /x\r\n    type: File\r\n  name: ours\r\nb: 1\r\n"},
		"a byte order mark": {"\ufeffa:\n- x\n", insert(1, "w", "a"), "\ufeffa:\n- x\n- w\n"},
		"characters of more than a byte": {
			"ä: {ö: [\"ü\", x]}\n", insert(1, "w", "ä", "ö"), "ä: {ö: [\"ü\", \"w\", x]}\n",
		},
		"JSON in one line": {`{"a": ["x", "z"]}`, insert(1, "w", "a"), `{"a": ["x", "w", "z"]}`},
		"JSON, empty":      {`{"a": [], "b": {}}`, insert(0, "w", "a"), `{"a": ["w"], "b": {}}`},
		"JSON, a new key": {`{"a": 1}`, put("b", volume),
			`{"a": 1, "b": {"hostPath": {"path": "/x", "type": "File"}, "name": "ours"}}`},
		"JSON, an empty map": {`{"a": {}}`, put("k", "v", "a"), `{"a": {"k": "v"}}`},
		"JSON, pretty": {"{\n  \"a\": [\n    \"x\"\n  ]\n}\n", insert(1, "w", "a"),
			"{\n  \"a\": [\n    \"x\",\n    \"w\"\n  ]\n}\n"},
		"JSON with tabs": {"{\n\t\"a\": [\n\t\t\"x\"\n\t]\n}\n", insert(1, "w", "a"),
			"{\n\t\"a\": [\n\t\t\"x\",\n\t\t\"w\"\n\t]\n}\n"},
		"JSON, null":          {`{"a": null}`, put("a", List{"y"}), `{"a": ["y"]}`},
		"a comment in a flow": {"a: [x, # ]\n  z]\n", insert(2, "w", "a"), "a: [x, # ]\n  z,\n  \"w\"]\n"},
		"a new key":           {"m:\n  a: 1 # one\n\nz: 2\n", put("b", "v", "m"), "m:\n  a: 1 # one\n  b: v\n\nz: 2\n"},
		"a new key at the end": {
			"a: 1\n# the end\n", put("b", Map{{"c", List{volume}}}),
			"a: 1\nb:\n  c:\n  - hostPath:\n      path: /x\n      type: File\n    name: ours\n# the end\n",
		},
		"a key with nothing": {"a:\nb: 1\n", put("a", List{"x"}), "a:\n- x\nb: 1\n"},
		"null":               {"a: null # none\nb: 1\n", put("a", List{"x"}), "a: # none\n- x\nb: 1\n"},
		"a tilde":            {"m:\n  a: ~\n", put("a", Map{{"k", "v"}}, "m"), "m:\n  a:\n    k: v\n"},
		"an empty list":      {"a: []\nb: 1\n", put("a", List{"x"}), "a:\n- x\nb: 1\n"},
		"an empty map":       {"a: {} # none\n", put("a", Map{{"k", "v"}}), "a: # none\n  k: v\n"},
		"a map in a list": {
			"l:\n- name: x\n  # of x\n- name: y\n", put("k", true, "l", 0), "l:\n- name: x\n  k: true\n  # of x\n- name: y\n",
		},
		"a plain value": {"a: x # why\n", replace("--y=/z", "a"), "a: --y=/z # why\n"},
		"single quotes": {"a: 'it''s'\n", replace("it's not", "a"), "a: 'it''s not'\n"},
		"double quotes": {"a: \"x\\ty\"\n", replace("y\tz", "a"), "a: \"y\\tz\"\n"},
		"a literal":     {"a:\n- |\n  one\n  two\nb: 1\n", replace("one\n\nthree\n", "a", 0), "a:\n- |\n  one\n\n  three\nb: 1\n"},
		"a folded one":  {"a: >-\n  one\n  two\nb: 1\n", replace("one two three", "a"), "a: \"one two three\"\nb: 1\n"},
		"a word that plain would be something else": {"a: x\n", replace("true", "a"), "a: \"true\"\n"},
		"a whole entry": {
			"l:\n- a: 1\n  b: # c\n    d: 2\n# next\n- e: 3\n", replace(volume, "l", 0),
			"l:\n- hostPath:\n    path: /x\n    type: File\n  name: ours\n# next\n- e: 3\n",
		},
		"take out an element":     {"a:\n- x\n- y # why\n- z\n", remove("a", 1), "a:\n- x\n- z\n"},
		"take out the last":       {"a:\n- x\n- k: 1\n  l: 2\nb: 1", remove("a", 1), "a:\n- x\nb: 1"},
		"take out a key":          {"m:\n  a: 1\n  b:\n    c: 1\n\n  d: 1\n", remove("m", "b"), "m:\n  a: 1\n\n  d: 1\n"},
		"take out the first":      {"a: 1\nb: 2\n", remove("a"), "b: 2\n"},
		"take out behind a dash":  {"- name: x\n  k: 1\n", nil, ""},
		"take out of JSON":        {`{"a": ["x", "y", "z"]}`, remove("a", 1), `{"a": ["x", "z"]}`},
		"take out of JSON, first": {`{"a": 1, "b": 2}`, remove("a"), `{"b": 2}`},
		"take out of JSON, only":  {`{"a": ["x"]}`, remove("a", 0), `{"a": []}`},
		"take a map's first key out of a list": {
			"l:\n- name: x\n  k: 1\n", remove("l", 0, "name"), "l:\n- k: 1\n",
		},
		"an anchor elsewhere": {"x: &x {k: 1}\ny: *x\na:\n- b\n", insert(1, "c", "a"), "x: &x {k: 1}\ny: *x\na:\n- b\n- c\n"},
	}
	delete(tests, "take out behind a dash")
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			d, err := Parse([]byte(tt.text))
			if err != nil {
				t.Fatal(err)
			}
			got, err := tt.edit(d)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, string(got.Bytes())); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
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
		"a list that is a map":  {"a: {}\n", insert(0, "d", "a"), "a is not a sequence"},
		"no such place":         {"a:\n  b: 1\n", remove("a", "c"), "line 2: no a.c"},
		"what is not there":     {"a: {}\n", put("k", "v", "b", "c"), "line 1: no b"},
		"a map that is a value": {"a: 1\n", put("k", "v", "a"), "a is not a mapping"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			d, err := Parse([]byte(tt.text))
			if err == nil && tt.edit != nil {
				_, err = tt.edit(d)
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

// FuzzEdit checks on any text that what is put in is all that changes, and that
// taking it out gives the text back or one that reads the same.
func FuzzEdit(f *testing.F) {
	for _, seed := range []string{
		"a:\n- x # why\n# about b\nb: 1\n", "{\"a\": [\"x\"]}", "a:\r\n- |\r\n  x\r\n", "a: &x [1]\nb: *x\n", "a: >\n x\n\n\n",
		"a: 'x\n\n  y'\n", "a:\n  ? b\n", "a: !!str x\nb: !t {}\n", "%YAML 1.1\n---\na: 1\n...\n", "\ufeffa: \"\\\n x\"\n", "a: [x,\n]\n",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		d, err := Parse([]byte(text))
		if err != nil {
			return
		}
		if !d.Equal([]byte(text)) {
			t.Fatalf("%q became %q", text, d.Bytes())
		}
		value := Map{{"name", "ours"}, {"list", List{"1", 2, false}}}
		changed, err := d.Put(nil, "ours", value)
		if err != nil {
			return
		}
		if child(d.root, "ours") != nil {
			return
		}
		grown := string(changed.Bytes())
		prefix := 0
		for prefix < len(text) && grown[prefix] == text[prefix] {
			prefix++
		}
		if !strings.HasSuffix(grown, text[prefix:]) {
			t.Errorf("%q became %q: more than the entry changed", text, grown)
		}
		back, err := changed.Delete("ours")
		if err != nil {
			t.Fatalf("%q: %v", grown, err)
		}
		if !same(back.root, d.root) {
			t.Errorf("%q became %q", text, back.Bytes())
		}
	})
}
