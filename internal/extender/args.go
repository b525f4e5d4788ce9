package extender

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// filterArgs is what filter and prioritize need of an ExtenderArgs (package
// k8s.io/kube-scheduler/extender/v1).
type filterArgs struct {
	// pod has the names and the containers' resources of the pod, no more.
	pod *v1.Pod
	// names are the candidates. Strings share one allocation.
	names []string
	// nodes are the candidates as they came, parallel to names, when the
	// client sent whole nodes: it wants whole nodes back. Nil otherwise.
	nodes []json.RawMessage
}

// decodeFilterArgs reads an ExtenderArgs. The body is only read, and nothing
// of the result shares memory with it.
//
// At 5000 nodes almost all of the body are node names. encoding/json reads it
// three times over, which would be most of the time of the whole call, so the
// one form that kube-scheduler writes is taken apart by hand first. Whatever
// looks different in the least goes to encoding/json; a fuzz test holds the
// two together.
func decodeFilterArgs(body []byte) (filterArgs, error) {
	if podJSON, names, ok := splitFilterArgs(body); ok {
		pod := new(argsPod)
		if err := json.Unmarshal(podJSON, pod); err != nil {
			return filterArgs{}, syntaxError(err)
		}
		return filterArgs{pod: pod.object(), names: names}, nil
	}
	return decodeAnyFilterArgs(body)
}

func decodeAnyFilterArgs(body []byte) (filterArgs, error) {
	var raw struct {
		Pod       *argsPod
		Nodes     *struct{ Items []json.RawMessage }
		NodeNames *[]string
	}
	if err := decodeObject(body, &raw); err != nil {
		return filterArgs{}, err
	}
	if raw.Pod == nil {
		return filterArgs{}, errors.New("the request has no Pod")
	}
	args := filterArgs{pod: raw.Pod.object()}
	switch {
	case raw.NodeNames != nil:
		args.names = *raw.NodeNames
	case raw.Nodes != nil:
		args.nodes = make([]json.RawMessage, len(raw.Nodes.Items))
		args.names = make([]string, len(raw.Nodes.Items))
		for i, item := range raw.Nodes.Items {
			var node struct{ Metadata struct{ Name string } }
			if err := json.Unmarshal(item, &node); err != nil {
				return filterArgs{}, syntaxError(err)
			}
			if node.Metadata.Name == "" {
				return filterArgs{}, fmt.Errorf("item %d of Nodes has no name", i)
			}
			// A copy, since the body's buffer is used again.
			args.nodes[i], args.names[i] = bytes.Clone(item), node.Metadata.Name
		}
	default:
		return filterArgs{}, errors.New("the request names no nodes: neither NodeNames nor Nodes is set")
	}
	return args, nil
}

// argsPod is the part of a pod that decides. Decoding into it skips the rest.
type argsPod struct {
	Metadata struct{ Name, Namespace string }
	Spec     struct{ InitContainers, Containers []argsContainer }
}

type argsContainer struct {
	Name          string
	RestartPolicy *v1.ContainerRestartPolicy
	Resources     struct{ Requests, Limits v1.ResourceList }
}

// object returns the pod in the form that the one formula for requests reads.
func (p *argsPod) object() *v1.Pod {
	pod := new(v1.Pod)
	pod.Name, pod.Namespace = p.Metadata.Name, p.Metadata.Namespace
	convert := func(containers []argsContainer) []v1.Container {
		out := make([]v1.Container, len(containers))
		for i, c := range containers {
			out[i].Name, out[i].RestartPolicy = c.Name, c.RestartPolicy
			out[i].Resources.Requests, out[i].Resources.Limits = c.Resources.Requests, c.Resources.Limits
		}
		return out
	}
	pod.Spec.InitContainers, pod.Spec.Containers = convert(p.Spec.InitContainers), convert(p.Spec.Containers)
	return pod
}

// bindArgs is an ExtenderBindingArgs.
type bindArgs struct{ PodName, PodNamespace, PodUID, Node string }

