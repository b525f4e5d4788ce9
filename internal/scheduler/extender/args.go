package extender

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// filterArgs is what filter and prioritize need of an ExtenderArgs (package
// k8s.io/kube-scheduler/extender/v1).
type filterArgs struct {
	// pod has the names and the containers' resources of the pod, no more.
	pod *v1.Pod
	// names are the candidates.
	names []string
	// nodes are the candidates as they came, parallel to names, when the
	// client sent whole nodes: it wants whole nodes back. Nil otherwise.
	nodes []json.RawMessage
	// prefers is true when the pod has wishes of its own as to where it runs, which
	// kube-scheduler weighs against each other.
	prefers bool
}

// Limits of what a body may unfold to: some bytes of JSON become many times as
// many in memory. All are far beyond what a cluster can have.
const (
	maxNodes      = 100_000
	maxContainers = 1000
	maxConditions = 1000
	maxPodBytes   = 4 << 20 // the API server takes 3 MiB
)

func decodePod(podJSON []byte) (*argsPod, error) {
	switch {
	case len(podJSON) == 0 || bytes.Equal(podJSON, []byte("null")):
		return nil, errors.New("the request has no Pod")
	case len(podJSON) > maxPodBytes:
		return nil, fmt.Errorf("the request's Pod is larger than %d bytes", maxPodBytes)
	}
	pod := new(argsPod)
	err := checkContainers(podJSON)
	if err == nil {
		err = json.Unmarshal(podJSON, pod)
	}
	if err != nil {
		if wrongType := (*json.UnmarshalTypeError)(nil); errors.As(err, &wrongType) && wrongType.Field == "" {
			wrongType.Field = "Pod"
		}
		return nil, syntaxError(err)
	}
	return pod, nil
}

// checkContainers rejects a pod with more than maxContainers. A list of as many has a
// comma between each two, so hardly any pod needs the second reading.
func checkContainers(podJSON []byte) error {
	if bytes.Count(podJSON, []byte(",")) < maxContainers {
		return nil
	}
	var pod struct {
		Spec struct{ InitContainers, Containers fewContainers }
	}
	return json.Unmarshal(podJSON, &pod)
}

// limitError says that a list is longer than anything sensible.
type limitError struct {
	what string
	most int
}

func (e *limitError) Error() string {
	return fmt.Sprintf("the request has more than %d %s", e.most, e.what)
}

// decodeList appends the values of a JSON array to list, and stops at most of
// them. null is an empty list.
func decodeList[T any](list []T, data []byte, what string, most int) ([]T, error) {
	if bytes.Equal(data, []byte("null")) {
		return nil, nil
	}
	d := json.NewDecoder(bytes.NewReader(data))
	if t, err := d.Token(); err != nil || t != json.Delim('[') {
		return nil, json.Unmarshal(data, &list) // its error names the field
	}
	list = []T{}
	for d.More() {
		if len(list) == most {
			return nil, &limitError{what, most}
		}
		var one T
		if err := d.Decode(&one); err != nil {
			return nil, err
		}
		list = append(list, one)
	}
	return list, nil
}

// checkNames rejects a request with more than maxNodes names, as checkContainers does.
func checkNames(body []byte) error {
	if bytes.Count(body, []byte(",")) < maxNodes {
		return nil
	}
	var names struct{ NodeNames fewNames }
	return decodeObject(body, &names)
}

// fewNames are at most maxNodes.
type fewNames struct{}

// UnmarshalJSON counts the names, which have no commas.
func (*fewNames) UnmarshalJSON(data []byte) error {
	if bytes.Count(data, []byte(",")) >= maxNodes {
		return &limitError{"node names", maxNodes}
	}
	return nil
}

type nodeItems []json.RawMessage

// UnmarshalJSON reads at most maxNodes nodes.
func (n *nodeItems) UnmarshalJSON(data []byte) (err error) {
	*n, err = decodeList(*n, data, "nodes", maxNodes)
	return err
}

// fewContainers are at most maxContainers.
type fewContainers struct{}

// UnmarshalJSON keeps nothing of the list.
func (*fewContainers) UnmarshalJSON(data []byte) error {
	_, err := decodeList[json.RawMessage](nil, data, "containers", maxContainers)
	return err
}

// amounts are a ResourceList without the numbers that take seconds and
// hundreds of megabytes to read.
type amounts v1.ResourceList

// UnmarshalJSON looks at each number's text before it is read.
func (a *amounts) UnmarshalJSON(data []byte) error {
	var texts map[v1.ResourceName]json.RawMessage
	if err := json.Unmarshal(data, &texts); err != nil {
		return err
	}
	if texts == nil {
		*a = nil
		return nil
	}
	*a = make(amounts, len(texts))
	for name, text := range texts {
		if isAbsurd(string(text)) {
			return fmt.Errorf("the amount of %.100s has more digits than any resource", string(name))
		}
		var q resource.Quantity
		if err := q.UnmarshalJSON(text); err != nil {
			return err
		}
		(*a)[name] = q
	}
	return nil
}

// isAbsurd reports whether Quantity would unfold the text into a number of
// thousands of digits: it does unless the digits before the exponent fit an
// int64 and the exponent is not negative.
func isAbsurd(text string) bool {
	if len(text) > 64 {
		return true
	}
	text = strings.Trim(text, "\" ")
	i := strings.LastIndexAny(text, "eE")
	if i < 0 || len(text)-i-1 <= 3 {
		return false
	}
	return text[i+1] == '-' || i > 15
}

