package host

import (
	"encoding/base64"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzRedact: whatever stands around a key, nothing of it is left.
func FuzzRedact(f *testing.F) {
	for _, seed := range [][2]string{{"", ""}, {"extenders:\n- tlsConfig:\n    ", "\n    serverName: a\n"}, {"{tlsConfig: {", ", a: b}}"},
		{"{\"a\":{\"", "}}"}, {"a: |\n  b\n", "\n\n  c\n"}} {
		f.Add(seed[0], seed[1])
	}
	key := base64.StdEncoding.EncodeToString([]byte("a private key that nobody may see"))
	f.Fuzz(func(t *testing.T, before, after string) {
		for _, form := range []string{"keyData: " + key, "keyData: \"" + key + "\"", "\"keyData\": \"" + key + "\"",
			"keyData: >-\n        " + key} {
			text := before + "\n    " + form + "\n    serverName: a\n" + after
			if got := Redact(text); strings.Contains(strings.ReplaceAll(before+after, key, ""), key[:16]) || strings.Contains(got, key) &&
				!strings.Contains(before+after, key) {
				t.Fatalf("the key is in\n%s\nof\n%s", got, text)
			}
		}
	})
}

// FuzzJournal: a journal that somebody else wrote is an error or is used, and the
// original manifest has a copy in any case.
func FuzzJournal(f *testing.F) {
	for _, seed := range []string{
		"", "{}", "null", "[]", `{"version":1}`, `{"version":1,"pending":{}}`,
		`{"version":1,"pending":{"before":"a","after":"b","saved":[{"path":"/x"}]}}`,
		`{"version":1,"pending":{"failure":{"reason":"a"}}}`, `{"version":1,"failure":{"attempts":-1}}`,
		`{"version":1,"files":["/none/passwd"]}`,
		`{"version":1,"pending":{"failure":{},"saved":[{"path":"/none/a","copy":"/none/b"}]}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		w := newWorld(t)
		if err := os.WriteFile(filepath.Join(w.dir, JournalFile), data, 0o600); err != nil {
			t.Fatal(err)
		}
		installed := w.install(resourceA)
		w.wantOriginalKept()
		if installed == nil {
			w.wantWired(resourceA)
			if err := w.uninstall(); err != nil {
				t.Error(err)
			}
			w.wantOriginalKept()
		}
	})
}
