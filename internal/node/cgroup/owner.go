// Package cgroup reads control groups of the kernel: which pod and which container a
// process belongs to, which processes pods have, and which pods have any. It reads
// versions 1 and 2, groups made by systemd and by kubelet and the container runtime
// themselves, and the names that containerd, CRI-O and cri-dockerd give them.
//
// Groups are recognized by the elements of their paths, never by whole paths, because
// kubelet's own root can be at any depth. All functions only read, and are safe for
// concurrent use.
package cgroup

import (
	"errors"
	"slices"
	"strings"
)

// Owner is the pod, and the container of it, that a control group belongs to.
type Owner struct {
	// PodUID is the UID in the name of the group: the pod's UID, a UUID, or of a static
	// pod the hash that kubelet made of it, 32 hex digits.
	PodUID string
	// Container is the runtime's id of the container, 64 hex digits; "" for processes of
	// the pod that are in none, such as CRI-O's conmon. It may be the pod's sandbox.
	Container string
}

// Owners returns what the group with a path belongs to, the outermost first. It is
// empty outside of pods, and longer than one where a kubelet runs in a pod of another.
// Groups below that of a container, such as those of systemd in it, belong to the
// container.
func Owners(path string) []Owner {
	var owners []Owner
	decided := false // of the last of owners
	// A runtime that was configured for cgroupfs while kubelet uses systemd's names makes
	// one element of three: "kubepods-pod<uid>.slice:cri-containerd:<id>".
	for element := range strings.FieldsFuncSeq(path, func(r rune) bool { return r == '/' || r == ':' }) {
		if uid, ok := podUID(element); ok && validUID(uid) {
			owners, decided = append(owners, Owner{PodUID: uid}), false
			continue
		}
		if len(owners) == 0 || decided {
			continue
		}
		owners[len(owners)-1].Container, decided = containerID(element)
	}
	return owners
}

// podUID returns the UID in a name that kubelet gives the group of a pod, which is
// not validated.
func podUID(name string) (uid string, ok bool) {
	slice, systemd := strings.CutSuffix(name, ".slice")
	if !systemd {
		return strings.CutPrefix(name, "pod")
	}
	if i := strings.LastIndex(slice, "-pod"); i >= 0 {
		slice = slice[i+1:]
	}
	uid, ok = strings.CutPrefix(slice, "pod")
	return strings.ReplaceAll(uid, "_", "-"), ok // systemd reads "-" as "/"
}

// validUID reports whether a UID is one that the API server or kubelet makes.
func validUID(uid string) bool {
	const uuid = "00000000-0000-0000-0000-000000000000"
	if len(uid) != len(uuid) {
		return len(uid) == 32 && isHex(uid)
	}
	for i := range len(uuid) {
		if uuid[i] == '-' != (uid[i] == '-') {
			return false
		}
	}
	return isHex(strings.ReplaceAll(uid, "-", ""))
}

// containerIDLength is the number of hex digits in a container's id.
const containerIDLength = 64

// containerID returns the id in a name that a container runtime gives a group in that
// of a pod: "<id>", "crio-<id>", "cri-containerd-<id>.scope". ok is false if there is
// none; it is true with an empty id for CRI-O's monitor of a container, which is not in
// the container.
func containerID(name string) (id string, ok bool) {
	name = strings.TrimSuffix(name, ".scope")
	if len(name) < containerIDLength {
		return "", false
	}
	prefix, id := name[:len(name)-containerIDLength], name[len(name)-containerIDLength:]
	if !isHex(id) || prefix != "" && !strings.HasSuffix(prefix, "-") && !strings.HasSuffix(prefix, "_") {
		return "", false
	}
	if strings.HasSuffix(prefix, "conmon-") {
		return "", true
	}
	return id, true
}

// isHex reports whether all of a text is hex digits as kubelet and runtimes write
// them, in lower case.
func isHex(s string) bool {
	for i := range len(s) {
		if (s[i] < '0' || s[i] > '9') && (s[i] < 'a' || s[i] > 'f') {
			return false
		}
	}
	return true
}

// Membership is the part of /proc/<pid>/cgroup that says whose a process is.
type Membership struct {
	// Path is that of the group that decided.
	Path string
	// Owners are as Owners returns them.
	Owners []Owner
	// Hidden is true if Owners is empty because the reader is in a cgroup namespace of its
	// own, which hides the names of the groups above; Members finds the process then.
	Hidden bool
}

// controllers are those whose groups are read in version 1, in this order; all that
// makes groups for containers uses them. "" stands for version 2.
var controllers = []string{"", "memory", "pids", "cpu", "name=systemd"}

// Parse reads the text of /proc/<pid>/cgroup. The first hierarchy that has the process
// in a pod decides: on a node with version 1, that of version 2 may exist and be empty.
// It is an error if none is listed.
func Parse(text string) (Membership, error) {
	paths := make([]string, len(controllers))
	for line := range strings.Lines(text) {
		_, rest, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ":")
		names, path, ok := strings.Cut(rest, ":")
		if !ok || !strings.HasPrefix(path, "/") {
			continue
		}
		for name := range strings.SplitSeq(names, ",") {
			if i := slices.Index(controllers, name); i >= 0 {
				// The group of a process that is ending may be gone already.
				paths[i] = strings.TrimSuffix(path, " (deleted)")
			}
		}
	}
	var none Membership
	for _, path := range paths {
		if path == "" {
			continue
		}
		if owners := Owners(path); len(owners) > 0 {
			return Membership{Path: path, Owners: owners}, nil
		}
		none.Hidden = none.Hidden || slices.Contains(strings.Split(path, "/"), "..")
		if none.Path == "" {
			none.Path = path
		}
	}
	if none.Path == "" {
		return Membership{}, errors.New("no control group is listed")
	}
	return none, nil
}

// Scope returns the part of a path that ends with the group of its innermost container; ok is
// false if the group is in no container. Groups below are the container's as well.
func Scope(path string) (scope string, ok bool) {
	owners := Owners(path)
	if len(owners) == 0 || owners[len(owners)-1].Container == "" {
		return "", false
	}
	for i := range len(path) + 1 {
		if i == len(path) || path[i] == '/' {
			if slices.Equal(Owners(path[:i]), owners) {
				return path[:i], true
			}
		}
	}
	return path, true // not reached: the whole path has these owners
}

// ErrNotUnified says that processes are not in control groups of version 2.
var ErrNotUnified = errors.New("control groups v2 are required, and the node has v1")

// Unified returns the path of version 2 in the text of /proc/<pid>/cgroup. The error is
// ErrNotUnified if there is none, as on a node with version 1. A node with both has one, too,
// which is in no container.
func Unified(text string) (path string, err error) {
	for line := range strings.Lines(text) {
		if path, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); ok && strings.HasPrefix(path, "/") {
			return path, nil
		}
	}
	return "", ErrNotUnified
}
