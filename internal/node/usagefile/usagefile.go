// Package usagefile keeps the last report of measured use in a file: the daemon writes it
// after each pass, and "divvy-node usage" reads it in the same container. It holds one
// report, so that a reader that comes at any time gets a whole one or the reason why there
// is none.
package usagefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// Dir is the folder of the file. The chart mounts memory there: a report is of no use
// after a restart.
const Dir = "/run/divvy"

// name is the file's name in its folder.
const name = "usage.json"

// staleAfter is how many intervals old a report may be.
const staleAfter = 3

// content is what is in the file.
type content struct {
	// Interval is the time between two passes.
	Interval time.Duration `json:"interval"`
	// Started is when the daemon began to measure.
	Started time.Time `json:"started"`
	// Report is nil until the first pass has ended.
	Report *wire.UsageReport `json:"report,omitempty"`
}

// File is the file as the daemon writes it. It is not safe for concurrent use.
type File struct {
	path string
	content
}

// Create begins the file in a folder, which it makes, with no report.
func Create(dir string, interval time.Duration, now time.Time) (*File, error) {
	f := &File{filepath.Join(dir, name), content{Interval: interval, Started: now}}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("folder of the usage report: %w", err)
	}
	err := f.write()
	return f, err
}

// Write replaces the report.
func (f *File) Write(r wire.UsageReport) error {
	f.Report = &r
	return f.write()
}

func (f *File) write() error {
	data, err := json.Marshal(f.content)
	if err == nil {
		_, err = atomicfile.Replace(f.path, data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the usage report: %w", err)
	}
	return nil
}

// Remove takes the file away, which says that use is not measured any more.
func (f *File) Remove() error {
	if err := os.Remove(f.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the usage report: %w", err)
	}
	return nil
}

// Read returns the report in a folder. The error says why there is none that holds now.
func Read(dir string, now time.Time) (wire.UsageReport, error) {
	data, err := os.ReadFile(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return wire.UsageReport{}, errors.New("use is not measured on this node: usage.enabled is false in the configuration of " +
			"divvy-node (node.usage.enabled of the chart)")
	}
	if err != nil {
		return wire.UsageReport{}, fmt.Errorf("read the usage report: %w", err)
	}
	var c content
	if err := json.Unmarshal(data, &c); err != nil {
		return wire.UsageReport{}, fmt.Errorf("read the usage report: %w", err)
	}
	last := c.Started
	if c.Report != nil {
		last = c.Report.Time
	}
	age := now.Sub(last).Round(time.Second)
	switch {
	case c.Report == nil && age <= staleAfter*c.Interval:
		return wire.UsageReport{}, fmt.Errorf("the first pass over the devices has not ended; divvy-node began to measure %v ago", age)
	case c.Report == nil:
		return wire.UsageReport{}, fmt.Errorf("no pass over the devices has ended in %v; the log of divvy-node says why", age)
	case age > staleAfter*c.Interval:
		return wire.UsageReport{}, fmt.Errorf("the last report is %v old, and a pass is due every %v; the log of divvy-node says why",
			age, c.Interval)
	}
	return *c.Report, nil
}
