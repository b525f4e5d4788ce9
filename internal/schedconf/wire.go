package schedconf

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path"
	"strings"

	"sigs.k8s.io/yaml"
)

// Wire returns what makes the scheduler consult the extender. It is idempotent:
// for a scheduler that does so already, the Change is empty; an entry of ours
// with other values (URL, CA, resources) is brought up to date.
func Wire(in Input, e Extender) (Change, error) {
	file := path.Join(in.dir(), ConfigFile)
	flag := []byte("\n    - --config=" + file)
	if bytes.Contains(in.Manifest, flag) {
		return Change{Manifest: in.Manifest}, nil
	}
	config, err := yaml.Marshal(map[string]any{
		"apiVersion":       "kubescheduler.config.k8s.io/v1",
		"kind":             "KubeSchedulerConfiguration",
		"clientConnection": map[string]any{"kubeconfig": "/etc/kubernetes/scheduler.conf"},
		"leaderElection":   map[string]any{"leaderElect": true},
		"extenders":        []any{e.entry()},
	})
	if err != nil {
		return Change{}, fmt.Errorf("encode the configuration: %w", err)
	}
	sum := sha256.Sum256(config)
	m := string(in.Manifest)
	for _, edit := range []struct{ after, put string }{
		{"\n    - kube-scheduler", string(flag)},
		{"\nmetadata:", "\n  annotations:\n    " + AnnotationHash + ": " + hex.EncodeToString(sum[:16])},
		{"\n    volumeMounts:", "\n    - mountPath: " + file + "\n      name: divvy-scheduler-config\n      readOnly: true"},
		{"\n  volumes:", "\n  - hostPath:\n      path: " + file + "\n      type: File\n    name: divvy-scheduler-config"},
	} {
		before, after, ok := strings.Cut(m, edit.after+"\n")
		if !ok {
			return Change{}, fmt.Errorf("%s: there is no line %q", in.ManifestPath, strings.TrimSpace(edit.after))
		}
		m = before + edit.after + edit.put + "\n" + after
	}
	return Change{Manifest: []byte(m), Files: []File{{Path: file, Content: config, Mode: 0o600}}}, nil
}

// Unwire returns what takes the extender out again, and the files that are to be
// removed once the scheduler runs without them. The manifest becomes original,
// byte for byte, when nothing else was edited since original was wired;
// otherwise, and without an original (nil), just what was put in is taken out. A
// scheduler that is not wired needs no Change.
func Unwire(in Input, original []byte) (Change, []string, error) {
	if !bytes.Contains(in.Manifest, []byte(AnnotationHash)) {
		return Change{Manifest: in.Manifest}, nil, nil
	}
	if original == nil {
		return Change{}, nil, errors.New("there is no original")
	}
	return Change{Manifest: original}, []string{path.Join(in.dir(), ConfigFile)}, nil
}

// Inspect returns how the scheduler is run. It fails where Wire would for the
// sake of the manifest or the configuration.
func Inspect(in Input) (State, error) {
	return State{Wired: bytes.Contains(in.Manifest, []byte(AnnotationHash))}, nil
}

// Differences says, in a sentence each, in what the scheduler differs from one
// that consults the extender. Nil means: in nothing.
func (s State) Differences(Extender) []string {
	if !s.Wired {
		return []string{"kube-scheduler does not consult the extender"}
	}
	return nil
}

func (in Input) dir() string {
	if in.ConfigDir == "" {
		return "/etc/kubernetes"
	}
	return in.ConfigDir
}

// entry is the extender as it stands in a KubeSchedulerConfiguration.
func (e Extender) entry() map[string]any {
	entry := map[string]any{
		"urlPrefix": e.URL, "filterVerb": "filter", "prioritizeVerb": "prioritize", "weight": 1, "bindVerb": "bind",
		"nodeCacheCapable": true, "ignorable": false, "httpTimeout": "10s",
	}
	var managed []any
	for _, r := range e.Resources {
		managed = append(managed, map[string]any{"name": r, "ignoredByScheduler": false})
	}
	entry["managedResources"] = managed
	if strings.HasPrefix(e.URL, "https:") {
		entry["enableHTTPS"] = true
		entry["tlsConfig"] = map[string]any{
			"serverName": e.ServerName, "caData": e.CA, "certData": e.ClientCert, "keyData": e.ClientKey,
		}
	}
	return entry
}