func decodeBindArgs(body []byte) (bindArgs, error) {
	var args bindArgs
	if err := decodeObject(body, &args); err != nil {
		return bindArgs{}, err
	}
	for _, field := range []struct{ name, value string }{
		{"PodName", args.PodName}, {"PodNamespace", args.PodNamespace}, {"PodUID", args.PodUID}, {"Node", args.Node},
	} {
		if field.value == "" {
			return bindArgs{}, fmt.Errorf("the request has no %s", field.name)
		}
	}
	return args, nil
}

// decodeObject reads a JSON object and nothing else: encoding/json alone takes
// null for an object with nothing in it.
func decodeObject(body []byte, into any) error {
	trimmed := bytes.TrimLeft(body, " \t\r\n")
	if len(trimmed) == 0 {
		return errors.New("the request is empty")
	}
	if err := json.Unmarshal(body, into); err != nil {
		return syntaxError(err)
	}
	if trimmed[0] != '{' {
		return errors.New("the request is not a JSON object")
	}
	return nil
}

func syntaxError(err error) error {
	var wrongType *json.UnmarshalTypeError
	if errors.As(err, &wrongType) {
		field := wrongType.Field
		if field == "" {
			return fmt.Errorf("the request is a JSON %s, not an object", wrongType.Value)
		}
		return fmt.Errorf("the request's field %s cannot be a JSON %s", field, wrongType.Value)
	}
	return fmt.Errorf("the request is not valid JSON: %w", err)
}

// The form in which kube-scheduler writes its arguments with nodeCacheCapable:
// the fields in this order, without white space.
const (
	beforePod   = `{"Pod":`
	beforeNames = `,"Nodes":null,"NodeNames":[`
	afterNames  = "]}"
)

// splitFilterArgs takes apart a body in kube-scheduler's form. The pod's JSON
// is not checked; ok is false when anything else is not exactly as expected.
func splitFilterArgs(body []byte) (pod []byte, names []string, ok bool) {
	rest, ok := bytes.CutPrefix(body, []byte(beforePod))
	if !ok {
		return nil, nil, false
	}
	// Go's encoder, and kube-scheduler's, ends a value with no newline;
	// json.Encoder adds one.
	rest = bytes.TrimSuffix(rest, []byte("\n"))
	size := objectSize(rest)
	if size == 0 {
		return nil, nil, false
	}
	pod, rest = rest[:size], rest[size:]
	if rest, ok = bytes.CutPrefix(rest, []byte(beforeNames)); !ok {
		return nil, nil, false
	}
	if rest, ok = bytes.CutSuffix(rest, []byte(afterNames)); !ok {
		return nil, nil, false
	}
	names, ok = splitNames(string(rest))
	return pod, names, ok
}

// objectSize returns the length of the JSON object that b starts with, 0 when
// it is none. It follows strings and braces only, so what it delimits need not
// be valid.
func objectSize(b []byte) int {
	if len(b) == 0 || b[0] != '{' {
		return 0
	}
	depth, inString := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			depth++
		case c == '}' || c == ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return 0
}

// splitNames takes apart "a","b","c" when all names are made of the letters
// that need no escape.
func splitNames(s string) ([]string, bool) {
	if s == "" {
		return []string{}, true
	}
	names := make([]string, 0, strings.Count(s, ",")+1)
	for {
		if len(s) < 2 || s[0] != '"' {
			return nil, false
		}
		end := 1
		for end < len(s) && plain(s[end]) {
			end++
		}
		if end == len(s) || s[end] != '"' {
			return nil, false
		}
		names = append(names, s[1:end])
		if s = s[end+1:]; s == "" {
			return names, true
		}
		if s[0] != ',' {
			return nil, false
		}
		s = s[1:]
	}
}

// plain reports whether the byte stands for itself in a JSON string, read and
// written.
func plain(c byte) bool { return c >= 0x20 && c < 0x7f && !isSpecial[c] }

// isSpecial are the printable bytes that JSON, or Go's encoder for the sake of
// HTML, writes as an escape.
var isSpecial = [256]bool{'"': true, '\\': true, '<': true, '>': true, '&': true}
