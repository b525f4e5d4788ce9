package wire

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// OveruseAnnotation is the annotation of a Node that lists the pods that use more memory of
// a device than their allocation, for the scheduler's side, which may evict them.
const OveruseAnnotation = "divvy.dev/memory-overuse"

// OveruseCondition is the condition of a Node that is true while it has such pods. It is
// there while use is measured.
const OveruseCondition = "DivvyMemoryOveruse"

// OveruseVersion is the version of the document in OveruseAnnotation.
const OveruseVersion = 1

// MaxOveruse is how many are listed.
const MaxOveruse = 128

// maxOveruseBytes is enough for MaxOveruse pods with the longest names.
const maxOveruseBytes = 192 << 10

// OveruseRefresh is how often a node writes its list again while it is not empty and passes
// confirm it, so that a reader can distinguish it from one that a daemon left behind.
const OveruseRefresh = time.Minute

// OveruseList is what a node lists.
type OveruseList struct {
	// Time is that of the pass of measured use that it is from, in whole seconds.
	Time time.Time
	Pods []Overuse
}

// Overuse is a pod that uses more memory of a device than its allocation.
type Overuse struct {
	Pod accel.PodRef
	// Container is the one that does; "" if only the pod's sum is known.
	Container string
	Resource  accel.Resource
	Device    accel.DeviceID
	// AllocatedBytes is the allocation, and UsedBytes what was in use when the list was
	// written, which is more.
	AllocatedBytes, UsedBytes uint64
	// Since is when the uninterrupted overuse began, in whole seconds.
	Since time.Time
}

type overuseDoc struct {
	Version int         `json:"v"`
	Time    time.Time   `json:"time"`
	Pods    []overuseV1 `json:"pods"`
}

type overuseV1 struct {
	UID            string         `json:"uid"`
	Namespace      string         `json:"namespace"`
	Name           string         `json:"name"`
	Container      string         `json:"container,omitempty"`
	Resource       accel.Resource `json:"resource"`
	Device         accel.DeviceID `json:"device"`
	AllocatedBytes uint64         `json:"allocatedBytes"`
	UsedBytes      uint64         `json:"usedBytes"`
	Since          time.Time      `json:"since"`
}

// EncodeOveruse returns the annotation's value, "" for no pods: in the order of their UIDs,
// containers and devices. It rejects what DecodeOveruse would reject.
func EncodeOveruse(list OveruseList) (string, error) {
	if len(list.Pods) == 0 {
		return "", nil
	}
	doc := overuseDoc{Version: OveruseVersion, Time: seconds(list.Time)}
	for _, p := range list.Pods {
		doc.Pods = append(doc.Pods, overuseV1{
			UID: p.Pod.UID, Namespace: p.Pod.Namespace, Name: p.Pod.Name, Container: p.Container, Resource: p.Resource, Device: p.Device,
			AllocatedBytes: p.AllocatedBytes, UsedBytes: p.UsedBytes, Since: seconds(p.Since),
		})
	}
	slices.SortFunc(doc.Pods, func(a, b overuseV1) int {
		return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.Container, b.Container), cmp.Compare(a.Device, b.Device))
	})
	return encode("list of memory overuse", &doc, maxOveruseBytes)
}

// DecodeOveruse reads the annotation's value; "" is no pods. Its errors are *SyntaxError.
func DecodeOveruse(s string) (OveruseList, error) {
	if s == "" {
		return OveruseList{}, nil
	}
	var doc overuseDoc
	if err := decode("list of memory overuse", s, maxOveruseBytes, &doc); err != nil {
		return OveruseList{}, err
	}
	out := OveruseList{Time: seconds(doc.Time)}
	for _, p := range doc.Pods {
		out.Pods = append(out.Pods, Overuse{
			Pod: accel.PodRef{UID: p.UID, Namespace: p.Namespace, Name: p.Name}, Container: p.Container, Resource: p.Resource,
			Device: p.Device, AllocatedBytes: p.AllocatedBytes, UsedBytes: p.UsedBytes, Since: seconds(p.Since),
		})
	}
	return out, nil
}

func (doc *overuseDoc) validate() error {
	if doc.Version != OveruseVersion {
		return versionError(doc.Version, OveruseVersion)
	}
	if len(doc.Pods) > MaxOveruse {
		return fmt.Errorf("%d pods, at most %d are listed", len(doc.Pods), MaxOveruse)
	}
	var errs []error
	for _, p := range doc.Pods {
		for _, f := range []struct{ name, value string }{
			{"uid", p.UID}, {"namespace", p.Namespace}, {"name", p.Name}, {"resource", string(p.Resource)}, {"device", string(p.Device)},
		} {
			if f.value == "" || !utf8.ValidString(f.value) {
				errs = append(errs, fmt.Errorf("pod %q: its %s is empty or not valid UTF-8", p.UID, f.name))
			}
		}
		if !utf8.ValidString(p.Container) {
			errs = append(errs, fmt.Errorf("pod %q: its container is not valid UTF-8", p.UID))
		}
		if p.UsedBytes <= p.AllocatedBytes {
			errs = append(errs, fmt.Errorf("pod %q: it uses %d bytes of %d, which is no overuse", p.UID, p.UsedBytes, p.AllocatedBytes))
		}
	}
	return errors.Join(errs...)
}
