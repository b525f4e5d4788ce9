// Package logging sets up the one logger of a program: structured lines to
// standard error and, when asked for, to a rotated file that outlives the
// container.
//
// The logger also becomes klog's, so what client-go says arrives in the same
// place and form, and klog.FromContext finds it without further wiring.
//
// A log is never a reason to stop: when the file cannot be written, say because
// the disk is full, lines still go to standard error, which tells once that the
// file is missing them and once that it recovered.
package logging

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/go-logr/logr"
	"gopkg.in/natefinch/lumberjack.v2"
	"k8s.io/klog/v2"
)

// Format is the form of a log line.
type Format string

// The formats.
const (
	// Text is key=value, for people.
	Text Format = "text"
	// JSON is one object per line, for machines.
	JSON Format = "json"
)

// Defaults of Options.
const (
	DefaultMaxSizeMB  = 50
	DefaultMaxBackups = 5
)

// Options says where log lines go and which are kept. The zero value logs text
// of level info to standard error.
type Options struct {
	// File receives a copy of every line; "" for none. Its folder is created.
	File string
	// MaxSizeMB is the size in MB at which the file is rotated, 0 for
	// DefaultMaxSizeMB.
	MaxSizeMB int
	// MaxBackups is how many rotated files are kept, 0 for DefaultMaxBackups.
	MaxBackups int
	// Level is the least severe level that is written, nil for info; see
	// ParseLevel. A *slog.LevelVar may change it later, see SetVerbosity.
	Level slog.Leveler
	// Format is the form of a line, "" for Text.
	Format Format
	// Stderr replaces os.Stderr, for tests.
	Stderr io.Writer
}

// levels in the order in which an error message lists them.
var levels = []struct {
	name  string
	level slog.Level
}{
	{"error", slog.LevelError},
	{"warn", slog.LevelWarn},
	{"info", slog.LevelInfo},
	{"debug", slog.LevelDebug}, // logr's V(4) and below
	{"trace", -8},              // logr's V(8) and below: client-go shows its requests
}

// ParseLevel turns the name of a level, one of error, warn, info, debug and
// trace, into the level.
func ParseLevel(name string) (slog.Level, error) {
	var names []string
	for _, l := range levels {
		if l.name == name {
			return l.level, nil
		}
		names = append(names, l.name)
	}
	return 0, fmt.Errorf("log level %q: must be one of %s", name, strings.Join(names, ", "))
}

// ParseFormat checks the name of a format, text or json.
func ParseFormat(name string) (Format, error) {
	if f := Format(name); slices.Contains([]Format{Text, JSON}, f) {
		return f, nil
	}
	return "", fmt.Errorf("log format %q: must be one of %s, %s", name, Text, JSON)
}

// Setup builds the logger, installs it as klog's and slog's default, and
// returns it with a function that closes the file. Call it once, before other
// goroutines log: klog's logger must not be replaced while it is used.
func Setup(o Options) (logr.Logger, func() error) {
	stderr := o.Stderr
	if stderr == nil {
		stderr = os.Stderr
	}
	out, closeFile := stderr, func() error { return nil }
	if o.File != "" {
		output := NewOutput(stderr)
		_ = output.copyTo(o.File, o) // nothing is open that could fail to close
		out, closeFile = output, output.Close
	}
	level := o.Level
	if level == nil {
		level = slog.LevelInfo
	}

	handlerOptions := &slog.HandlerOptions{Level: level, AddSource: true, ReplaceAttr: shorten}
	var handler slog.Handler = slog.NewTextHandler(out, handlerOptions)
	if o.Format == JSON {
		handler = slog.NewJSONHandler(out, handlerOptions)
	}

	logger := slog.New(handler)
	slog.SetDefault(logger)
	klog.SetSlogLogger(logger)
	SetVerbosity(level.Level())
	return logr.FromSlogHandler(handler), closeFile
}

// SetVerbosity makes klog.V(n) agree with a level that changed after Setup. klog
// has no function for it, only its flag.
func SetVerbosity(level slog.Level) {
	fs := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(fs)
	// The value is a number, which is all that the flag asks for.
	_ = fs.Set("v", strconv.Itoa(max(0, -int(level))))
}

// shorten turns the source position into file.go:123. The whole path of the
// build machine says nothing to a reader.
func shorten(_ []string, a slog.Attr) slog.Attr {
	if src, ok := a.Value.Any().(*slog.Source); ok && a.Key == slog.SourceKey && src != nil {
		a.Value = slog.StringValue(filepath.Base(src.File) + ":" + strconv.Itoa(src.Line))
	}
	return a
}

// Output writes every line to the console and to a file, neither of which can
// keep the line from the other. It is the Stderr of a program that learns the
// name of its log file only after Setup. It is safe for concurrent use.
type Output struct {
	console io.Writer

	mu     sync.Mutex // guards what follows and keeps lines whole
	file   io.Writer  // nil for none
	name   string
	failed bool // the last write to file failed
}

// NewOutput returns an output without a file.
func NewOutput(console io.Writer) *Output { return &Output{console: console} }

// CopyTo makes lines go to the named file too, rotated by the defaults, instead
// of the one before; "" for none.
func (t *Output) CopyTo(name string) error { return t.copyTo(name, Options{}) }

func (t *Output) copyTo(name string, o Options) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if name == t.name {
		return nil
	}
	err := t.closeFile()
	if name != "" {
		t.name, t.file = name, &lumberjack.Logger{
			Filename:   name,
			MaxSize:    cmp.Or(o.MaxSizeMB, DefaultMaxSizeMB),
			MaxBackups: cmp.Or(o.MaxBackups, DefaultMaxBackups),
			LocalTime:  false,
		}
	}
	return err
}

// Close closes the file; lines still go to the console.
func (t *Output) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.closeFile()
}

// closeFile closes the file; the caller holds mu.
func (t *Output) closeFile() error {
	file := t.file
	t.file, t.name, t.failed = nil, "", false
	if c, ok := file.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

func (t *Output) Write(line []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	// The console's error has nowhere to be told.
	_, _ = t.console.Write(line)
	if t.file == nil {
		return len(line), nil
	}
	_, err := t.file.Write(line)
	switch {
	case err != nil && !t.failed:
		fmt.Fprintf(t.console, "cannot write log file %s, logging to standard error only: %v\n", t.name, err)
	case err == nil && t.failed:
		fmt.Fprintf(t.console, "writing log file %s again\n", t.name)
	}
	t.failed = err != nil
	return len(line), nil
}
