// Package snapshot notes all objects of a cluster and files of a host, to be
// compared with those of another time. What changes by itself is left out, each
// thing by name and with the reason, so that nothing else can hide behind it.
package snapshot

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
)

// Snapshot is what there was, by name: the text of an object, or what a file is.
type Snapshot map[string]string

// Exception is something that changes by itself.
type Exception struct {
	// Kind, Namespace and Name are those of objects; empty ones stand for all.
	Kind, Namespace, Name string
	// Fields are paths in the object that are left out, such as spec, renewTime;
	// "*" stands for every element of a list or every key. Without any, the object
	// is left out.
	Fields [][]string
	// Reason is for the reader.
	Reason string
}

func (e Exception) matches(o *unstructured.Unstructured) bool {
	return (e.Kind == "" || e.Kind == o.GetKind()) && (e.Namespace == "" || e.Namespace == o.GetNamespace()) &&
		(e.Name == "" || e.Name == o.GetName())
}

// whole reports whether all objects of a kind are left out.
func (e Exception) whole(kind string) bool {
	return e.Kind == kind && e.Namespace == "" && e.Name == "" && len(e.Fields) == 0
}

// Always are the exceptions that hold in every cluster.
var Always = []Exception{
	{Fields: [][]string{{"metadata", "resourceVersion"}, {"metadata", "managedFields"}},
		Reason: "they count and note writes, also those that change nothing"},
	{Kind: "Event", Reason: "events expire by themselves"},
	{Kind: "ComponentStatus", Reason: "it is no object, but what the API server sees when it is asked"},
	{Kind: "Endpoints", Reason: "the older form of EndpointSlices, which are compared"},
	{Kind: "Lease", Fields: [][]string{{"spec", "renewTime"}}, Reason: "its holder renews it"},
	{Kind: "Node", Fields: [][]string{{"status", "conditions", "*", "lastHeartbeatTime"}}, Reason: "kubelet's heartbeat"},
	{Kind: "Node", Fields: [][]string{{"status", "images"}}, Reason: "images stay on a node until kubelet needs their room"},
}

// Objects lists every object of the cluster that can be listed.
func Objects(ctx context.Context, config *rest.Config, exceptions ...Exception) (Snapshot, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 100, 200
	finder, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("client of the API server: %w", err)
	}
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("client of the API server: %w", err)
	}
	lists, err := finder.ServerPreferredResources()
	if err != nil {
		return nil, fmt.Errorf("list the kinds of objects: %w", err)
	}
	exceptions = slices.Concat(Always, exceptions)
	out := Snapshot{}
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, fmt.Errorf("list the kinds of objects: %w", err)
		}
		for _, kind := range list.APIResources {
			if !slices.Contains(kind.Verbs, "list") || strings.Contains(kind.Name, "/") ||
				slices.ContainsFunc(exceptions, func(e Exception) bool { return e.whole(kind.Kind) }) {
				continue
			}
			objects, err := client.Resource(version.WithResource(kind.Name)).List(ctx, metav1.ListOptions{})
			if apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err) {
				continue
			}
			if err != nil {
				return nil, fmt.Errorf("list %s of %s: %w", kind.Name, version, err)
			}
			for i := range objects.Items {
				if err := out.add(&objects.Items[i], exceptions); err != nil {
					return nil, err
				}
			}
		}
	}
	return out, nil
}

// add notes an object.
func (s Snapshot) add(o *unstructured.Unstructured, exceptions []Exception) error {
	o = o.DeepCopy()
	for _, e := range exceptions {
		if !e.matches(o) {
			continue
		}
		if len(e.Fields) == 0 {
			return nil
		}
		for _, path := range e.Fields {
			drop(o.Object, path)
		}
	}
	text, err := json.MarshalIndent(o.Object, "", " ") // sorts the keys
	if err != nil {
		return fmt.Errorf("%s %s: %w", o.GetKind(), o.GetName(), err)
	}
	s[strings.TrimSuffix(fmt.Sprintf("%s %s %s/%s", o.GetAPIVersion(), o.GetKind(), o.GetNamespace(), o.GetName()), "/")] = string(text)
	return nil
}

// drop takes a field out of an object.
func drop(value any, path []string) {
	switch v := value.(type) {
	case map[string]any:
		if len(path) == 1 && path[0] != "*" {
			delete(v, path[0])
			return
		}
		for key, inner := range v {
			switch {
			case path[0] != "*" && path[0] != key:
			case len(path) == 1:
				delete(v, key)
			default:
				drop(inner, path[1:])
			}
		}
	case []any:
		if path[0] == "*" && len(path) > 1 {
			for _, inner := range v {
				drop(inner, path[1:])
			}
		}
	}
}

// Files notes what is below the folders: type, mode, owner, and the content of
// files and links. What is not there is noted too. Paths in without are left out,
// with all below them.
func Files(folders, without []string) (Snapshot, error) {
	out := Snapshot{}
	for _, folder := range folders {
		err := filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				if path == folder {
					out[path] = "not there"
				}
				return nil
			}
			if err != nil {
				return err
			}
			if slices.Contains(without, path) {
				if e.IsDir() {
					return fs.SkipDir
				}
				return nil
			}
			text, err := describe(path)
			if errors.Is(err, fs.ErrNotExist) {
				return nil // it went while it was looked at
			}
			out[path] = text
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("look at %s: %w", folder, err)
		}
	}
	return out, nil
}

// describe says what a file is.
func describe(path string) (string, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return "", err
	}
	text := info.Mode().String()
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		text += fmt.Sprintf(" %d:%d", stat.Uid, stat.Gid)
	}
	switch {
	case info.Mode().IsRegular():
		content, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		sum := sha256.Sum256(content)
		text += fmt.Sprintf(" %d bytes, %s", len(content), hex.EncodeToString(sum[:8]))
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := os.Readlink(path)
		if err != nil {
			return "", err
		}
		text += " to " + target
	}
	return text, nil
}

// Diff says what differs, in order.
func Diff(before, after Snapshot) []string {
	var out []string
	for name, was := range before {
		is, there := after[name]
		switch {
		case !there:
			out = append(out, name+": is gone")
		case is != was:
			out = append(out, fmt.Sprintf("%s: differs (-before +after):\n%s", name,
				cmp.Diff(strings.Split(was, "\n"), strings.Split(is, "\n"))))
		}
	}
	for name := range after {
		if _, there := before[name]; !there {
			out = append(out, name+": was not there")
		}
	}
	slices.Sort(out)
	return out
}
