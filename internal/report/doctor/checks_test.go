package doctor

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/pool"
)

// A healthy installation has no findings, and every check had something to look
// at.
func TestHealthyInstallation(t *testing.T) {
	report := Examine(healthy(t).Snapshot)
	for _, r := range report.Results {
		if r.Severity != OK || len(r.Findings) > 0 || r.Skipped != "" {
			t.Errorf("%s: %s, skipped because %q, %v", r.Check, r.Severity, r.Skipped, r.Findings)
		}
	}
	if len(report.Results) != len(Checks()) {
		t.Errorf("%d results of %d checks", len(report.Results), len(Checks()))
	}
}

// fault is something wrong with a healthy installation.
type fault struct {
	check    string
	plant    func(w *world)
	severity Severity
	object   string
	// problem and remedy are parts of the texts, command of the first command, ""
	// for none at all.
	problem, remedy, command string
}

const restoreAll = "helm get manifest divvy -n divvy-system | kubectl apply --server-side --force-conflicts --field-manager=helm -f -"

func restoring(name string) string {
	return "helm get manifest divvy -n divvy-system | kubectl apply --server-side --force-conflicts --field-manager=helm -l " +
		"app.kubernetes.io/name=" + name + " -f -"
}

func deploymentOf(w *world, label string) *appsv1.Deployment {
	return program(w.Release(), w.Deployments, label)
}

func waiting(p *corev1.Pod, reason, message string) {
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", Image: p.Spec.Containers[0].Image, RestartCount: 4,
		State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}}
}

