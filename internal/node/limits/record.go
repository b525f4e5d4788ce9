package limits

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/cgroup"
	"github.com/divvy-gpu/divvy/internal/platform/atomicfile"
)

// RecordDir is the folder of records on the host. It is lost with the host's memory, as all
// containers are.
const RecordDir = "/run/divvy/limits"

// Record says that a container has had a limit since before its first program. It is no
// source of amounts: those are the ledger's.
type Record struct {
	// Container is the runtime's id of the container.
	Container string `json:"container"`
	// Group is the path of its control group, and Inode that of the folder: a container that
	// is made later has another one.
	Group string `json:"group"`
	Inode uint64 `json:"inode"`

	Device accel.DeviceID `json:"device"`
	Bytes  uint64         `json:"bytes"`
	// Time is when the limit was set, in whole seconds.
	Time time.Time `json:"time"`
	// Lost is when the limit was found missing or different, which it may have been
	// for a while; the zero time for never. The container may have allocated more.
	Lost time.Time `json:"lost,omitzero"`
}

// recordSuffix ends the names of records.
const recordSuffix = ".json"

// name is the name of the record's file.
func (r Record) name() string { return fmt.Sprintf("%s.%s%s", r.Container, r.Device, recordSuffix) }

// Write writes a record into a folder, which it makes if need be.
func (r Record) Write(dir string) error {
	if !containerID.MatchString(r.Container) || strings.ContainsRune(string(r.Device), filepath.Separator) {
		return fmt.Errorf("record the memory limit of container %q on device %q: not valid in a file's name", r.Container, r.Device)
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("record the memory limit: %w", err)
	}
	if _, err := atomicfile.Replace(filepath.Join(dir, r.name()), append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("record the memory limit: %w", err)
	}
	return nil
}

// maxRecord is more than a record has, in bytes.
const maxRecord = 64 << 10

// ReadRecords returns the records in a folder, and removes those whose control group does not
// exist any more below cgroupRoot. A folder that does not exist has none. The error says
// which records could not be read; the others are returned.
func ReadRecords(dir, cgroupRoot string) ([]Record, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the records of memory limits: %w", err)
	}
	var records []Record
	var failed []error
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), recordSuffix) {
			continue // being written
		}
		path := filepath.Join(dir, e.Name())
		r, err := readRecord(path)
		if err == nil {
			var inode uint64
			if inode, err = cgroup.Inode(filepath.Join(cgroupRoot, r.Group)); err == nil && inode == r.Inode {
				records = append(records, r)
				continue
			}
			if err == nil || errors.Is(err, fs.ErrNotExist) {
				err = os.Remove(path)
			}
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = append(failed, fmt.Errorf("record of a memory limit: %w", err))
		}
	}
	return records, errors.Join(failed...)
}

func readRecord(path string) (r Record, err error) {
	info, err := os.Lstat(path)
	if err != nil {
		return r, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxRecord {
		return r, fmt.Errorf("%s is not a file of at most %d bytes", path, maxRecord)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("%s: %w", path, err)
	}
	if r.name() != filepath.Base(path) {
		return r, fmt.Errorf("%s is the record of container %q on device %q", path, r.Container, r.Device)
	}
	return r, nil
}

// Owner is the id of the container that the record's control group is named after, which is how
// the daemon knows containers.
func (r Record) Owner() string {
	owners := cgroup.Owners(r.Group)
	if len(owners) == 0 {
		return ""
	}
	return owners[len(owners)-1].Container
}
