package logging

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/klog/v2"
)

func TestSetupWritesEverywhere(t *testing.T) {
	var console bytes.Buffer
	file := filepath.Join(t.TempDir(), "deep", "divvy.log")
	logger, closeLog := Setup(Options{File: file, Format: JSON, Stderr: &console})

	logger.Info("first", "node", "n1")
	klog.InfoS("second", "node", "n2")                                                // client-go's way
	klog.FromContext(context.Background()).Error(errors.New("boom"), "third", "n", 3) // ours
	logger.V(4).Info("hidden")
	if err := closeLog(); err != nil {
		t.Fatal(err)
	}

	onDisk, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(onDisk, console.Bytes()) {
		t.Errorf("file and console differ:\n%s\n%s", onDisk, console.Bytes())
	}
	var messages []string
	for line := range bytes.Lines(onDisk) {
		var entry struct{ Msg, Source, Err, Level string }
		if err := json.Unmarshal(line, &entry); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		if !strings.HasPrefix(entry.Source, "logging_test.go:") {
			t.Errorf("line %q: source %q, want a line of this file", line, entry.Source)
		}
		if entry.Msg == "third" && (entry.Err != "boom" || entry.Level != "ERROR") {
			t.Errorf("error line %q lacks its error or level", line)
		}
		messages = append(messages, entry.Msg)
	}
	if got := strings.Join(messages, " "); got != "first second third" {
		t.Errorf("messages %q, want %q", got, "first second third")
	}
}

func TestLevelReachesKlog(t *testing.T) {
	var console bytes.Buffer
	_, closeLog := Setup(Options{Level: slog.LevelDebug, Stderr: &console})
	defer closeLog() //nolint:errcheck // no file, nothing to close
	klog.V(4).InfoS("shown")
	klog.V(5).InfoS("hidden")
	if got := console.String(); !strings.Contains(got, "msg=shown") || strings.Contains(got, "hidden") {
		t.Errorf("debug level wrote %q", got)
	}
	Setup(Options{Stderr: &console}) // back to info, for other tests
}

type brokenFile struct{ broken bool }

func (f *brokenFile) Write(p []byte) (int, error) {
	if f.broken {
		return 0, errors.New("no space left on device")
	}
	return len(p), nil
}

func TestOutputSurvivesBrokenFile(t *testing.T) {
	var console bytes.Buffer
	file := &brokenFile{broken: true}
	w := &Output{console: &console, file: file, name: "x.log"}
	for _, line := range []string{"one\n", "two\n"} {
		if n, err := w.Write([]byte(line)); n != len(line) || err != nil {
			t.Errorf("Write(%q) = %d, %v", line, n, err)
		}
	}
	file.broken = false
	if _, err := w.Write([]byte("three\n")); err != nil {
		t.Error(err)
	}
	want := "one\n" +
		"cannot write log file x.log, logging to standard error only: no space left on device\n" +
		"two\nthree\nwriting log file x.log again\n"
	if got := console.String(); got != want {
		t.Errorf("console:\n%swant:\n%s", got, want)
	}
}

func TestOutputMovesToAnotherFile(t *testing.T) {
	var console bytes.Buffer
	var level slog.LevelVar
	out := NewOutput(&console)
	logger, _ := Setup(Options{Level: &level, Stderr: out})
	one, two := filepath.Join(t.TempDir(), "one.log"), filepath.Join(t.TempDir(), "two.log")
	logger.Info("first")
	for _, file := range []string{one, one, two} {
		if err := out.CopyTo(file); err != nil {
			t.Fatal(err)
		}
		logger.Info("to", "file", filepath.Base(file))
	}
	level.Set(slog.LevelError)
	logger.Info("hidden")
	if err := out.CopyTo(""); err != nil {
		t.Fatal(err)
	}
	level.Set(slog.LevelDebug)
	SetVerbosity(level.Level())
	klog.V(4).InfoS("shown")
	Setup(Options{Stderr: &console}) // back to info, for other tests
	for file, want := range map[string]int{one: 2, two: 1} {
		if data, err := os.ReadFile(file); err != nil || bytes.Count(data, []byte("\n")) != want {
			t.Errorf("%s: %v\n%s", file, err, data)
		}
	}
	if got := console.String(); strings.Count(got, "\n") != 5 || strings.Contains(got, "hidden") || !strings.Contains(got, "shown") {
		t.Errorf("console:\n%s", got)
	}
}

func TestParse(t *testing.T) {
	if l, err := ParseLevel("debug"); l != slog.LevelDebug || err != nil {
		t.Errorf("ParseLevel(debug) = %v, %v", l, err)
	}
	_, err := ParseLevel("loud")
	if want := `log level "loud": must be one of error, warn, info, debug, trace`; err == nil || err.Error() != want {
		t.Errorf("ParseLevel(loud): %v, want %s", err, want)
	}
	if f, err := ParseFormat("json"); f != JSON || err != nil {
		t.Errorf("ParseFormat(json) = %v, %v", f, err)
	}
	_, err = ParseFormat("xml")
	if want := `log format "xml": must be one of text, json`; err == nil || err.Error() != want {
		t.Errorf("ParseFormat(xml): %v, want %s", err, want)
	}
}

// A log that grows without end fills the host's disk, which ends every pod of
// the node.
func TestFileOnTheHostIsRotated(t *testing.T) {
	dir := t.TempDir()
	logger, closeLog := Setup(Options{File: filepath.Join(dir, "divvy.log"), MaxSizeMB: 1, Stderr: &bytes.Buffer{}})
	text := strings.Repeat("x", 1<<10)
	for range 3 << 10 {
		logger.Info(text)
	}
	if err := closeLog(); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 3 {
		t.Errorf("3 MB of lines went to %d files of 1 MB", len(files))
	}
	for _, f := range files {
		info, err := f.Info()
		if err != nil {
			t.Fatal(err)
		}
		if info.Size() > 1<<20 {
			t.Errorf("%s has %d bytes", f.Name(), info.Size())
		}
	}
}
