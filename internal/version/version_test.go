package version

import (
	"runtime"
	"testing"
)

func TestString(t *testing.T) {
	defer func(v, c string) { Version, Commit = v, c }(Version, Commit)
	Version, Commit = "v1.2.3", "abc1234"
	want := "divvy-node v1.2.3 (commit abc1234, " + runtime.Version() + ", " + runtime.GOOS + "/" + runtime.GOARCH + ")"
	if got := String("divvy-node"); got != want {
		t.Errorf("String() = %q, want %q", got, want)
	}
	Commit = ""
	if commit() == "" {
		t.Error("commit() is empty for a build without linker flags")
	}
}
