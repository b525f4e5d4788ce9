package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// stat is the text of /proc/<pid>/stat as Linux writes it.
func stat(pid int, name, state string, start uint64) string {
	return fmt.Sprintf("%d (%s) %s 1 4242 4242 0 -1 4194560 12345 0 0 0 250 90 0 0 20 0 9 0 %d 1234567890 4096 "+
		"18446744073709551615 1 1 0 0 0 0 0 4096 17663 0 0 0 17 3 0 0 0 0 0 0 0 0 0 0 0 0 0\n", pid, name, state, start)
}

func TestReadProcess(t *testing.T) {
	for name, tt := range map[string]struct {
		text string
		want Process
		err  string
	}{
		"a program":                   {stat(7, "python3", "S", 987654), Process{Start: 987654}, ""},
		"a name like the rest of it":  {stat(7, "a) Z 1 (b) R 2", "R", 5), Process{Start: 5}, ""},
		"a name with a new line":      {stat(7, "a\nb", "D", 5), Process{Start: 5}, ""},
		"exited and not waited for":   {stat(7, "python3", "Z", 5), Process{Start: 5, Exiting: true}, ""},
		"exiting":                     {stat(7, "python3", "X", 5), Process{Start: 5, Exiting: true}, ""},
		"a start that is no number":   {strings.Replace(stat(7, "a", "S", 5), " 5 ", " five ", 1), Process{}, "start time"},
		"a text that ends beforehand": {"7 (a) S 1 2 3\n", Process{}, "only 6 fields"},
		"a text without a name":       {"7 S 1 2 3\n", Process{}, "no program name"},
		"an empty text":               {"", Process{}, "no program name"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			put(t, root, map[string]string{"7/stat": tt.text})
			got, err := ReadProcess(root, 7)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || !strings.Contains(err.Error(), "process 7") {
					t.Errorf("ReadProcess: %v, want %q", err, tt.err)
				}
				return
			}
			if err != nil || got != tt.want {
				t.Errorf("ReadProcess = %+v, %v, want %+v", got, err, tt.want)
			}
		})
	}
	if _, err := ReadProcess(t.TempDir(), 7); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no process: %v", err)
	}
	if _, err := ReadMembership(t.TempDir(), 7); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no process: %v", err)
	}
	root := t.TempDir()
	put(t, root, map[string]string{"7/cgroup": "\n"})
	if _, err := ReadMembership(root, 7); err == nil || !strings.Contains(err.Error(), "process 7") {
		t.Errorf("no groups: %v", err)
	}
}

// TestKernel reads the real processes of the machine.
func TestKernel(t *testing.T) {
	self, err := ReadProcess("/proc", os.Getpid())
	if err != nil || self.Exiting {
		t.Fatalf("own process: %+v, %v", self, err)
	}
	if again, err := ReadProcess("/proc", os.Getpid()); err != nil || again != self {
		t.Errorf("own process again: %+v, %v, want %+v", again, err, self)
	}
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadMembership("/proc", os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), ":"+got.Path) || len(got.Owners) > 0 && !strings.Contains(string(text), "pod") {
		t.Errorf("own groups: %+v of %q", got, text)
	}

	child := exec.CommandContext(t.Context(), "sleep", "60")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	pid := child.Process.Pid
	alive, err := ReadProcess("/proc", pid)
	if err != nil || alive.Exiting || alive.Start < self.Start {
		t.Errorf("child: %+v, %v; own process: %+v", alive, err, self)
	}
	if of, err := ReadMembership("/proc", pid); err != nil || !cmp.Equal(of, got) {
		t.Errorf("groups of the child: %+v, %v, want %+v", of, err, got)
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = child.Wait() // it was killed
	if p, err := ReadProcess("/proc", pid); err == nil && p.Start == alive.Start {
		t.Errorf("a process that has ended: %+v", p)
	}
}
