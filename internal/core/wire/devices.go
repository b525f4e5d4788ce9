package wire

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// HeldAnnotation is the annotation of a Pod that says which whole devices
// and time slices it holds: a JSON object of the resources, each with a list of
// the ids that kubelet counts, "<uuid>" or "<uuid>::<replica>". The node writes
// it after kubelet has handed them out. It is for people and reports; nothing
// is decided by it, because whoever may write the pod may write it too.
const HeldAnnotation = "divvy.dev/held"

// HeldOf returns the text of the annotation that says what a pod holds, ""
// when there is none. Nodes of earlier releases write it under the name that
// asks for several devices now; a number there is no list.
func HeldOf(annotations map[string]string) string {
	if held, ok := annotations[HeldAnnotation]; ok {
		return held
	}
	if earlier := annotations[CountAnnotation]; IsHeld(earlier) {
		return earlier
	}
	return ""
}

// IsHeld reports whether a value of CountAnnotation is what a node of an
// earlier release wrote about the devices that the pod holds.
func IsHeld(value string) bool { return strings.HasPrefix(value, "{") }

const (
	// maxDevicesBytes is enough for some thousand ids of 40 characters.
	maxDevicesBytes = 64 << 10
	maxIDBytes      = 256
)

// DecodeDevices reads the annotation's value; "" is an empty map. Ids come
// sorted, each once. Its errors are *SyntaxError.
func DecodeDevices(s string) (map[accel.Resource][]string, error) {
	out := map[accel.Resource][]string{}
	if s == "" {
		return out, nil
	}
	var doc heldDoc
	if err := decode("list of devices", s, maxDevicesBytes, &doc); err != nil {
		return nil, err
	}
	for resource, ids := range doc {
		if len(ids) > 0 {
			slices.Sort(ids)
			out[resource] = slices.Compact(ids)
		}
	}
	return out, nil
}

type heldDoc map[accel.Resource][]string

func (doc heldDoc) validate() error {
	for resource, ids := range doc {
		if resource == "" || len(resource) > maxIDBytes || !utf8.ValidString(string(resource)) {
			return errors.New("a resource has no name, or one that is too long or not valid UTF-8")
		}
		for _, id := range ids {
			if id == "" || len(id) > maxIDBytes || strings.ContainsFunc(id, foreignToIDs) {
				return fmt.Errorf("resource %q: an id is empty, longer than %d bytes or has characters other than letters, digits and "+
					"-_.: in it", resource, maxIDBytes)
			}
		}
	}
	return nil
}

// foreignToIDs reports whether no id that a node gives out has the character.
// Ids are printed, and whoever may write a pod may write the annotation: what a
// terminal would obey must not get there.
func foreignToIDs(c rune) bool {
	letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
	return !letter && !strings.ContainsRune("-_.:", c)
}
