package doctor

import (
	"encoding/json"
	"slices"
	"strings"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// Names that the chart gives. Workloads are found by the label
// app.kubernetes.io/name, which has the same values.
const (
	nameNode      = "divvy-node"
	nameMPS       = "divvy-mps"
	nameExtender  = "divvy-extender"
	nameSchedconf = "divvy-schedconf"
	nameScheduler = "divvy-scheduler"
	namePoolHook  = "bitfusion-webhook"
	namePoolNode  = "bitfusion-device-plugin"

	labelName     = "app.kubernetes.io/name"
	labelInstance = "app.kubernetes.io/instance"
	labelPartOf   = "app.kubernetes.io/part-of"
	labelVersion  = "app.kubernetes.io/version"
	partOf        = "divvy"

	annotationRelease   = "meta.helm.sh/release-name"
	annotationNamespace = "meta.helm.sh/release-namespace"
	// annotationWired is on kube-scheduler's pod once schedconf has wired it.
	annotationWired = "divvy.dev/scheduler-config-hash"
	// annotationReplaced is on it once divvy-scheduler runs in its place.
	annotationReplaced = "divvy.dev/scheduler-replaced"

	portExtender    = 32766
	portExtenderTLS = 32765
	portNode        = 9400
)

// Source names something that a snapshot is made of.
type Source string

// The sources. Those of a namespace are named by inNamespace.
const (
	SourceNodes      Source = "nodes"
	SourcePods       Source = "pods"
	SourceWorkloads  Source = "daemonsets and deployments"
	SourceNamespaces Source = "namespaces"
	SourceQuotas     Source = "resourcequotas"
	SourceAdmission  Source = "webhook configurations"
	SourcePolicies   Source = "admission policies"
	SourceRoles      Source = "clusterroles and clusterrolebindings"
	SourceServices   Source = "services and endpointslices"
	SourceConfigMaps Source = "configmaps"
	SourceSecrets    Source = "secrets"
	SourceRelease    Source = "the release's manifest"
	SourceReviews    Source = "subjectaccessreviews"
	SourceToken      Source = "the pool's secrets" //nolint:gosec // a word, not a credential
	SourceExtender   Source = "the extender"
	SourceWaiting    Source = "what pods wait for"
	SourceClaims     Source = "resourceclaims, resourceslices and deviceclasses"
)

// Release is one installation of the chart.
type Release struct {
	Name, Namespace string
	// Helm is true when helm installed it, false for a rendered manifest.
	Helm bool
	// Status and Revision are helm's, "" and 0 where unknown.
	Status   string
	Revision int
	// Manifest are the objects that helm installed; nil where unknown.
	Manifest []Object
}

// Answer is what a program answered to one request.
type Answer struct {
	// OK is true for a status of 200.
	OK bool
	// Text is the body or, without one, the error.
	Text string
}

// Access is one thing that an account is to be allowed, and whether it is.
type Access struct {
	// Account is namespace/name of a service account, Role the name of the role
	// that grants it.
	Account, Role string
	Verb          string
	// Resource has its group and subresource, as in "nodes/status" or
	// "leases.coordination.k8s.io".
	Resource string
	// Name and Namespace narrow it; "" for all.
	Name, Namespace string
	Allowed         bool
}

// Live is the state of an object of the release's manifest.
type Live struct {
	Object Object
	// Found is false when the object is not there. Error says why that is not
	// known, "" when it is.
	Found bool
	Error string
	// Differs says where a rule differs from what was installed, "" nowhere, or
	// for kinds that are not compared.
	Differs string
}

// Snapshot is what Collect has read. Checks never change it.
type Snapshot struct {
	// Taken is when it was read.
	Taken time.Time
	// Tool is the version of this program, Kubernetes that of the API server.
	Tool, Kubernetes string
	// Failed says why a source could not be read, with what is needed.
	Failed map[Source]string

	// Releases are all installations that were found; the first is examined.
	Releases []Release

	Nodes []corev1.Node
	// Pods are those of Divvy, kube-scheduler's, those that ask for a resource that
	// Divvy offers, and those that mount kubelet's folder of device plugins.
	Pods []corev1.Pod
	// Waiting says why those of them wait that do.
	Waiting     []Waits
	DaemonSets  []appsv1.DaemonSet  // of all namespaces
	Deployments []appsv1.Deployment // of all namespaces
	Namespaces  []corev1.Namespace
	// Wiring are the events that divvy-schedconf has put on nodes.
	Wiring []corev1.Event
	Quotas []corev1.ResourceQuota
	Claims Claims

	Admission Admission
	// Labelled are cluster-wide objects with Divvy's label.
	Labelled []Labelled

	// Objects is what there is of the release.
	Objects Objects
	// Token are the pool's secrets in the namespace that they are copied from, and
	// Copies the names of the pool's secrets in the namespaces of its pods.
	Token  []corev1.Secret
	Copies map[string][]string
}

// Admission is what the API server asks before it takes an object.
type Admission struct {
	Mutating   []admissionv1.MutatingWebhookConfiguration
	Validating []admissionv1.ValidatingWebhookConfiguration
	Policies   []admissionv1.ValidatingAdmissionPolicy
	Bindings   []admissionv1.ValidatingAdmissionPolicyBinding
}

// Objects is what there is of a release in its namespaces.
type Objects struct {
	Services   []corev1.Service
	Endpoints  []discoveryv1.EndpointSlice
	ConfigMaps []corev1.ConfigMap
	Secrets    []corev1.Secret // without helm's
	Live       []Live
	Access     []Access
	// Extender is what the extender answered, by route.
	Extender map[string]Answer
	// Readiness is what /readyz of a pod that is not ready answered, by
	// namespace/name.
	Readiness map[string]Answer
}

// Labelled is an object with Divvy's labels.
type Labelled struct {
	Kind     string // as kubectl takes it: "clusterrole"
	Name     string
	Instance string
}

// Release returns the installation that is examined, nil when there is none.
func (s *Snapshot) Release() *Release {
	if len(s.Releases) == 0 {
		return nil
	}
	return &s.Releases[0]
}

// of reports whether an object belongs to the release.
func (r *Release) of(o metadata) bool {
	labels, annotations := o.GetLabels(), o.GetAnnotations()
	if labels[labelPartOf] != partOf {
		return false
	}
	if namespace := annotations[annotationNamespace]; namespace != "" {
		return annotations[annotationRelease] == r.Name && namespace == r.Namespace
	}
	return labels[labelInstance] == r.Name
}

// metadata is what is read of an object's.
type metadata interface {
	GetNamespace() string
	GetName() string
	GetLabels() map[string]string
	GetAnnotations() map[string]string
}

// object is a pointer to a T that has metadata.
type object[T any] interface {
	*T
	metadata
}

// program returns the release's DaemonSet or Deployment of the name, nil when there is none.
func program[T any, P object[T]](r *Release, all []T, name string) P {
	for i := range all {
		if p := P(&all[i]); r != nil && p.GetLabels()[labelName] == name && r.of(p) {
			return p
		}
	}
	return nil
}

// workload is a DaemonSet or a Deployment.
type workload struct {
	*metav1.ObjectMeta
	kind     string
	selector *metav1.LabelSelector
	pods     *corev1.PodSpec
}

func (w workload) String() string { return w.kind + " " + w.Namespace + "/" + w.Name }

// workloads are those of all namespaces.
func (s *Snapshot) workloads() []workload {
	var out []workload
	for i := range s.DaemonSets {
		d := &s.DaemonSets[i]
		out = append(out, workload{&d.ObjectMeta, "DaemonSet", d.Spec.Selector, &d.Spec.Template.Spec})
	}
	for i := range s.Deployments {
		d := &s.Deployments[i]
		out = append(out, workload{&d.ObjectMeta, "Deployment", d.Spec.Selector, &d.Spec.Template.Spec})
	}
	return out
}

// lookup returns the object of the name, nil when it is not there.
func lookup[T any, P object[T]](all []T, namespace, name string) P {
	for i := range all {
		if p := P(&all[i]); p.GetNamespace() == namespace && p.GetName() == name {
			return p
		}
	}
	return nil
}

// podsOf returns the pods that a selector chooses in a namespace.
func (s *Snapshot) podsOf(namespace string, selector *metav1.LabelSelector) []*corev1.Pod {
	chosen, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil || chosen.Empty() {
		return nil
	}
	var out []*corev1.Pod
	for i := range s.Pods {
		if p := &s.Pods[i]; p.Namespace == namespace && chosen.Matches(labels.Set(p.Labels)) {
			out = append(out, p)
		}
	}
	return out
}

// daemonOn returns the pod of divvy-node on a node, nil when there is none. During an
// update there may be two, of which one is ready.
func (s *Snapshot) daemonOn(node string) *corev1.Pod {
	d := program(s.Release(), s.DaemonSets, nameNode)
	if d == nil {
		return nil
	}
	var found *corev1.Pod
	for _, p := range s.podsOf(d.Namespace, d.Spec.Selector) {
		if p.Spec.NodeName == node && p.DeletionTimestamp == nil && (found == nil || kube.PodReady(p)) {
			found = p
		}
	}
	return found
}

// readyEndpoints counts the addresses of a service that take connections.
func (s *Snapshot) readyEndpoints(namespace, name string) int {
	n := 0
	for _, slice := range s.Objects.Endpoints {
		if slice.Namespace != namespace || slice.Labels[discoveryv1.LabelServiceName] != name {
			continue
		}
		for _, e := range slice.Endpoints {
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				n += len(e.Addresses)
			}
		}
	}
	return n
}