func TestFaults(t *testing.T) {
	faults := map[string]fault{
		"nothing is installed": {
			"release", func(w *world) { w.Releases = nil }, Error, "cluster", "Divvy is not installed", "helm install divvy", "",
		},
		"two releases": {
			"release", func(w *world) {
				w.Releases = append(w.Releases, Release{Name: "second", Namespace: "other", Helm: true})
			},
			Error, "release second in namespace other", "in addition to release divvy", "Keep only one release",
			"helm uninstall second -n other",
		},
		"an upgrade was interrupted": {
			"release", func(w *world) { w.Releases[0].Status = "pending-upgrade" },
			Warning, "release divvy in namespace divvy-system", "pending-upgrade", "no helm command", "helm rollback divvy -n divvy-system",
		},
		"an upgrade failed": {
			"release", func(w *world) { w.Releases[0].Status = "failed" },
			Warning, "release divvy in namespace divvy-system", "failed", "helm status", "helm rollback divvy -n divvy-system",
		},
		"an object was deleted": {
			"objects", func(w *world) { w.Objects.Live[1].Found = false },
			Error, "ClusterRoleBinding divvy-node", "missing", "Restore the object",
			restoring("divvy-node"),
		},
		"a rule was changed": {
			"objects", func(w *world) { w.Objects.Live[0].Differs = "rules[0].verbs" }, Error, "ClusterRole divvy-node",
			"changed after the installation, at rules[0].verbs", "Restore the object", restoring("divvy-node"),
		},
		"an object cannot be read": {
			"objects", func(w *world) { w.Objects.Live[0].Error = "needs get of clusterroles" },
			Unknown, "ClusterRole divvy-node", "needs get",
			"Request the permission to read it", "",
		},
		"a webhook of a release that is gone": {
			"leftovers", func(w *world) {
				w.Labelled = append(w.Labelled, Labelled{"mutatingwebhookconfiguration", "old", "gone"})
			},
			Error, "mutatingwebhookconfiguration old", `release "gone", which is not installed`,
			"Delete", "kubectl delete mutatingwebhookconfiguration old",
		},
		"a role of a release that is gone": {
			"leftovers", func(w *world) { w.Labelled = append(w.Labelled, Labelled{"clusterrole", "old", "gone"}) },
			Warning, "clusterrole old", "not installed", "Delete", "kubectl delete clusterrole old",
		},
		"an inventory that nobody keeps": {
			"leftovers", func(w *world) { w.DaemonSets = w.DaemonSets[1:] },
			Warning, "Node node-a", "which is not installed", "Remove the annotations",
			"kubectl annotate node node-a divvy.dev/inventory- divvy.dev/labels- divvy.dev/counts-",
		},
		"a wiring that nobody needs any more": {
			"leftovers", func(w *world) {
				w.Deployments = slices.DeleteFunc(w.Deployments, func(d appsv1.Deployment) bool { return d.Name == nameExtender })
				w.DaemonSets = slices.DeleteFunc(w.DaemonSets, func(d appsv1.DaemonSet) bool { return d.Name == nameSchedconf })
			},
			Warning, "Pod kube-system/kube-scheduler-node-a", "this kube-scheduler calls an extender that is not installed",
			"divvy-control schedconf uninstall", "",
		},
		"GCUShare's extender": {
			"leftovers", func(w *world) {
				w.Deployments = append(w.Deployments, appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: kubeSystem,
					Name: "gcushare-scheduler-extender"}})
			},
			Warning, "Deployment kube-system/gcushare-scheduler-extender", "a program that Divvy replaces",
			"docs/migrating.md", "kubectl delete deployment gcushare-scheduler-extender -n kube-system",
		},
		"GCUShare's config manager, by helm": {
			"leftovers", func(w *world) {
				w.DaemonSets = append(w.DaemonSets, appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{
					Namespace: kubeSystem, Name: "gcushare-config-manager", Annotations: map[string]string{annotationRelease: "it's; rm",
						annotationNamespace: kubeSystem},
				}})
			},
			Warning, "DaemonSet kube-system/gcushare-config-manager", "a program that Divvy replaces",
			"docs/migrating.md", `helm uninstall 'it'\''s; rm' -n kube-system`,
		},
		"the extender is scaled down": {
			"workloads", func(w *world) { deploymentOf(w, nameExtender).Spec.Replicas = ptr.To[int32](0) },
			Error, "Deployment divvy-system/divvy-extender", "0 replicas",
			"Scale", "kubectl scale deployment/divvy-extender -n divvy-system --replicas=2",
		},
		"one of two extenders finds no node": {
			"workloads", func(w *world) {
				d := deploymentOf(w, nameExtender)
				d.Spec.Replicas, d.Status.ReadyReplicas = ptr.To[int32](2), 1
				other := running(system, "divvy-extender-y", d.Spec.Template)
				other.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
					Message: "0/1 nodes are available: 1 node(s) didn't have free ports"}}
				w.Pods = append(w.Pods, other)
			},
			Warning, "Deployment divvy-system/divvy-extender", "1 of 2 replicas are ready, and another one cannot be scheduled",
			"reduce extender.replicas", "",
		},
		"a daemon keeps ending": {
			"workloads", func(w *world) {
				p := w.ready("divvy-node-x", false)
				waiting(p, "CrashLoopBackOff", "back-off")
				p.Status.ContainerStatuses[0].LastTerminationState.Terminated = &corev1.ContainerStateTerminated{ExitCode: 1,
					Message: "first\nerror: no library\n"}
			},
			Error, "Pod divvy-system/divvy-node-x", "keeps exiting: it exited with code 1, 4 times: error: no library",
			"kubectl logs divvy-node-x -n divvy-system -c main --previous", "",
		},
		"no GPU operator writes the files that a daemon waits for": {
			"workloads", func(w *world) { w.waitsForOperator() },
			Error, "Pod divvy-system/divvy-node-x",
			"waits for files that NVIDIA's GPU operator writes, but this cluster has no DaemonSet nvidia-operator-validator",
			"node.gpuOperator.enabled=false", "",
		},
		"no GPU operator, and the container has ended before": {
			"workloads", func(w *world) {
				p := w.waitsForOperator()
				p.Status.InitContainerStatuses[0].State = corev1.ContainerState{
					Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
			},
			Error, "Pod divvy-system/divvy-node-x", "no DaemonSet nvidia-operator-validator", "examples/values/nvidia.yaml", "",
		},
		"the GPU operator is at work": {
			"workloads", func(w *world) {
				w.waitsForOperator()
				w.DaemonSets = append(w.DaemonSets,
					appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-operator", Name: "nvidia-operator-validator"}})
			},
			Error, "Pod divvy-system/divvy-node-x", "its init container wait-for-driver has not completed",
			"kubectl logs divvy-node-x -n divvy-system -c wait-for-driver", "",
		},
		"an image is not there": {
			"workloads", func(w *world) { waiting(w.ready("divvy-extender-x", false), "ImagePullBackOff", "not found") },
			Error, "Pod divvy-system/divvy-extender-x", "image ghcr.io/divvy-gpu/divvy-control:1 cannot be pulled: not found",
			"image.registry", "",
		},
		"a Secret that a pod mounts is not there": {
			"workloads", func(w *world) {
				waiting(w.ready("divvy-node-x", false), "CreateContainerConfigError", `secret "divvy-grant-key" not found`)
			},
			Error, "Pod divvy-system/divvy-node-x", `cannot start: secret "divvy-grant-key" not found`, "Restore the object", "",
		},
		"a program of Divvy's finds no node": {
			"workloads", func(w *world) {
				w.ready("divvy-extender-x", false).Status.Conditions[0] = corev1.PodCondition{Type: corev1.PodScheduled,
					Status: corev1.ConditionFalse, Message: "0/1 nodes are available"}
			},
			Error, "Pod divvy-system/divvy-extender-x", "not scheduled: 0/1 nodes", "Free capacity for it", "",
		},
		"a daemon says what it waits for": {
			"workloads", func(w *world) {
				w.ready("divvy-node-x", false)
				w.Objects.Readiness[system+"/divvy-node-x"] = Answer{Text: "libefml.so is not on the host"}
			},
			Error, "Pod divvy-system/divvy-node-x", "not ready: libefml.so is not on the host", "docs/troubleshooting.md", "",
		},
		"kubelet is a little behind": {
			"workloads", func(w *world) {
				w.ready("divvy-node-x", false)
				w.Objects.Readiness[system+"/divvy-node-x"] = Answer{OK: true, Text: "ok"}
			},
			Warning, "Pod divvy-system/divvy-node-x", "kubelet has not updated", "Check again in a few seconds", "",
		},
		"a container has ended": {
			"workloads", func(w *world) {
				p := w.ready("divvy-extender-x", false)
				p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main",
					State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 2, Reason: "Error"}}}}
			},
			Error, "Pod divvy-system/divvy-extender-x", "container main exited with code 2: Error", "kubectl logs", "",
		},
		"a pod failed": {
			"workloads", func(w *world) {
				p := w.ready("divvy-extender-x", false)
				p.Status.Phase, p.Status.Message = corev1.PodFailed, "Evicted for memory"
			},
			Warning, "Pod divvy-system/divvy-extender-x", "Evicted", "this command removes",
			"kubectl delete pod divvy-extender-x -n divvy-system",
		},
		"pods cannot be made": {
			"workloads", func(w *world) {
				d := deploymentOf(w, nameExtender)
				d.Status.Conditions = []appsv1.DeploymentCondition{{Type: appsv1.DeploymentReplicaFailure, Status: corev1.ConditionTrue,
					Message: "forbidden: exceeded quota"}}
			},
			Error, "Deployment divvy-system/divvy-extender", "exceeded quota", "Fix the problem that the message describes", "",
		},
		"a DaemonSet runs nowhere": {
			"workloads", func(w *world) {
				d := program(w.Release(), w.DaemonSets, nameSchedconf)
				d.Spec.Template.Spec.NodeSelector = map[string]string{"a": "b"}
				d.Status = appsv1.DaemonSetStatus{ObservedGeneration: 1}
			},
			Error, "DaemonSet divvy-system/divvy-schedconf", "runs on no node", "Label a node", "",
		},
		"pods are missing": {
			"workloads", func(w *world) { program(w.Release(), w.DaemonSets, nameNode).Status.NumberReady = 0 },
			Error, "DaemonSet divvy-system/divvy-node", "0 of 1 pods", "kubectl describe daemonset divvy-node", "",
		},
		"settings are not taken up": {
			"workloads", func(w *world) { program(w.Release(), w.DaemonSets, nameNode).Generation = 2 },
			Warning, "DaemonSet divvy-system/divvy-node", "its latest settings have not been rolled out yet",
			"Check again in a few seconds", "",
		},
		"another image somewhere": {
			"versions", func(w *world) {
				program(w.Release(), w.DaemonSets, namePoolNode).Spec.Template.Spec.Containers[0].Image = "ghcr.io/divvy-gpu/divvy-node:2"
				w.pod("bitfusion-device-plugin-x").Spec.Containers[0].Image = "ghcr.io/divvy-gpu/divvy-node:2"
			},
			Warning, "image divvy-node", "1 in DaemonSet divvy-system/divvy-node; 2 in DaemonSet bwki/bitfusion-device-plugin",
			"Restore the object", restoreAll,
		},
		"a rollout under way": {
			"versions", func(w *world) { w.pod("divvy-node-x").Spec.Containers[0].Image = "ghcr.io/divvy-gpu/divvy-node:0" },
			Warning, "daemonset divvy-system/divvy-node", "an image other than the specified one still runs in divvy-node-x",
			"Wait", "kubectl rollout status daemonset/divvy-node -n divvy-system --timeout=120s",
		},
		"an old kubectl-divvy": {
			"versions", func(w *world) { w.Tool = "v0.0.9" },
			Warning, "kubectl-divvy", "v0.0.9, but the extender v0.1.0", "Use the kubectl-divvy", "",
		},
		"half an upgrade": {
			"versions", func(w *world) { program(w.Release(), w.DaemonSets, nameNode).Labels[labelVersion] = "0.2.0" },
			Warning, "release divvy", "several versions of the chart: 0.1.0 of ", "helm upgrade", "",
		},
		"an old Kubernetes": {
			"versions", func(w *world) { w.Kubernetes = "v1.29.3+k3s1" }, Error, "API server", "Divvy requires 1.30.0", "Upgrade", "",
		},
		"a configuration with a mistake": {
			"configuration", func(w *world) { w.Objects.ConfigMaps[0].Data["config.yaml"] += "logLevel: loud\n" },
			Error, "ConfigMap divvy-system/divvy-node", "logLevel", "keep the last valid one", restoring("divvy-node"),
		},
		"a named configuration with a mistake": {
			"configuration", func(w *world) {
				w.Objects.ConfigMaps[1].Data["training"] = "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\nresource: []\n"
			},
			Error, "ConfigMap divvy-system/divvy-node-configs", "entry training: ", "divvy.dev/config", restoring("divvy-node"),
		},
		"a configuration whose MPS is not installed": {
			"configuration", func(w *world) { w.Objects.ConfigMaps[1].Data["training"] += isolated("cooperative") },
			Error, "ConfigMap divvy-system/divvy-node-configs",
			"entry training: resource nvidia.com/gpu-memory has isolation cooperative, and the release has no DaemonSet divvy-mps",
			"does not read node.existingConfigMap", "",
		},
		"a configuration whose limits cannot be proven": {
			"configuration", func(w *world) { w.Objects.ConfigMaps[1].Data["training"] += isolated("driver") },
			Error, "ConfigMap divvy-system/divvy-node-configs", "cannot install the hook on the host", "and upgrade the release", "",
		},
		"a configuration whose limits cannot be proven, where use is measured": {
			"configuration", func(w *world) {
				program(w.Release(), w.DaemonSets, nameNode).Spec.Template.Spec.HostPID = true
				w.Objects.ConfigMaps[1].Data["training"] += isolated("driver")
			},
			Error, "ConfigMap divvy-system/divvy-node-configs", "cannot install the hook on the host", "and upgrade the release", "",
		},
		"a configuration whose limits cannot be proven without the host's processes": {
			"configuration", func(w *world) {
				spec := &program(w.Release(), w.DaemonSets, nameNode).Spec.Template.Spec
				spec.Volumes = append(spec.Volumes, corev1.Volume{Name: "hook"})
				w.Objects.ConfigMaps[1].Data["training"] += isolated("driver")
			},
			Error, "ConfigMap divvy-system/divvy-node-configs", "do not have the host's PID namespace", "and upgrade the release", "",
		},
		"a configuration that is not there": {
			"configuration", func(w *world) { w.Objects.ConfigMaps = w.Objects.ConfigMaps[1:] }, Error, "ConfigMap divvy-system/divvy-node",
			"missing", "Restore the object", restoring("divvy-node"),
		},
		"a node names a configuration that is not there": {
			"configuration", func(w *world) { w.Nodes[0].Labels["divvy.dev/config"] = "no-such" },
			Error, "Node node-a", `"no-such", which does not exist; existing configurations: training`, "Select an existing one",
			"kubectl label node node-a divvy.dev/config-",
		},
		"the key is gone": {
			"grant-key", func(w *world) { w.Objects.Secrets = w.Objects.Secrets[1:] }, Error, "Secret divvy-system/divvy-grant-key",
			"missing", "Restore the object", restoring("divvy"),
		},
		"the key is too short": {
			"grant-key", func(w *world) { w.Objects.Secrets[0].Data["key"] = []byte("short") },
			Error, "Secret divvy-system/divvy-grant-key",
			"has 5 bytes, but at least 32", "Restore the object", restoring("divvy"),
		},
		"the key of one's own is empty": {
			"grant-key", func(w *world) {
				w.Releases[0].Manifest, w.Objects.Secrets[0].Data = nil, nil
			},
			Error, "Secret divvy-system/divvy-grant-key", "no entry key", "32 random bytes",
			"kubectl create secret generic divvy-grant-key -n divvy-system",
		},
		"a node is excluded and still has an inventory": {
			"node-labels", func(w *world) { w.Nodes[0].Labels[enabledLabel] = "false" },
			Warning, "Node node-a", "recently in use", "This command includes it again",
			"kubectl label node node-a divvy.dev/enabled=true --overwrite",
		},
		"a node lost its label": {
			"node-labels", func(w *world) { delete(w.Nodes[0].Labels, "enflame.com/gcushare") },
			Error, "Node node-a", "no label that selects it", "includes it again",
			"kubectl label node node-a divvy.dev/enabled=true --overwrite",
		},
		"no node is labelled": {
			"node-labels", func(w *world) {
				w.Nodes[0].Labels, w.Nodes[0].Annotations = nil, nil
			},
			Error, "DaemonSet divvy-system/divvy-node", "no node is selected to share its devices",
			"kubectl label node NODE divvy.dev/enabled=true", "",
		},
		"a label that means nothing": {
			"node-labels", func(w *world) { w.Nodes[0].Labels[enabledLabel] = "yes" },
			Warning, "Node node-a", `has the invalid value "yes"`, "Set it to true or false",
			"kubectl label node node-a divvy.dev/enabled=true --overwrite",
		},
		"a label that the values do not ask for": {
			"node-labels", func(w *world) {
				program(w.Release(), w.DaemonSets, nameNode).Spec.Template.Spec.Affinity = nil
				program(w.Release(), w.DaemonSets, nameNode).Spec.Template.Spec.NodeSelector =
					map[string]string{"nvidia.com/gpu.present": "true"}
				w.Nodes[0].Labels[enabledLabel], w.Nodes[0].Annotations = "true", nil
			},
			Warning, "Node node-a", "divvy.dev/enabled=true has no effect", "Set the required labels, or change the values", "",
		},
		"a taint keeps the daemon away": {
			"node-labels", func(w *world) {
				w.without("divvy-node-x")
				w.Nodes[0].Spec.Taints = []corev1.Taint{{Key: "team", Value: "a", Effect: corev1.TaintEffectNoSchedule}}
			},
			Error, "Node node-a", "does not tolerate its taint team=a:NoSchedule", "node.tolerations", "",
		},
		"no daemon although the node is labelled": {
			"node-labels", func(w *world) { w.without("divvy-node-x") }, Error, "Node node-a",
			"it is labelled, but divvy-node does not run on it", "kubectl describe daemonset divvy-node", "",
		},
		"a node is not ready": {
			"node-ready", func(w *world) {
				w.Nodes[0].Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown,
					Message: "Kubelet stopped posting"}
			},
			Error, "Node node-a", "Kubelet stopped posting", "Fix the node; see the log of its kubelet", "",
		},
		"nothing is published": {
			"inventory", func(w *world) { w.Nodes[0].Annotations = nil }, Error, "Node node-a",
			"its divvy-node is ready but has not published an inventory", "Restart", "kubectl delete pod divvy-node-x -n divvy-system",
		},
		"garbage is published": {
			"inventory", func(w *world) { w.Nodes[0].Annotations[wire.InventoryAnnotation] = "{\x1b[31m" },
			Error, "Node node-a", "cannot be parsed", "Restart divvy-node, which publishes the inventory",
			"kubectl delete pod divvy-node-x -n divvy-system",
		},
		"kubelet has forgotten the plugin": {
			"inventory", func(w *world) { w.Nodes[0].Status.Allocatable[memory] = resource.MustParse("0") },
			Error, "Node node-a", "offers 0 of enflame.com/gcu-memory but divvy-node has 32", "registers with kubelet",
			"kubectl delete pod divvy-node-x -n divvy-system",
		},
		"kubelet never knew the plugin": {
			"inventory", func(w *world) { delete(w.Nodes[0].Status.Allocatable, memory) },
			Error, "Node node-a", "does not offer enflame.com/gcu-memory", "registers", "kubectl delete pod divvy-node-x -n divvy-system",
		},
		"kubelet offers too much": {
			"inventory", func(w *world) { w.Nodes[0].Status.Allocatable[memory] = resource.MustParse("48") },
			Warning, "Node node-a", "offers 48", "Restart", "kubectl delete pod divvy-node-x -n divvy-system",
		},
		"a device is lost": {
			"devices", func(w *world) {
				bad := shares()
				bad[1].Health = accel.Health{Unhealthy: true, Reason: "fell off the bus"}
				w.publish(accel.Inventory{Resource: memory, Unit: "1", Shares: bad})
				w.Nodes[0].Status.Allocatable[memory] = resource.MustParse("16")
			},
			Warning, "Node node-a, device 1 (card-1)", "fell off the bus", "docs/health.md", "",
		},
		"units of a device are withheld": {
			"devices", func(w *world) {
				some := shares()
				some[1].Withheld = 3
				w.publish(accel.Inventory{Resource: memory, Unit: "1", Shares: some})
			},
			Warning, "Node node-a, device 1 (card-1)", "3 of its 16 units of enflame.com/gcu-memory are withheld from new pods",
			"Raise their requests", "kubectl divvy inspect --usage node-a",
		},
		"a device is in quarantine": {
			"devices", func(w *world) {
				bad := shares()
				since := time.Date(2026, 7, 1, 10, 0, 0, 0, time.UTC)
				q := accel.Quarantine{Device: bad[1].ID, Vendor: "enflame", Index: 1, Cause: "library", Reason: "the library says so",
					Since: since}
				bad[1].Health = q.Health()
				w.publish(accel.Inventory{Resource: memory, Unit: "1", Shares: bad})
				w.Nodes[0].Status.Allocatable[memory] = resource.MustParse("16")
				w.quarantine(q)
			},
			Warning, "Node node-a, device 1 (card-1)", "it is in quarantine since 2026-07-01T10:00:00Z: the library says so",
			"Repair or replace it", "kubectl divvy device release node-a card-1",
		},
		"a device in quarantine is not there any more": {
			"devices", func(w *world) {
				w.quarantine(accel.Quarantine{Device: "card-9", Vendor: "enflame", Index: 1, Cause: "administrator", Reason: "fan",
					Since: time.Unix(0, 0)})
			},
			Warning, "Node node-a, device 1 (card-9)", ": fan", "It is not on the node now", "kubectl divvy device release node-a card-9",
		},
		"a list of devices in quarantine that nobody can read": {
			"devices", func(w *world) { w.Nodes[0].Annotations[wire.QuarantineAnnotation] = "{" },
			Warning, "Node node-a", "its annotation divvy.dev/quarantine cannot be parsed", "Remove it",
			"kubectl annotate node node-a divvy.dev/quarantine-",
		},
		"the vendor's plugin on the same node": {
			"other-plugins", func(w *world) {
				d := appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: kubeSystem, Name: "gcushare-device-plugin"}}
				w.DaemonSets = append(w.DaemonSets, d)
				p := running(kubeSystem, "gcushare-device-plugin-1", program(w.Release(), w.DaemonSets, nameNode).Spec.Template)
				p.Labels = nil
				p.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Name: d.Name}}
				w.Pods = append(w.Pods, p)
			},
			Error, "DaemonSet kube-system/gcushare-device-plugin", "node node-a beside divvy-node",
			"docs/migrating.md", "kubectl delete daemonset gcushare-device-plugin -n kube-system",
		},
		"an unknown plugin at the socket": {
			"other-plugins", func(w *world) {
				w.Objects.Readiness[system+"/divvy-node-x"] =
					Answer{Text: "another device plugin answers at /var/lib/kubelet/device-plugins/x.sock"}
			},
			Error, "Pod divvy-system/divvy-node-x", "another device plugin answers", "Remove", "",
		},
		"HAMi's plugin on the same node": {
			"other-plugins", func(w *world) {
				w.Nodes[0].Labels["divvy.dev/nvidia.present"] = "true"
				p := running(kubeSystem, "hami-device-plugin-1", program(w.Release(), w.DaemonSets, nameNode).Spec.Template)
				p.Labels = nil
				w.Pods = append(w.Pods, p)
			},
			Error, "Pod kube-system/hami-device-plugin-1", "node node-a beside divvy-node", "docs/migrating.md",
			"kubectl delete pod hami-device-plugin-1 -n kube-system",
		},
		"another way than the node calls for": {
			"node-setup", func(w *world) {
				w.setup(wire.NodeSetup{Injection: []string{"environment"}, Pinned: true, Detected: "cdi",
					Why: "containerd adds CDI devices"})
			},
			Warning, "Node node-a", "by environment, as configured, but the node calls for cdi: containerd adds", "[auto]", "",
		},
		"CDI specifications that contradict each other": {
			"node-setup", func(w *world) {
				w.setup(wire.NodeSetup{Injection: []string{"cdi"}, Detected: "cdi",
					Findings: []wire.SetupFinding{{Kind: "cdi-conflict", What: "a and b define the same devices"}}})
			},
			Error, "Node node-a", "a and b define the same devices", "Remove the file", "",
		},
		"what NVIDIA's plugin left": {
			"node-setup", func(w *world) {
				w.setup(wire.NodeSetup{Injection: []string{"cdi"}, Detected: "cdi",
					Findings: []wire.SetupFinding{{Kind: "cdi-stale", What: "x.json was written by NVIDIA's device plugin"}}})
			},
			Warning, "Node node-a", "x.json was written", "once no container runs", "",
		},
		"any container gets GPUs": {
			"node-setup", func(w *world) {
				w.setup(wire.NodeSetup{Injection: []string{"environment"}, Detected: "environment",
					Findings: []wire.SetupFinding{{Kind: "environment", What: "any container gets the GPUs"}}})
			},
			Warning, "Node node-a", "any container gets the GPUs", "as-volume-mounts = true", "",
		},
		"an API server without claims": {
			"claim-devices", func(w *world) { w.Claims = Claims{} }, Error, "the API server",
			"does not have resource.k8s.io/v1", "Kubernetes 1.34", "",
		},
		"a driver that kubelet does not know": {
			"claim-devices", func(w *world) {
				w.drivers(wire.ClaimDriver{Driver: claimDriver, Problem: "kubelet did not register it"})
			},
			Error, "Node node-a", "driver enflame.divvy.dev: kubelet did not register it", "See the log of divvy-node",
			"kubectl delete pod divvy-node-x -n divvy-system",
		},
		"no driver": {
			"claim-devices", func(w *world) { delete(w.Nodes[0].Annotations, wire.ClaimDriversAnnotation) },
			Error, "Node node-a", "reports no driver", "Restart divvy-node", "kubectl delete pod divvy-node-x -n divvy-system",
		},
		"drivers of a newer release": {
			"claim-devices", func(w *world) { w.Nodes[0].Annotations[wire.ClaimDriversAnnotation] = `{"v":9}` }, Warning, "Node node-a",
			"cannot be parsed", "writes it again", "kubectl annotate node node-a divvy.dev/claim-drivers-",
		},
		"slices that are gone": {
			"claim-devices", func(w *world) { w.Claims.Slices = nil }, Error, "Node node-a", "none of its ResourceSlices exist",
			"publishes them", "kubectl delete pod divvy-node-x -n divvy-system",
		},
		"slices that were trimmed": {
			"claim-devices", func(w *world) {
				w.drivers(wire.ClaimDriver{Driver: claimDriver, GatesOff: []string{"DRAPartitionableDevices"},
					LeftOut: []string{"gcu-0-slots"}})
			}, Warning, "Node node-a",
			"drops the fields of DRAPartitionableDevices, so devices are published in a reduced form, without gcu-0-slots",
			"Switch these feature gates on", "",
		},
		"too many devices that overlap": {
			"claim-devices", func(w *world) { w.drivers(wire.ClaimDriver{Driver: claimDriver, LeftOut: []string{"board-a"}}) },
			Warning, "Node node-a", "some devices are not published, because more devices overlap", "fewer resources", "",
		},
		"no class": {
			"claim-devices", func(w *world) { w.Claims.Classes = nil }, Error, "DeviceClasses",
			"none selects devices of driver enflame.divvy.dev",
			"Restore the objects", restoring(nameNode),
		},
		"a name that is the device plugin's": {
			"claim-devices", func(w *world) { w.Claims.Classes[0].Spec.ExtendedResourceName = ptr.To(memory) }, Warning,
			"DeviceClass gcu.enflame.divvy.dev", "enflame.com/gcu-memory is also what the device plugin of node node-a offers",
			"Use another name", "",
		},
		"a claim of no class": {
			"claims", func(w *world) { w.claiming("board.enflame.divvy.dev") }, Error, "ResourceClaim team/mine",
			"the DeviceClass board.enflame.divvy.dev, which does not exist", "Correct the name", "",
		},
		"a claim that cannot be prepared": {
			"claims", func(w *world) {
				w.event(w.claiming("gcu.enflame.divvy.dev"), "ClaimNotPrepared", "gcu-0 is held by claim team/other")
			}, Error, "Pod team/claimer", "it is on node node-a, and gcu-0 is held by claim team/other", "Remove the reason", "",
		},
		"a claim that was prepared for another pod": {
			"claims", func(w *world) {
				p := w.claiming("gcu.enflame.divvy.dev")
				p.Status.Phase = corev1.PodRunning
				w.event(p, "ClaimMisused", "container a has other devices than it uses")
			}, Error, "Pod team/claimer", "other devices", "as the message says", "",
		},
		"a setup of a newer release": {
			"node-setup", func(w *world) { w.Nodes[0].Annotations[wire.SetupAnnotation] = `{"v":9}` }, Warning, "Node node-a",
			"cannot be parsed", "writes it again", "kubectl annotate node node-a divvy.dev/node-setup-",
		},
		"the toolkit's NRI plugin": {
			"node-setup", func(w *world) {
				d := appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "gpu-operator", Name: "nvidia-container-toolkit-daemonset"}}
				d.Spec.Template.Spec.Containers = []corev1.Container{{Env: []corev1.EnvVar{{Name: "ENABLE_NRI_PLUGIN", Value: "true"}}}}
				w.DaemonSets = append(w.DaemonSets, d)
			},
			Warning, "DaemonSet gpu-operator/nvidia-container-toolkit-daemonset", "whether or not a device plugin allocated them",
			"admission policy", "",
		},
		"an old kubelet": {
			"kubelet", func(w *world) { w.Nodes[0].Status.NodeInfo.KubeletVersion = "v1.28.1" }, Error, "Node node-a",
			"Divvy requires 1.30.0", "Upgrade kubelet", "",
		},
		"a kubelet that is too new": {
			"kubelet", func(w *world) { w.Nodes[0].Status.NodeInfo.KubeletVersion = "v1.38.0" }, Warning, "Node node-a",
			"newer than the API server", "control plane first", "",
		},
		"a kubelet that is too far behind": {
			"kubelet", func(w *world) { w.Nodes[0].Status.NodeInfo.KubeletVersion = "v1.33.0" }, Warning, "Node node-a",
			"more than three minor versions", "Upgrade kubelet", "",
		},
		"a unit that is too fine": {
			"kubelet", func(w *world) {
				var many []accel.Share
				for i := range 8 {
					many = append(many, accel.Share{Device: accel.Device{Index: i, ID: accel.DeviceID(fmt.Sprint("card-", i)),
						MemoryBytes: 48 << 30, NUMANode: accel.NoNUMA}, Units: 48})
				}
				w.publish(accel.Inventory{Resource: memory, Unit: "1", Shares: many})
				w.Nodes[0].Status.Allocatable[memory] = resource.MustParse("384")
				w.Objects.ConfigMaps[0].Data["config.yaml"] =
					strings.Replace(w.Objects.ConfigMaps[0].Data["config.yaml"], `"1"`, `"0.001"`, 1)
			},
			Error, "Node node-a", "too small: 384000 units make a list of 6", `Set memoryUnit to "0.01"`, "",
		},
		"the extender has no service": {
			"extender", func(w *world) { w.Objects.Services = w.Objects.Services[1:] }, Error, "Service divvy-system/divvy-extender",
			"missing", "Restore the object", restoring("divvy-extender"),
		},
		"no extender is ready": {
			"extender", func(w *world) { w.Objects.Endpoints[0].Endpoints[0].Conditions.Ready = ptr.To(false) },
			Error, "Service divvy-system/divvy-extender", "no ready extender", "Deployment divvy-extender", "",
		},
		"the extender does not answer": {
			"extender", func(w *world) { w.Objects.Extender["readyz"] = Answer{Text: "the books are not complete"} },
			Error, "Service divvy-system/divvy-extender", "/readyz does not respond through the API server: the books", "port 32766", "",
		},
		"kube-scheduler is not wired": {
			"scheduler", func(w *world) { w.pod("kube-scheduler-" + theNode).Annotations = nil },
			Error, "Pod kube-system/kube-scheduler-node-a", "does not call the extender", "kubectl logs daemonset/divvy-schedconf",
			"kubectl rollout restart daemonset/divvy-schedconf -n divvy-system",
		},
		"kube-scheduler is not replaced": {
			"scheduler", func(w *world) {
				spec := &program(w.Release(), w.DaemonSets, nameSchedconf).Spec.Template.Spec
				spec.Containers[0].Args = append(spec.Containers[0].Args, "--replace-image=example.com/divvy-scheduler-MINOR:v1")
			},
			Error, "Pod kube-system/kube-scheduler-node-a", "divvy-scheduler does not run in place of this kube-scheduler",
			"kubectl logs daemonset/divvy-schedconf", "kubectl rollout restart daemonset/divvy-schedconf -n divvy-system",
		},
		"the wiring was rolled back": {
			"scheduler", func(w *world) {
				w.pod("kube-scheduler-" + theNode).Annotations = nil
				for i, reason := range []string{"SchedulerWired", "SchedulerRolledBack", "SchedulerUnwired"} {
					e := corev1.Event{Reason: reason, Message: "it ended: unknown field",
						InvolvedObject: corev1.ObjectReference{Name: theNode}}
					e.LastTimestamp = metav1.NewTime(now.Add(-time.Duration([]int{3, 1, 2}[i]) * time.Minute))
					w.Wiring = append(w.Wiring, e)
				}
			},
			Error, "Pod kube-system/kube-scheduler-node-a", "rolled back: it ended: unknown field",
			"Fix the problem that the message describes", "kubectl rollout restart daemonset/divvy-schedconf",
		},
		"kube-scheduler is not ready": {
			"scheduler", func(w *world) { w.ready("kube-scheduler-"+theNode, false) }, Error, "Pod kube-system/kube-scheduler-node-a",
			"not ready", "kubectl logs", "",
		},
		"kube-scheduler is not up in time": {
			"scheduler", func(w *world) { w.startedFor("kube-scheduler-"+theNode, 31*time.Second) }, Error,
			"Pod kube-system/kube-scheduler-node-a", "not ready", "kubectl logs", "",
		},
		"kube-scheduler was up and is not ready": {
			"scheduler", func(w *world) {
				w.startedFor("kube-scheduler-"+theNode, 20*time.Second).Status.ContainerStatuses[0].Started = ptr.To(true)
			}, Error, "Pod kube-system/kube-scheduler-node-a", "not ready", "kubectl logs", "",
		},
		"kube-scheduler ends again and again": {
			"scheduler", func(w *world) {
				c := &w.startedFor("kube-scheduler-"+theNode, 20*time.Second).Status.ContainerStatuses[0]
				c.RestartCount, c.State = 1, corev1.ContainerState{
					Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
			}, Error, "Pod kube-system/kube-scheduler-node-a", "not ready", "kubectl logs", "",
		},
		"no kube-scheduler to wire": {
			"scheduler", func(w *world) { w.without("kube-scheduler-" + theNode) }, Error, "control plane",
			"so divvy-schedconf cannot configure it", "scheduler.mode=dedicated", "",
		},
		"a control plane without schedconf": {
			"scheduler", func(w *world) {
				w.Nodes = append(w.Nodes,
					corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "second",
						Labels: map[string]string{"node-role.kubernetes.io/master": ""}}})
			},
			Error, "Node second", "divvy-schedconf does not run there", "schedconf.tolerations", "",
		},
		"dedicated, without its webhook": {
			"scheduler", func(w *world) { w.dedicate() }, Error, "MutatingWebhookConfiguration divvy-scheduler",
			"missing", "Restore the object", restoring("divvy-scheduler"),
		},
		"dedicated, with the old wiring": {
			"scheduler", func(w *world) {
				w.dedicate()
				w.Admission.Mutating[0].Name = nameScheduler
				w.pod("kube-scheduler-" + theNode).Annotations = map[string]string{annotationWired: "x"}
			},
			Warning, "Pod kube-system/kube-scheduler-node-a", "still calls the extender", "divvy-control schedconf uninstall", "",
		},
		"dedicated, two minors behind": {
			"scheduler", func(w *world) { w.dedicateOf("v1.37.1-eks-7f6f3c1", "example.com/divvy-scheduler-1.35:v1@sha256:0") }, Error,
			"Deployment divvy-system/divvy-scheduler", "its scheduler is of Kubernetes 1.35 and the API server is of 1.37",
			"Run helm upgrade", "",
		},
		"dedicated, newer than the API server": {
			"scheduler", func(w *world) { w.dedicateOf("v1.33.2", "registry.k8s.io/kube-scheduler:v1.34.2") }, Error,
			"Deployment divvy-system/divvy-scheduler", "its scheduler is of Kubernetes 1.34 and the API server is of 1.33",
			"scheduler.image.tag", "",
		},
		"by hand, without a configuration": {
			"scheduler", func(w *world) {
				w.unwire()
				w.pod("kube-scheduler-" + theNode).Spec.Containers[0].Command = []string{"kube-scheduler"}
			},
			Error, "Pod kube-system/kube-scheduler-node-a", "has no configuration file", "divvy-control schedconf install", "",
		},
		"by hand, where nobody sees": {
			"scheduler", func(w *world) { w.unwire(); w.without("kube-scheduler-" + theNode) }, Unknown, "control plane",
			"cannot be checked", "scheduler.mode=dedicated", "",
		},
		"a caBundle is corrupt": {
			"webhooks", func(w *world) { w.Admission.Mutating[0].Webhooks[0].ClientConfig.CABundle = []byte("garbage") },
			Error, "MutatingWebhookConfiguration bwki-webhook-cfg, bwkimua.bitfusion.io", "its caBundle cannot be parsed",
			"Restart the program that writes it", "kubectl rollout restart deployment/bitfusion-webhook-deployment -n bwki",
		},
		"a caBundle is empty": {
			"webhooks", func(w *world) { w.Admission.Mutating[0].Webhooks[0].ClientConfig.CABundle = nil },
			Error, "MutatingWebhookConfiguration bwki-webhook-cfg, bwkimua.bitfusion.io", "caBundle is empty",
			"Restart the program that writes it", "kubectl rollout restart deployment/bitfusion-webhook-deployment -n bwki",
		},
		"a caBundle of another CA": {
			"webhooks", func(w *world) {
				w.Admission.Validating[0].Webhooks[0].ClientConfig.CABundle = issue(w.t, nil, now.Add(-year), now.Add(year)).crt()
			},
			Warning, "ValidatingWebhookConfiguration divvy-config, config.divvy.dev", "does not contain the CA",
			"Restart the program that writes it", "kubectl rollout restart deployment/divvy-extender -n divvy-system",
		},
		"nothing is behind a webhook": {
			"webhooks", func(w *world) { w.Objects.Endpoints[1].Endpoints = nil },
			Error, "MutatingWebhookConfiguration bwki-webhook-cfg, bwkimua.bitfusion.io", "no ready pod is behind",
			"Deployment bitfusion-webhook-deployment", "",
		},
		"a webhook's service is gone": {
			"webhooks", func(w *world) { w.Objects.Services = w.Objects.Services[:1] },
			Error, "MutatingWebhookConfiguration bwki-webhook-cfg, bwkimua.bitfusion.io", "its Service bwki/bwki-webhook-svc is missing",
			"Restore the object", restoreAll,
		},
		"a certificate has expired": {
			"certificates", func(w *world) {
				w.serveWith(issue(w.t, &w.ca, now.Add(-2*day), now.Add(-day), "divvy-extender.divvy-system.svc",
					"bwki-webhook-svc.bwki.svc"))
			},
			Error, "Secret bwki/bwki-webhook-certs", "has expired at 2026-02-28", "new certificate",
			"kubectl annotate secret bwki-webhook-certs -n bwki divvy.dev/rotate=cert --overwrite",
		},
		"a certificate was not renewed": {
			"certificates", func(w *world) {
				w.serveWith(issue(w.t, &w.ca, now.Add(-80*day), now.Add(10*day), "divvy-extender.divvy-system.svc",
					"bwki-webhook-svc.bwki.svc"))
			},
			Warning, "Secret divvy-system/divvy-extender-certs", "should have been renewed", "new certificate",
			"kubectl annotate secret divvy-extender-certs -n divvy-system divvy.dev/rotate=cert --overwrite",
		},
		"a certificate of tomorrow": {
			"certificates", func(w *world) {
				w.serveWith(issue(w.t, &w.ca, now.Add(day), now.Add(90*day), "divvy-extender.divvy-system.svc",
					"bwki-webhook-svc.bwki.svc"))
			},
			Error, "Secret divvy-system/divvy-extender-certs", "compare the clocks", "new certificate",
			"kubectl annotate secret divvy-extender-certs",
		},
		"a certificate for another name": {
			"certificates", func(w *world) { w.serveWith(issue(w.t, &w.ca, now.Add(-day), now.Add(90*day), "elsewhere.svc")) },
			Error, "Secret divvy-system/divvy-extender-certs", "not for divvy-extender.divvy-system.svc", "new certificate",
			"kubectl annotate secret divvy-extender-certs",
		},
		"a certificate of another CA": {
			"certificates", func(w *world) {
				other := issue(w.t, nil, now.Add(-year), now.Add(9*year))
				w.serveWith(issue(w.t, &other, now.Add(-day), now.Add(90*day), "divvy-extender.divvy-system.svc",
					"bwki-webhook-svc.bwki.svc"))
			},
			Error, "Secret divvy-system/divvy-extender-certs", "not signed by its CA", "new certificate",
			"kubectl annotate secret divvy-extender-certs",
		},
		"a certificate that cannot be read": {
			"certificates", func(w *world) { w.Objects.Secrets[1].Data["tls.crt"] = []byte("x") },
			Error, "Secret divvy-system/divvy-extender-certs", "its certificate is invalid", "new certificate",
			"kubectl annotate secret divvy-extender-certs",
		},
		"no certificate yet": {
			"certificates", func(w *world) { delete(w.Objects.Secrets[1].Data, "tls.crt") },
			Error, "Secret divvy-system/divvy-extender-certs",
			"it contains no certificate yet", "writes the certificate", "",
		},
		"a CA that cannot be read": {
			"certificates", func(w *world) { w.Objects.Secrets[3].Data["ca.crt"] = []byte("x") },
			Error, "Secret bwki/bwki-webhook-certs", "its CA is invalid", "new one",
			"kubectl annotate secret bwki-webhook-certs -n bwki divvy.dev/rotate=ca --overwrite",
		},
		"the published CA is another": {
			"certificates", func(w *world) {
				w.Objects.ConfigMaps[3].Data["ca.crt"] = string(issue(w.t, nil, now.Add(-year), now.Add(year)).crt())
			},
			Error, "ConfigMap divvy-system/divvy-extender-ca", "does not contain the CA", "publishes it",
			"kubectl rollout restart deployment/divvy-extender -n divvy-system",
		},
		"kube-scheduler's certificate has expired": {
			"certificates", func(w *world) {
				c := issue(w.t, &w.ca, now.Add(-2*day), now.Add(-day))
				w.Objects.Secrets[2].Data = map[string][]byte{"tls.crt": c.crt(), "tls.key": c.pem(w.t)}
			},
			Error, "Secret divvy-system/divvy-extender-client", "has expired", "which creates it",
			"kubectl rollout restart deployment/divvy-extender -n divvy-system",
		},
		"kube-scheduler's certificate is of another CA": {
			"certificates", func(w *world) {
				other := issue(w.t, nil, now.Add(-year), now.Add(9*year))
				c := issue(w.t, &other, now.Add(-day), now.Add(year))
				w.Objects.Secrets[2].Data = map[string][]byte{"tls.crt": c.crt(), "tls.key": c.pem(w.t)}
			},
			Error, "Secret divvy-system/divvy-extender-client", "not signed by the extender's CA", "which creates it",
			"kubectl rollout restart deployment/divvy-extender",
		},
		"a policy without a binding": {
			"policies", func(w *world) { w.Admission.Bindings = nil }, Error, "ValidatingAdmissionPolicy divvy-node", "no binding",
			"Restore the object", restoring("divvy-node"),
		},
		"a binding without a policy": {
			"policies", func(w *world) { w.Admission.Policies = nil }, Error, "ValidatingAdmissionPolicyBinding divvy-node",
			"policy divvy-node is missing", "Restore the object", restoring("divvy-node"),
		},
		"a binding that lets pass": {
			"policies", func(w *world) {
				w.Admission.Bindings[0].Spec.ValidationActions = []admissionv1.ValidationAction{admissionv1.Audit}
			},
			Error, "ValidatingAdmissionPolicyBinding divvy-node", "does not deny", "Restore the object", restoring("divvy-node"),
		},
		"a policy with a wrong expression": {
			"policies", func(w *world) {
				w.Admission.Policies[0].Status.TypeChecking = &admissionv1.TypeChecking{ExpressionWarnings: []admissionv1.ExpressionWarning{
					{FieldRef: "spec.validations[0]", Warning: "undefined field"},
				}}
			},
			Warning, "ValidatingAdmissionPolicy divvy-node", "undefined field", "Report this as a bug, with the version of Kubernetes", "",
		},
		"an account may not do its work": {
			"rbac", func(w *world) { w.Objects.Access[0].Allowed = false; w.Objects.Access[2].Allowed = false },
			Error, "ServiceAccount divvy-system/divvy-node", "get leases.coordination.k8s.io x, patch nodes", "Restore the object",
			restoring("divvy-node"),
		},
		"a pod waits, and a change admits it": {
			"waiting", func(w *world) {
				w.Waiting = []Waits{{Namespace: "team", Name: "train", Code: "noDeviceFits", Problem: "no device has 20 units free",
					Change: "uncordon node-b", Commands: []string{"kubectl uncordon node-b"}}}
			},
			Warning, "Pod team/train", "it waits: no device has 20 units free", "What would help: uncordon node-b.",
			"kubectl uncordon node-b",
		},
		"a pod waits, and no change is known": {
			"waiting", func(w *world) {
				w.Waiting = []Waits{{Namespace: "team", Name: "train", Code: "gated", Problem: "the scheduling gate x prevents scheduling"}}
			},
			Warning, "Pod team/train", "it waits: the scheduling gate x", "This command says more", "kubectl divvy why -n team train",
		},
		"limits that are not proven": {
			"limits", func(w *world) {
				n := &w.Nodes[0]
				n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: wire.IsolationCondition,
					Status: corev1.ConditionTrue, Message: "the configured isolation does not hold: GPU-0: driver 595"})
			}, Warning, "Node node-a", "GPU-0: driver 595", "until it ends", "kubectl divvy inspect -o wide",
		},
		"no node states the tier": {
			"isolation", func(w *world) {
				w.Waiting = []Waits{{Namespace: "team", Name: "train", Code: codeIsolation,
					Problem: "isolation driver required, device states none"}}
			}, Warning, "Pod team/train", "isolation driver required, device states none", "divvy.dev/isolation",
			"kubectl divvy inspect -o wide",
		},
		"a pod was refused": {
			"failed", func(w *world) {
				p := w.pod("train")
				p.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "UnexpectedAdmissionError", Message: "no units"}
			},
			Warning, "Pod team/train", "node node-a rejected it (UnexpectedAdmissionError): no units", "docs/troubleshooting.md",
			"kubectl delete pod train -n team",
		},
		"a pod without a grant": {
			"grants", func(w *world) { w.pod("train").Annotations = nil }, Warning, "Pod team/train",
			"but the node has not reported its device", "its signing key", "",
		},
		"a grant that cannot be read": {
			"grants", func(w *world) { w.pod("train").Annotations[wire.GrantAnnotation] = "{" }, Warning, "Pod team/train",
			"cannot be parsed", "replaces it", "",
		},
		"a grant of a lost card": {
			"grants", func(w *world) { *w.pod("train") = w.shared("train", "card-9", 4) }, Warning, "Pod team/train", "device card-9",
			"docs/health.md", "",
		},
		"more than a card has": {
			"grants", func(w *world) { w.Pods = append(w.Pods, w.shared("greedy", "card-0", 13)) },
			Error, "Node node-a, device 0 (card-0)",
			"pods hold 17 of enflame.com/gcu-memory on it, but it has only 16: team/greedy, team/train", "Delete one", "",
		},
		"no token": {
			"pool-token", func(w *world) { w.Token = w.Token[1:] }, Error, "the pool's secrets in namespace kube-system",
			"bitfusion-client-secret-ca.crt missing", "kubectl divvy pool import TOKEN.tar", "",
		},
		"a token that cannot be used": {
			"pool-token", func(w *world) { w.Token[2].Data[pool.ServersKey] = []byte("servers: 7\n") }, Error,
			"the pool's secrets in namespace kube-system", "the token is invalid", "pool import", "",
		},
		"an expired token": {
			"pool-token", func(w *world) { w.Token[0].Data[pool.CAKey] = issue(w.t, nil, now.Add(-2*day), now.Add(-day)).crt() },
			Warning, "the pool's secrets in namespace kube-system", "expired", "pool import", "",
		},
		"no token for old clients": {
			"pool-token", func(w *world) { w.Token = w.Token[:3] }, Warning, "the pool's secrets in namespace kube-system", "clients 2.5",
			"pool import", "",
		},
		"a namespace without copies": {
			"pool-copies", func(w *world) { w.Copies["team"] = nil },
			Error, "Namespace team", "lacks bitfusion-client-secret-ca.crt, which pod bench needs", "The webhooks create the copies",
			"kubectl rollout restart deployment/bitfusion-webhook-deployment -n bwki",
		},
		"a namespace that is not allowed": {
			"pool-copies", func(w *world) { w.Copies["team"], w.Namespaces[0].Labels = nil, nil },
			Error, "Namespace team", "not allowed to use the pool", "Allow it",
			"kubectl label namespace team divvy.dev/pool=allowed --overwrite",
		},
		"a label that allows nothing": {
			"pool-copies", func(w *world) {
				w.Namespaces = append(w.Namespaces,
					corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "more", Labels: map[string]string{poolLabel: "true"}}})
			},
			Warning, "Namespace more", `has the invalid value "true"`, "allows its pods",
			"kubectl label namespace more divvy.dev/pool=allowed --overwrite",
		},
		"an ignored namespace that is allowed": {
			"pool-copies", func(w *world) { w.Namespaces[1].Labels = map[string]string{poolLabel: "allowed"} },
			Warning, "Namespace kube-system", "its pods are ignored", "pool.ignoredNamespaces", "",
		},
		"a catalog with a mistake": {
			"pool-catalog", func(w *world) { w.Objects.ConfigMaps[2].Data["bitfusion-client-config.yaml"] = "clients: {}\n" },
			Error, "ConfigMap bwki/catalog", "catalog", "last valid one", restoring("bitfusion-webhook"),
		},
		"no catalog": {
			"pool-catalog", func(w *world) { w.Objects.ConfigMaps = slices.Delete(w.Objects.ConfigMaps, 2, 3) },
			Error, "ConfigMap bwki/catalog",
			"missing", "Restore the object", restoring("bitfusion-webhook"),
		},
		"an empty catalog of one's own": {
			"pool-catalog", func(w *world) { w.Objects.ConfigMaps[2].Data, w.Releases[0].Manifest = nil, nil },
			Error, "ConfigMap bwki/catalog",
			"no entry", "docs/pool-catalog.md", "",
		},
		"no units of the pool": {
			"pool-units", func(w *world) { delete(w.Nodes[0].Status.Allocatable, pool.Resource) },
			Error, "Node node-a", "kubelet offers no bitfusion.io/gpu", "registers", "kubectl delete pod bitfusion-device-plugin-x -n bwki",
		},
		"a quota that counts nothing": {
			"pool-units", func(w *world) {
				q := corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "q"}}
				q.Spec.Hard = corev1.ResourceList{"requests.bitfusion.io/gpu-amount": resource.MustParse("1")}
				w.Quotas = append(w.Quotas, q)
			},
			Warning, "ResourceQuota team/q", "limits requests.bitfusion.io/gpu-amount", "requests.bitfusion.io/gpu", "",
		},
	}
	covered := map[string]bool{}
	for name, tt := range faults {
		covered[tt.check] = true
		t.Run(name, func(t *testing.T) {
			w := healthy(t)
			tt.plant(w)
			report := Examine(w.Snapshot)
			i := slices.IndexFunc(report.Results, func(r Result) bool { return r.Check == tt.check })
			result := report.Results[i]
			found := slices.IndexFunc(result.Findings, func(f Finding) bool {
				return f.Object == tt.object && strings.Contains(f.Problem, tt.problem)
			})
			if found < 0 {
				t.Fatalf("%s: %s, skipped %q; no finding about %s that says %q:\n%+v", tt.check, result.Severity, result.Skipped, tt.object,
					tt.problem, result.Findings)
			}
			f := result.Findings[found]
			if f.Check != tt.check || f.Severity != tt.severity || !strings.Contains(f.Remedy, tt.remedy) {
				t.Errorf("%+v, want severity %s and a remedy with %q", f, tt.severity, tt.remedy)
			}
			switch {
			case tt.command == "" && len(f.Commands) > 0:
				t.Errorf("commands %q, want none", f.Commands)
			case tt.command != "" && (len(f.Commands) == 0 || !strings.HasPrefix(f.Commands[0], tt.command)):
				t.Errorf("commands %q, want %q", f.Commands, tt.command)
			}
			if worse(result.Severity, f.Severity) != result.Severity {
				t.Errorf("the check is %s with a finding that is %s", result.Severity, f.Severity)
			}
		})
	}
	for _, c := range Checks() {
		if !covered[c.Name] {
			t.Errorf("no fault is planted for check %s", c.Name)
		}
	}
}

