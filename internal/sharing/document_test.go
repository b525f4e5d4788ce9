package sharing

import (
	"os"
	"path/filepath"
	"testing"
)

// TestReplacedWhileSaved: a file that another program replaces at any moment of Save is
// written again by the next one.
func TestReplacedWhileSaved(t *testing.T) {
	for range 20 {
		dir := t.TempDir()
		d := NewDocument[string](dir, "a.json")
		replaced := make(chan error, 1)
		go func() {
			path := filepath.Join(dir, "a.json")
			for os.Remove(path) != nil {
				continue
			}
			replaced <- os.WriteFile(path, []byte("other"), 0o600)
		}()
		must(t, d.Save("value"))
		must(t, <-replaced)
		must(t, d.Save("value"))
		if got, exists, err := NewDocument[string](dir, "a.json").Load(); got != "value" || !exists || err != nil {
			t.Fatalf("the file holds %q, %t, %v", got, exists, err)
		}
	}
}