// installed reports whether the release's manifest has an object; also when the
// manifest is not known and the object is there.
func (r *Release) installed(kind, name string) bool {
	return slices.ContainsFunc(r.Manifest, func(o Object) bool { return o.Kind == kind && o.Name == name })
}

// restore returns the command that puts back what the release consists of, of the
// objects with that label app.kubernetes.io/name alone, and what to do where there
// is none. An administrator's changes of other objects stay.
func (s *Snapshot) restore(name string) (remedy string, commands []string) {
	r := s.Release()
	if r == nil || !r.Helm {
		return "Apply the manifest again with which Divvy was installed.", nil
	}
	selector := ""
	if name != "" {
		selector = "-l " + labelName + "=" + name + " "
	}
	return "Restore the objects of the release.", []string{
		"helm get manifest " + r.Name + " -n " + r.Namespace +
			" | kubectl apply --server-side --force-conflicts --field-manager=helm " + selector + "-f -",
	}
}

// argument returns the value of a flag in a container's arguments.
func argument(spec *corev1.PodSpec, flag string) (string, bool) {
	for _, c := range spec.Containers {
		for _, arg := range slices.Concat(c.Command, c.Args) {
			if value, ok := strings.CutPrefix(arg, "--"+flag+"="); ok {
				return value, true
			}
			if arg == "--"+flag {
				return "true", true
			}
		}
	}
	return "", false
}

// Object is one document of a manifest.
type Object struct {
	APIVersion, Kind, Namespace, Name string
	// Content is the whole object.
	Content map[string]any
}

// String is as kubectl names it.
func (o Object) String() string {
	if o.Namespace == "" {
		return o.Kind + " " + o.Name
	}
	return o.Kind + " " + o.Namespace + "/" + o.Name
}

// label returns a label of the object.
func (o Object) label(key string) string {
	meta, _ := o.Content["metadata"].(map[string]any)
	labels, _ := meta["labels"].(map[string]any)
	value, _ := labels[key].(string)
	return value
}

// into decodes the object into a typed one.
func (o Object) into(typed any) bool {
	data, err := json.Marshal(o.Content)
	return err == nil && json.Unmarshal(data, typed) == nil
}