// dedicate turns the installation into one with a scheduler of its own.
func (w *world) dedicate() {
	w.unwire()
	program(w.Release(), w.Deployments, nameExtender).Labels[labelName] = nameScheduler
	w.pod("kube-scheduler-" + theNode).Annotations = nil
}

// dedicateOf does so on a cluster of a version, with a scheduler of that image.
func (w *world) dedicateOf(kubernetes, image string) {
	w.dedicate()
	w.Kubernetes, w.Admission.Mutating[0].Name = kubernetes, nameScheduler
	d := program(w.Release(), w.Deployments, nameScheduler)
	d.Name, d.Spec.Template.Spec.Containers[0].Image = nameScheduler, image
}

// unwire takes divvy-schedconf away.
func (w *world) unwire() {
	w.DaemonSets = slices.DeleteFunc(w.DaemonSets, func(d appsv1.DaemonSet) bool { return d.Name == nameSchedconf })
	w.pod("kube-scheduler-" + theNode).Annotations = nil
}

// serveWith puts another certificate into the Secrets.
func (w *world) serveWith(p pair) {
	for i := range w.Objects.Secrets {
		if _, ok := w.Objects.Secrets[i].Data["ca.key"]; ok {
			w.Objects.Secrets[i].Data["tls.crt"], w.Objects.Secrets[i].Data["tls.key"] = p.crt(), p.pem(w.t)
		}
	}
}

