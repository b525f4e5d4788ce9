package nodeconfig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
)

// Times of a Source.
const (
	// quiet is how long files must stay as they are before they are read: an
	// editor writes in several steps, kubelet swaps a link after it wrote.
	quiet = 200 * time.Millisecond
	// latest bounds how long a change waits for quiet.
	latest = 2 * time.Second
	// recheck is how often files are read without being told of a change: a
	// folder may come later, and some file systems tell nothing.
	recheck = 10 * time.Second
)

// DefaultName is the named configuration of nodes without a label. Where it is
// not there, the files alone hold.
const DefaultName = "default"

// SourceOptions are what a Source needs.
type SourceOptions struct {
	Places    Places
	Overrides Overrides
	// Vendors are the names of the backends that there are.
	Vendors []string
	// Node is the name of the node whose label chooses, and Client reaches the
	// API server that has it. They are needed with Places.Dir alone.
	Node   string
	Client kubernetes.Interface
	// Resolve, unless nil, replaces what depends on the node's files and on its container runtime each
	// time that the configuration is read. The runtime is as the node reports it, such as
	// "containerd://2.1.4"; "" without Places.Dir.
	Resolve func(ctx context.Context, c config.NodeConfig, runtime string) config.NodeConfig
}

// Source delivers the configuration of this node and every change of it. Use it
// from one goroutine; Reload may be called from any.
type Source struct {
	o      SourceOptions
	label  *nodeLabel
	events *fsnotify.Watcher
	reload chan struct{}
	// watched are the folders that events come from.
	watched map[string]bool

	last    config.NodeConfig // delivered
	trouble string            // last told
}

// NewSource makes a source that watches nothing yet.
func NewSource(o SourceOptions) (*Source, error) {
	events, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, fmt.Errorf("watch configuration files: %w", err)
	}
	return &Source{o: o, label: newNodeLabel(o.Client, o.Node), events: events, reload: make(chan struct{}, 1), watched: map[string]bool{}},
		nil
}

// Close lets go of the watches. Call it once Run has returned.
func (s *Source) Close() error { return s.events.Close() }

// Reload makes Run read the files again soon, and deliver what they say whether
// or not it changed.
func (s *Source) Reload() {
	select {
	case s.reload <- struct{}{}:
	default:
	}
}

// Update is what Run delivers.
type Update struct {
	Loaded
	// Err says why the configuration as it is now cannot be used. Loaded is
	// empty then, and the configuration that was delivered last goes on.
	Err error
	// Asked is true when Reload was called: the configuration may be the one
	// that was delivered last.
	Asked bool
}

// Run follows the files and the node's label until ctx ends. It calls deliver
// with each configuration that is good and differs from the one before, with
// each new reason why there is none, and with either whenever Reload asks. Before the first good one a reason
// ends Run: it is returned and not delivered.
func (s *Source) Run(ctx context.Context, deliver func(Update)) error {
	if s.o.Places.Dir != "" {
		ended := make(chan struct{})
		defer func() { <-ended }()
		follow, stop := context.WithCancel(ctx)
		defer stop()
		go func() {
			defer close(ended)
			s.label.Run(follow)
		}()
		if err := s.label.await(ctx); err != nil {
			return err
		}
	}
	s.watch(ctx)
	first, err := s.first(ctx)
	if err != nil {
		return err
	}
	s.last = first.Config
	deliver(Update{Loaded: first})
	for {
		forced, err := s.change(ctx)
		if err != nil {
			return nil // ctx ended, which is no failure
		}
		s.watch(ctx)
		s.read(ctx, forced, deliver)
	}
}

// first loads the configuration for the first time. A label that names no
// configuration is reason enough to complain, not to leave the node without
// any: it gets the default one.
func (s *Source) first(ctx context.Context) (Loaded, error) {
	files, err := s.files()
	var unknown *unknownNameError
	if errors.As(err, &unknown) {
		klog.FromContext(ctx).Error(err, "The node's label names no configuration; using the default one", "configuration", DefaultName)
		s.trouble = err.Error()
		files, err = s.unnamed()
		if err != nil {
			return Loaded{}, errors.Join(unknown, err)
		}
	}
	if err != nil {
		return Loaded{}, err
	}
	l, err := s.load(ctx, files)
	if err == nil && unknown != nil {
		l.Warnings = append(l.Warnings, unknown.Error()+"; that of nodes without a label is used")
	}
	return l, err
}

// load is the function Load, with what depends on the node resolved.
func (s *Source) load(ctx context.Context, files []string) (Loaded, error) {
	l, err := Load(files, s.o.Overrides, s.o.Vendors)
	if err == nil && s.o.Resolve != nil {
		l.Config = s.o.Resolve(ctx, l.Config, s.label.containerRuntime())
	}
	return l, err
}

