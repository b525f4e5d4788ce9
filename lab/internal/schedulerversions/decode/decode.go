// Package decode reads files strictly, with the types and the decoder of the
// version of Kubernetes that it is compiled with.
package decode

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
)

// Types add what a version of kube-scheduler reads to a scheme.
type Types []func(*runtime.Scheme) error

// An Answer is what became of one file.
type Answer struct {
	File string
	// Kind is what the file holds, with its group and version.
	Kind string `json:",omitempty"`
	// Error says why the file cannot be read.
	Error string `json:",omitempty"`
	// Object is the file's content, as the types hold it.
	Object json.RawMessage `json:",omitempty"`
}

// Run prints, for arguments that are a version and files, an Answer per file, as
// a line of JSON.
func Run(served map[string]Types, args []string, out io.Writer) error {
	if len(args) < 2 || served[args[0]] == nil {
		return fmt.Errorf("want a version and files, not %q", args)
	}
	scheme := runtime.NewScheme()
	for _, add := range served[args[0]] {
		if err := add(scheme); err != nil {
			return err
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	enc := json.NewEncoder(out)
	for _, file := range args[1:] {
		data, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		a := Answer{File: file}
		object, kind, err := decoder.Decode(data, nil, nil)
		if err != nil {
			a.Error = err.Error()
		} else {
			a.Kind = kind.String()
			if a.Object, err = json.Marshal(object); err != nil {
				return err
			}
		}
		if err := enc.Encode(a); err != nil {
			return err
		}
	}
	return nil
}
