package wire

import "strings"

// The annotations of a node that list what else Divvy wrote on it, each a list
// joined by commas.
const (
	// LabelsAnnotation lists the keys of labels.
	LabelsAnnotation = "divvy.dev/labels"
	// CountsAnnotation lists the resources in the node's status that show a number
	// of devices: kubelet never takes such a resource off by itself. It is on the
	// node and not on the host's disk, so that it ends with the node's object, as
	// the numbers do.
	CountsAnnotation = "divvy.dev/counts"
)

// NodeAnnotations returns all annotations that Divvy writes on nodes, those of
// kubectl divvy included.
func NodeAnnotations() []string {
	return []string{InventoryAnnotation, LabelsAnnotation, CountsAnnotation, EndingAnnotation, QuarantineAnnotation,
		SetupAnnotation, ClaimDriversAnnotation, DeviceRequestAnnotation, OveruseAnnotation}
}

// NodeConditions returns the types of all conditions that Divvy writes on nodes.
func NodeConditions() []string { return []string{OveruseCondition, IsolationCondition} }

// OwnedLabels reads LabelsAnnotation. Keys in the domains of Kubernetes are left
// out: whatever the annotation says, those are never Divvy's.
func OwnedLabels(annotation string) []string {
	var keys []string
	for key := range strings.SplitSeq(annotation, ",") {
		if key != "" && !ReservedLabel(key) {
			keys = append(keys, key)
		}
	}
	return keys
}

// CountedResources reads CountsAnnotation.
func CountedResources(annotation string) []string {
	var names []string
	for name := range strings.SplitSeq(annotation, ",") {
		if name != "" {
			names = append(names, name)
		}
	}
	return names
}

// ReservedLabel reports whether a key is in a domain of Kubernetes.
func ReservedLabel(key string) bool {
	prefix, _, ok := strings.Cut(key, "/")
	if !ok {
		return false
	}
	for _, d := range []string{"kubernetes.io", "k8s.io"} {
		if prefix == d || strings.HasSuffix(prefix, "."+d) {
			return true
		}
	}
	return false
}