// decodeFilterArgs reads an ExtenderArgs. The body is only read, and nothing of the result
// shares memory with it.
func decodeFilterArgs(body []byte) (filterArgs, error) {
	var raw struct {
		Pod       json.RawMessage
		Nodes     *struct{ Items nodeItems }
		NodeNames *[]string
	}
	if err := checkNames(body); err != nil {
		return filterArgs{}, err
	}
	if err := decodeObject(body, &raw); err != nil {
		return filterArgs{}, err
	}
	pod, err := decodePod(raw.Pod)
	if err != nil {
		return filterArgs{}, err
	}
	args := filterArgs{pod: pod.object(), prefers: pod.prefers()}
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
	Metadata struct {
		Name, Namespace, UID, ResourceVersion string

		CreationTimestamp metav1.Time
		Annotations       map[string]string
	}
	Spec struct {
		InitContainers, Containers []argsContainer
		Priority                   *int32
		Overhead                   amounts
		Resources                  *struct{ Requests, Limits amounts }
		Affinity                   argsAffinity
		TopologySpreadConstraints  argsSpread
	}
	Status struct {
		NominatedNodeName string
		Conditions        argsScheduled
	}
}

type argsContainer struct {
	Name          string
	RestartPolicy *v1.ContainerRestartPolicy
	Resources     struct{ Requests, Limits amounts }
}

// prefers reports whether the pod prefers nodes.
func (p *argsPod) prefers() bool {
	return p.Spec.Affinity.prefers() || bool(p.Spec.TopologySpreadConstraints)
}

// object returns the pod in the form that the one formula for requests reads.
func (p *argsPod) object() *v1.Pod {
	pod := new(v1.Pod)
	pod.Name, pod.Namespace, pod.UID = p.Metadata.Name, p.Metadata.Namespace, types.UID(p.Metadata.UID)
	pod.ResourceVersion, pod.CreationTimestamp = p.Metadata.ResourceVersion, p.Metadata.CreationTimestamp
	pod.Annotations, pod.Spec.Overhead = p.Metadata.Annotations, v1.ResourceList(p.Spec.Overhead)
	if r := p.Spec.Resources; r != nil {
		pod.Spec.Resources = &v1.ResourceRequirements{Requests: v1.ResourceList(r.Requests), Limits: v1.ResourceList(r.Limits)}
	}
	pod.Spec.Priority, pod.Status.NominatedNodeName = p.Spec.Priority, p.Status.NominatedNodeName
	convert := func(containers []argsContainer) []v1.Container {
		out := make([]v1.Container, len(containers))
		for i, c := range containers {
			out[i].Name, out[i].RestartPolicy = c.Name, c.RestartPolicy
			out[i].Resources.Requests, out[i].Resources.Limits = v1.ResourceList(c.Resources.Requests), v1.ResourceList(c.Resources.Limits)
		}
		return out
	}
	pod.Status.Conditions = p.Status.Conditions
	pod.Spec.InitContainers, pod.Spec.Containers = convert(p.Spec.InitContainers), convert(p.Spec.Containers)
	return pod
}

// argsScheduled is a pod's condition PodScheduled, at most one, without its times.
type argsScheduled []v1.PodCondition

// UnmarshalJSON keeps nothing of the other conditions.
func (c *argsScheduled) UnmarshalJSON(data []byte) error {
	if !bytes.Contains(data, []byte(v1.PodScheduled)) {
		return nil
	}
	type condition struct {
		Type            v1.PodConditionType
		Status          v1.ConditionStatus
		Reason, Message string
	}
	all, err := decodeList[condition](nil, data, "conditions", maxConditions)
	for _, one := range all {
		if one.Type == v1.PodScheduled {
			*c = argsScheduled{{Type: one.Type, Status: one.Status, Reason: one.Reason, Message: one.Message}}
		}
	}
	return err
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
	var limit *limitError
	if errors.As(err, &limit) {
		return err
	}
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

// argsAffinity is whether a pod's affinity has preferences.
type argsAffinity struct {
	NodeAffinity, PodAffinity, PodAntiAffinity struct {
		Preferred notEmpty `json:"preferredDuringSchedulingIgnoredDuringExecution"`
	}
}

func (a *argsAffinity) prefers() bool {
	return bool(a.NodeAffinity.Preferred || a.PodAffinity.Preferred || a.PodAntiAffinity.Preferred)
}

// notEmpty is whether a list has something in it.
type notEmpty bool

// UnmarshalJSON keeps nothing of the list.
func (n *notEmpty) UnmarshalJSON(data []byte) error {
	inside := bytes.TrimSpace(bytes.Trim(data, "[]"))
	*n = notEmpty(len(inside) > 0 && !bytes.Equal(inside, []byte("null")))
	return nil
}

// argsSpread is whether a pod's topologySpreadConstraints have one that is a
// preference. A name or label that is that very word only costs time.
type argsSpread bool

// UnmarshalJSON looks for the word that makes a constraint a preference.
func (s *argsSpread) UnmarshalJSON(data []byte) error {
	*s = argsSpread(bytes.Contains(data, []byte(`"ScheduleAnyway"`)))
	return nil
}