// What is well although it looks odd is not told.
func TestNothingToSay(t *testing.T) {
	tests := map[string]func(w *world){
		"a node that is excluded on purpose": func(w *world) {
			w.Nodes = append(w.Nodes,
				corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "out", Labels: map[string]string{enabledLabel: "false",
					"enflame.com/gcushare": "true"}}})
		},
		"a node that was excluded a while ago": func(w *world) {
			out := w.Nodes[0].DeepCopy()
			out.Name, out.Labels[enabledLabel], out.Status.Capacity = "out", "false", nil
			delete(out.Labels, "node-role.kubernetes.io/control-plane")
			w.Nodes = append(w.Nodes, *out)
		},
		"a device that is given out as another resource": func(w *world) {
			given := shares()
			given[0].Health = accel.Health{Unhealthy: true, Reason: accel.ReasonGivenOut + "enflame.com/gcu"}
			w.publish(accel.Inventory{Resource: memory, Unit: "1", Shares: given})
			w.Nodes[0].Status.Allocatable[memory] = resource.MustParse("16")
		},
		"two replicas": func(w *world) {
			d := program(w.Release(), w.Deployments, nameExtender)
			d.Spec.Replicas, d.Status.ReadyReplicas = ptr.To[int32](2), 2
			d.Spec.Template.Spec.Containers[0].Args = append(d.Spec.Template.Spec.Containers[0].Args, "--leader-elect")
			w.Pods = append(w.Pods, running(system, "divvy-extender-y", d.Spec.Template))
		},
		"the vendor's plugin on another node": func(w *world) {
			p := running(kubeSystem, "gcushare-device-plugin-1", program(w.Release(), w.DaemonSets, nameNode).Spec.Template)
			p.Labels, p.Spec.NodeName = nil, "elsewhere"
			w.Pods = append(w.Pods, p)
		},
		"another vendor's plugin on the same node": func(w *world) {
			p := running(kubeSystem, "nvidia-device-plugin-daemonset-1", program(w.Release(), w.DaemonSets, nameNode).Spec.Template)
			p.Labels = nil
			w.Pods = append(w.Pods, p)
		},
		"a plugin for other hardware": func(w *world) {
			p := running(kubeSystem, "rdma-shared-dp-1", program(w.Release(), w.DaemonSets, nameNode).Spec.Template)
			p.Labels = nil
			w.Pods = append(w.Pods, p)
		},
		"a pod that was just made": func(w *world) {
			p := w.pod("train")
			p.CreationTimestamp = metav1.NewTime(now.Add(-time.Second))
			p.Annotations = nil
		},
		"a kube-scheduler that was wired a moment ago": func(w *world) {
			w.startedFor("kube-scheduler-"+theNode, 29*time.Second)
		},
		"a pod that has ended":               func(w *world) { w.pod("train").Status.Phase = corev1.PodSucceeded },
		"a scheduler that was wired by hand": func(w *world) { w.unwire() },
		"a CA that is being changed": func(w *world) {
			next := issue(w.t, nil, now, now.Add(9*year))
			both := append(w.ca.crt(), next.crt()...)
			w.Admission.Mutating[0].Webhooks[0].ClientConfig.CABundle = both
			w.Admission.Validating[0].Webhooks[0].ClientConfig.CABundle = both
			w.Objects.Secrets[1].Data["next-ca.crt"] = next.crt()
		},
		"a webhook of somebody else": func(w *world) {
			other := w.Admission.Mutating[0].DeepCopy()
			other.Labels, other.Webhooks[0].ClientConfig.CABundle = nil, nil
			w.Admission.Mutating = append(w.Admission.Mutating, *other)
		},
	}
	for name, edit := range tests {
		t.Run(name, func(t *testing.T) {
			w := healthy(t)
			edit(w)
			for _, f := range Examine(w.Snapshot).Findings() {
				t.Errorf("%+v", f)
			}
		})
	}
}

