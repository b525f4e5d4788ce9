package wire

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"unicode/utf8"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// EndingAnnotation is the annotation of a Node that lists pods which the API server
// does not have any more, or calls ended, and whose containers still run there: a
// pod that was deleted by force is gone at once, its containers are not. Until they
// are, no other pod can have what they hold.
const EndingAnnotation = "divvy.dev/ending"

// EndingVersion is the version of the document in EndingAnnotation.
const EndingVersion = 1

// MaxEnding is how many pods are listed.
const MaxEnding = 256

// maxEndingBytes is enough for MaxEnding pods with the longest names, on one device each.
const maxEndingBytes = 192 << 10

// Ending is what one such pod holds of a resource that is counted in memory.
type Ending struct {
	Pod      accel.PodRef
	Resource accel.Resource
	// Units are held in equal parts on each of Devices; on unknown ones when there are
	// none.
	Units   accel.Units
	Devices []accel.DeviceID
}

type endingDoc struct {
	Version int        `json:"v"`
	Pods    []endingV1 `json:"pods"`
}

type endingV1 struct {
	UID       string           `json:"uid"`
	Namespace string           `json:"namespace"`
	Name      string           `json:"name"`
	Resource  accel.Resource   `json:"resource"`
	Units     accel.Units      `json:"units"`
	Devices   []accel.DeviceID `json:"devices,omitempty"`
}

// EncodeEnding returns the annotation's value, "" for no pods: in the order of
// their UIDs and resources. It rejects what DecodeEnding would reject.
func EncodeEnding(pods []Ending) (string, error) {
	if len(pods) == 0 {
		return "", nil
	}
	doc := endingDoc{Version: EndingVersion}
	for _, p := range pods {
		doc.Pods = append(doc.Pods, endingV1{
			UID: p.Pod.UID, Namespace: p.Pod.Namespace, Name: p.Pod.Name, Resource: p.Resource, Units: p.Units, Devices: p.Devices,
		})
	}
	slices.SortFunc(doc.Pods, func(a, b endingV1) int {
		return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.Resource, b.Resource))
	})
	return encode("ending pods", &doc, maxEndingBytes)
}

// DecodeEnding reads the annotation's value; "" is no pods. Its errors are
// *SyntaxError.
func DecodeEnding(s string) ([]Ending, error) {
	if s == "" {
		return nil, nil
	}
	var doc endingDoc
	if err := decode("list of ending pods", s, maxEndingBytes, &doc); err != nil {
		return nil, err
	}
	var out []Ending
	for _, p := range doc.Pods {
		out = append(out, Ending{
			Pod:      accel.PodRef{UID: p.UID, Namespace: p.Namespace, Name: p.Name},
			Resource: p.Resource, Units: p.Units, Devices: p.Devices,
		})
	}
	return out, nil
}

func (doc *endingDoc) validate() error {
	if doc.Version != EndingVersion {
		return versionError(doc.Version, EndingVersion)
	}
	if len(doc.Pods) > MaxEnding {
		return fmt.Errorf("%d pods, at most %d are listed", len(doc.Pods), MaxEnding)
	}
	var errs []error
	for _, p := range doc.Pods {
		for _, f := range []struct{ name, value string }{
			{"uid", p.UID}, {"namespace", p.Namespace}, {"name", p.Name}, {"resource", string(p.Resource)},
		} {
			if f.value == "" || !utf8.ValidString(f.value) {
				errs = append(errs, fmt.Errorf("pod %q: its %s is empty or not valid UTF-8", p.UID, f.name))
			}
		}
		if p.Units <= 0 || p.Units > accel.MaxUnits {
			errs = append(errs, fmt.Errorf("pod %q: %d units, not from 1 to %d", p.UID, p.Units, accel.MaxUnits))
		}
		if len(p.Devices) > MaxDevices {
			errs = append(errs, fmt.Errorf("pod %q: %d devices, at most %d can serve a pod", p.UID, len(p.Devices), MaxDevices))
		}
		for i, id := range p.Devices {
			if id == "" || !utf8.ValidString(string(id)) || slices.Contains(p.Devices[:i], id) {
				errs = append(errs, fmt.Errorf("pod %q: the device %q is empty, not valid UTF-8 or listed twice", p.UID, id))
			}
		}
	}
	return errors.Join(errs...)
}