// read loads the configuration again and tells what is new about it.
func (s *Source) read(ctx context.Context, forced bool, deliver func(Update)) {
	log := klog.FromContext(ctx)
	files, err := s.files()
	var l Loaded
	if err == nil {
		l, err = s.load(ctx, files)
	}
	if err != nil {
		if forced || err.Error() != s.trouble {
			s.trouble = err.Error()
			deliver(Update{Err: err, Asked: forced})
		}
		return
	}
	same := reflect.DeepEqual(l.Config, s.last)
	if same && s.trouble != "" && !forced {
		log.Info("The configuration is valid again and unchanged", "files", files)
	}
	s.trouble = ""
	if !same || forced {
		s.last = l.Config
		deliver(Update{Loaded: l, Asked: forced})
	}
}

// change waits until something may have changed and is at rest. It reports
// whether somebody asked for it.
func (s *Source) change(ctx context.Context) (forced bool, err error) {
	ticker := time.NewTicker(recheck)
	defer ticker.Stop()
	var rest, limit <-chan time.Time
	noticed := func() {
		rest = time.After(quiet)
		if limit == nil {
			limit = time.After(latest)
		}
	}
	for {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-s.reload:
			return true, nil
		case <-ticker.C:
			return false, nil
		case <-rest:
			return false, nil
		case <-limit:
			return false, nil
		case <-s.label.changed:
			noticed()
		case e, ok := <-s.events.Events:
			if !ok {
				return false, fsnotify.ErrClosed
			}
			if s.concerns(e) {
				noticed()
			}
		case err, ok := <-s.events.Errors:
			if !ok {
				return false, fsnotify.ErrClosed
			}
			// Events were lost, or a folder is gone. Reading finds out.
			klog.FromContext(ctx).Error(err, "Watching configuration files; reading them again")
			noticed()
		}
	}
}

// dataLink is the link that kubelet swaps when a mounted ConfigMap changes.
const dataLink = "..data"

// concerns reports whether an event may be about a file that is read.
func (s *Source) concerns(e fsnotify.Event) bool {
	if e.Op == fsnotify.Chmod {
		return false
	}
	folder, base := filepath.Split(e.Name)
	folder = filepath.Clean(folder)
	if base == dataLink || s.o.Places.Dir != "" && folder == filepath.Clean(s.o.Places.Dir) {
		return true
	}
	return slices.ContainsFunc(s.o.Places.Files, func(f string) bool {
		return filepath.Clean(f) == filepath.Clean(e.Name) || filepath.Dir(f) == filepath.Clean(e.Name)
	})
}

// watch sees to it that events come from the folders of all files. Folders and
// not files are watched, since a file is replaced rather than written.
func (s *Source) watch(ctx context.Context) {
	folders := map[string]bool{}
	if s.o.Places.Dir != "" {
		folders[filepath.Clean(s.o.Places.Dir)] = true
	}
	for _, f := range s.o.Places.Files {
		folders[filepath.Dir(f)] = true
	}
	alive := s.events.WatchList()
	for folder := range folders {
		if slices.Contains(alive, folder) {
			continue
		}
		err := s.events.Add(folder)
		if err != nil && !s.watched[folder] {
			klog.FromContext(ctx).Info("A folder of configurations cannot be watched; its files are read from time to time",
				"folder", folder, "every", recheck, "err", err)
		}
		s.watched[folder] = true
	}
}

// files returns the files that make the configuration now.
func (s *Source) files() ([]string, error) {
	if s.o.Places.Dir == "" {
		return s.o.Places.Files, nil
	}
	label, name := s.label.chosen()
	if name == "" {
		return s.unnamed()
	}
	files, err := s.named(name)
	if err != nil {
		return nil, &unknownNameError{label: label, err: err}
	}
	return files, nil
}

// unnamed returns the files of a node whose labels name none: with the default
// configuration last, or without where there is none and the files say enough.
func (s *Source) unnamed() ([]string, error) {
	files, err := s.named(DefaultName)
	if err != nil && len(s.o.Places.Files) > 0 {
		return s.o.Places.Files, nil
	}
	return files, err
}

// named returns the files with the named configuration last.
func (s *Source) named(name string) ([]string, error) {
	path := filepath.Join(s.o.Places.Dir, name)
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() || name != filepath.Base(path) || strings.HasPrefix(name, ".") {
		return nil, fmt.Errorf("there is no configuration %q in %s; there are: %s", name, s.o.Places.Dir, strings.Join(s.names(), ", "))
	}
	return append(slices.Clone(s.o.Places.Files), path), nil
}

// names lists the named configurations.
func (s *Source) names() []string {
	entries, err := os.ReadDir(s.o.Places.Dir)
	if err != nil {
		return []string{err.Error()}
	}
	var out []string
	for _, e := range entries {
		if info, err := os.Stat(filepath.Join(s.o.Places.Dir, e.Name())); err == nil && info.Mode().IsRegular() &&
			!strings.HasPrefix(e.Name(), ".") {
			out = append(out, e.Name())
		}
	}
	if len(out) == 0 {
		return []string{"none"}
	}
	return out
}

// unknownNameError says that the node's label names no configuration.
type unknownNameError struct {
	label string
	err   error
}

func (e *unknownNameError) Error() string {
	return fmt.Sprintf("label %s of the node: %v", e.label, e.err)
}

func (e *unknownNameError) Unwrap() error { return e.err }