// What could not be read makes the checks that need it unknown, and no others.
func TestUnreadableSourcesMakeChecksUnknown(t *testing.T) {
	sources := map[Source]bool{}
	for _, c := range Checks() {
		if len(c.Needs) == 0 {
			t.Errorf("check %s needs nothing", c.Name)
		}
		for _, source := range c.Needs {
			sources[source] = true
		}
	}
	for source := range sources {
		w := healthy(t)
		w.Failed[source] = "needs list of everything"
		for i, r := range Examine(w.Snapshot).Results {
			if needs := slices.Contains(checks[i].Needs, source); needs != (r.Severity == Unknown) || r.Severity != OK &&
				r.Severity != Unknown {
				t.Errorf("without %s, check %s is %s: %v", source, r.Check, r.Severity, r.Findings)
			}
			for _, f := range r.Findings {
				if f.Object != string(source) || !strings.Contains(f.Problem, "needs list of everything") {
					t.Errorf("without %s, check %s says %+v", source, r.Check, f)
				}
			}
		}
	}
}

// Snapshots of odd clusters make findings, and no panic.
func TestHostileSnapshots(t *testing.T) {
	tests := map[string]func(w *world){
		"nothing at all": func(w *world) { *w.Snapshot = Snapshot{} },
		"empty objects": func(w *world) {
			for i := range w.Pods {
				w.Pods[i] = corev1.Pod{ObjectMeta: w.Pods[i].ObjectMeta}
			}
			for i := range w.DaemonSets {
				w.DaemonSets[i] = appsv1.DaemonSet{ObjectMeta: w.DaemonSets[i].ObjectMeta}
			}
			for i := range w.Deployments {
				w.Deployments[i] = appsv1.Deployment{ObjectMeta: w.Deployments[i].ObjectMeta}
			}
			w.Nodes = append(w.Nodes, corev1.Node{})
			w.Objects.Secrets, w.Objects.Services = make([]corev1.Secret, 3), make([]corev1.Service, 2)
			w.Objects.ConfigMaps, w.Objects.Endpoints = make([]corev1.ConfigMap, 2), nil
		},
		"selectors that cannot be read": func(w *world) {
			for i := range w.DaemonSets {
				w.DaemonSets[i].Spec.Selector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "\x00",
					Operator: "Perhaps"}}}
			}
			w.Admission.Mutating[0].Webhooks[0].ClientConfig.Service = nil
		},
		"texts that would take a terminal over": func(w *world) {
			w.pod("train").Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "UnexpectedAdmissionError",
				Message: "\x1b[2J\r\n\u009b2J\u202eerror: \xff" + strings.Repeat("x", 1<<20)}
			w.Nodes[0].Annotations[wire.InventoryAnnotation] = strings.Repeat("{", 1<<20)
			w.pod("train").Annotations[wire.GrantAnnotation] = strings.Repeat("[", 1<<20)
			w.Releases[0].Name = "\x1b]0;title\a"
		},
		"numbers out of all bounds": func(w *world) {
			w.Nodes[0].Status.Allocatable[memory] = resource.MustParse("-5")
			w.Nodes[0].Status.Allocatable[pool.Resource] = resource.MustParse("1e30")
			w.Nodes[0].Status.NodeInfo.KubeletVersion = "vNaN"
			w.Kubernetes = "\x00"
			w.pod("train").Spec.Containers[0].Resources.Limits[memory] = resource.MustParse("9e30")
		},
		"manifests of garbage": func(w *world) {
			w.Releases[0].Manifest = []Object{{}, {Kind: "Deployment", Name: "divvy-extender", Namespace: system,
				Content: map[string]any{"spec": "x"}},
				{Kind: "ClusterRole", Content: map[string]any{"rules": 7}},
				{Kind: "RoleBinding", Content: map[string]any{"subjects": []any{map[string]any{"kind": "ServiceAccount"}}}}}
			program(w.Release(), w.Deployments, nameExtender).Spec.Replicas = ptr.To[int32](0)
			w.Objects.Access = wantedAccess(w.Releases[0].Manifest)
			w.Objects.Live = []Live{{}}
		},
	}
	for name, edit := range tests {
		t.Run(name, func(t *testing.T) {
			w := healthy(t)
			edit(w)
			report := Examine(w.Snapshot)
			if report.Count(OK) > 0 {
				t.Error("there are findings that nothing is wrong")
			}
			for _, f := range report.Findings() {
				for _, text := range []string{f.Object, f.Problem, f.Remedy} {
					if strings.ContainsFunc(text, func(r rune) bool { return r < ' ' || r == 0x7f }) || len(text) > maxText+10 {
						t.Errorf("%s: a text that is not fit for a line: %.100q (%d bytes)", f.Check, text, len(text))
					}
				}
			}
			for _, format := range []Format{Text, JSON, YAML} {
				var b strings.Builder
				if err := Print(&b, report, format, true); err != nil || b.Len() == 0 {
					t.Errorf("%s: %v", format, err)
				}
				unfit := func(r rune) bool { return r != '\n' && unicode.In(r, unicode.Cc, unicode.Cf) }
				if at := strings.IndexFunc(b.String(), unfit); format == Text && at >= 0 {
					t.Errorf("the text has what a terminal would obey: %.100q", b.String()[at:])
				}
				if format == JSON && !json.Valid([]byte(b.String())) {
					t.Error("no JSON")
				}
			}
		})
	}
}

