package why

import (
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// kubectl is a command line for a shell, with every argument quoted that needs it.
func kubectl(args ...string) string {
	quoted := make([]string, len(args))
	for i, arg := range args {
		quoted[i] = pool.Quote(arg)
	}
	return "kubectl " + strings.Join(quoted, " ")
}

// named reports whether these are names that objects can have. Those of a dump and those in
// ownerReferences are what anyone wrote; a change about other names has no command.
func named(names ...string) bool {
	for _, name := range names {
		if len(validation.IsDNS1123Subdomain(name)) > 0 {
			return false
		}
	}
	return true
}

// keyed reports whether these are keys of labels and taints. One that begins with "-" would
// be a flag.
func keyed(keys ...string) bool {
	for _, key := range keys {
		if len(validation.IsQualifiedName(key)) > 0 {
			return false
		}
	}
	return true
}

// ofPod are the commands about a pod, none where its name cannot be one.
func ofPod(p *v1.Pod, command ...string) []string {
	if !named(p.Namespace, p.Name) {
		return nil
	}
	return []string{kubectl(command...)}
}

// ofNode are the commands about a node, none where its name cannot be one.
func ofNode(node string, command ...string) []string {
	if !named(node) {
		return nil
	}
	return []string{kubectl(command...)}
}

// controllerOf returns the kind and name of a pod's controller as kubectl takes them; "" for
// none. The ReplicaSets of a Deployment are named after it and the hash of the pod's template.
func controllerOf(p *v1.Pod) (kind, name string) {
	o := metav1.GetControllerOfNoCopy(p)
	if o == nil {
		return "", ""
	}
	kind = refKind(o)
	if hash := p.Labels["pod-template-hash"]; kind == kindReplicaSet && hash != "" && strings.HasSuffix(o.Name, "-"+hash) {
		return kindDeployment, strings.TrimSuffix(o.Name, "-"+hash)
	}
	return kind, o.Name
}

// refKind is the kind of a reference as kubectl takes it. One that is not Kubernetes' own has
// its group: "statefulset.apps.kruise.io".
func refKind(o *metav1.OwnerReference) string {
	kind, group := strings.ToLower(o.Kind), ""
	if gv, err := schema.ParseGroupVersion(o.APIVersion); err == nil {
		group = gv.Group
	}
	if own, known := ownGroups[kind]; group == "" && !known || known && group == own {
		return kind
	}
	return kind + "." + group
}

const (
	kindPod         = "pod"
	kindDeployment  = "deployment"
	kindReplicaSet  = "replicaset"
	kindStatefulSet = "statefulset"
	kindDaemonSet   = "daemonset"
	kindJob         = "job"
)

// ownGroups are the groups of Kubernetes' own controllers.
var ownGroups = map[string]string{
	kindDeployment: "apps", kindReplicaSet: "apps", kindStatefulSet: "apps", kindDaemonSet: "apps", kindJob: "batch",
}

// ownerText names the controller as kubectl takes it; "" for none.
func ownerText(p *v1.Pod) string {
	kind, name := controllerOf(p)
	if kind == "" {
		return ""
	}
	return kind + "/" + name
}
