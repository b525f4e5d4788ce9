// Package schedconf makes a kube-scheduler on a control-plane node consult
// Divvy's extender, and takes that back: it edits the static pod's manifest and
// the scheduler's configuration. Bytes go in and bytes come out; files are read
// through a function of the caller, and nothing is written. Whoever applies a
// Change to a node (package host, beside this one) is also who keeps the
// original.
//
// Outside of what is put in, a manifest and a configuration hold what they held:
// comments, the order of keys, fields that this package does not know, other
// extenders, profiles and feature gates. Their layout may change until the original
// is put back, and the parser may lose comments that are indented differently from the line
// below them. A configuration that is there is never edited in place; the scheduler
// gets a copy with the extender in it, under a name of ours.
package schedconf

import (
	"io/fs"
	"time"
)

// ConfigFile is the name of the configuration in Input.ConfigDir, which is that of the
// GCUShare user guide.
const ConfigFile = "scheduler-extender-config-v1.23+.yaml"

// FormerFiles are names in that folder of configurations for kube-schedulers before
// 1.23: GCUShare's config manager and earlier releases of Divvy may have left them.
var FormerFiles = []string{"scheduler-extender-config.yaml", "scheduler-extender-config.json"}

// Annotations that Wire puts on the static pod.
const (
	// AnnotationHash is the digest of the configuration that the manifest names.
	// kubelet restarts a static pod when its manifest changes, not when a file
	// that it mounts does; and who edits the file by hand is noticed by it.
	AnnotationHash = "divvy.dev/scheduler-config-hash"
	// AnnotationBefore remembers the flags that Wire put others in the place of,
	// as a JSON list; it is absent where there were none.
	AnnotationBefore = "divvy.dev/scheduler-config-before"
)

// An Extender is what kube-scheduler has to know of Divvy's.
type Extender struct {
	// URL is the prefix of the verbs' routes, such as
	// https://10.96.0.7:32765/gcushare-scheduler. kube-scheduler resolves it with
	// the node's DNS, which knows no Services: the host is best an address.
	URL string
	// ServerName is the name in the extender's certificate. Only for https.
	ServerName string
	// CA, ClientCert and ClientKey are PEM and go into the configuration itself.
	// Only for https. ClientCert and ClientKey are given both or not at all.
	CA, ClientCert, ClientKey []byte
	// Resources are the extended resources whose pods the extender places; at
	// least one. Their order does not matter.
	Resources []string
	// Timeout of a call; 0 means 10 s.
	Timeout time.Duration
	// Weight is how many times the extender's score of a node counts beside those
	// of the scheduler's plugins; 0 means once. A point of the extender's ten is
	// worth ten of a plugin's hundred.
	Weight int
	// Program takes the place of kube-scheduler; nil where kube-scheduler stays and calls the
	// extender. With it, only Resources and Weight count of the fields above.
	Program *Program
}

// An Input is the scheduler as it is on a node.
type Input struct {
	// Manifest is the content of the static pod's file, YAML or JSON.
	Manifest []byte
	// ManifestPath is only for messages.
	ManifestPath string
	// ReadFile returns a file of the node, by its path there. An error that is
	// fs.ErrNotExist says that there is none.
	ReadFile func(hostPath string) ([]byte, error)
	// Version of kube-scheduler, such as v1.31.4. Empty means: the image's tag says.
	Version string
	// ConfigDir is the folder on the node that the files go to. Empty means
	// /etc/kubernetes.
	ConfigDir string
}

// A File is to be written on the node.
type File struct {
	// Path on the node.
	Path    string
	Content []byte
	// Mode is 0600 where Content holds a key.
	Mode fs.FileMode
	// UID and GID are those that kube-scheduler runs as, and is to read the file
	// as; 0 is root.
	UID, GID int
}

// A Change is what is to be put in place, the files before the manifest. With
// Manifest equal to Input.Manifest and no Files there is nothing to do.
type Change struct {
	// Manifest is the content of the static pod's file.
	Manifest []byte
	// Files are those that differ from what the node has.
	Files []File
	// Notes are sentences for a person: what was found, carried over, or left.
	Notes []string
}