// setup publishes what the daemon found of the node's container runtime.
func (w *world) setup(s wire.NodeSetup) {
	text, err := wire.EncodeSetup(&s)
	if err != nil {
		panic(err)
	}
	w.Nodes[0].Annotations[wire.SetupAnnotation] = text
}

// A node on which the plugin that wrote a specification runs, and ways that need no other.
func TestSetupsWithoutFindings(t *testing.T) {
	for name, change := range map[string]func(*world){
		"the plugin runs": func(w *world) {
			w.setup(wire.NodeSetup{Injection: []string{"cdi"}, Detected: "cdi",
				Findings: []wire.SetupFinding{{Kind: "cdi-stale", What: "x"}}})
			w.Pods = append(w.Pods, running(kubeSystem, "nvidia-device-plugin-daemonset-1",
				corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "x"}}}}))
		},
		"annotations in addition": func(w *world) {
			w.setup(wire.NodeSetup{Injection: []string{"cdiAnnotations"}, Pinned: true, Detected: "cdi"})
		},
		"the variable is always set": func(w *world) {
			w.setup(wire.NodeSetup{Injection: []string{"deviceNodes"}, Pinned: true, Detected: "environment"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := healthy(t)
			change(w)
			for _, r := range Examine(w.Snapshot).Results {
				if r.Check == "node-setup" && len(r.Findings) > 0 {
					t.Errorf("findings: %+v", r.Findings)
				}
			}
		})
	}
}

// isolated is a resource of a configuration with an isolation.
func isolated(tier string) string {
	return "- {name: nvidia.com/gpu-memory, vendor: nvidia, mode: memory, isolation: " + tier + "}\n"
}

// Events of pods that run or that are others now, and claims of other drivers, are no findings.
func TestClaimsWithoutFindings(t *testing.T) {
	for name, change := range map[string]func(*world){
		"the pod runs meanwhile": func(w *world) {
			p := w.claiming("gcu.enflame.divvy.dev")
			p.Status.Phase = corev1.PodRunning
			w.event(p, "ClaimNotPrepared", "x")
		},
		"another pod of the name": func(w *world) {
			p := w.claiming("gcu.enflame.divvy.dev")
			w.event(p, "ClaimNotPrepared", "x")
			p.UID = "another"
		},
		"a class of another driver": func(w *world) { w.claiming("gpu.nvidia.com") },
		"a node for units alone": func(w *world) {
			delete(w.Nodes[0].Labels, wire.PathLabel)
			w.Claims = Claims{}
		},
		"a name for claims alone": func(w *world) { w.Claims.Classes[0].Spec.ExtendedResourceName = ptr.To("enflame.com/claimed") },
	} {
		t.Run(name, func(t *testing.T) {
			w := healthy(t)
			change(w)
			for _, r := range Examine(w.Snapshot).Results {
				if strings.HasPrefix(r.Check, "claim") && len(r.Findings) > 0 {
					t.Errorf("findings: %+v", r.Findings)
				}
			}
		})
	}
}
