package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// workload is what all kinds of workloads have in common.
type workload struct {
	kind, name string
	template   corev1.PodTemplateSpec
	// endless workloads have probes; Jobs end.
	endless, rolls, revisions bool
	replicas                  int32
	object                    runtime.Object
}

func (w workload) String() string { return w.kind + " " + w.name }

func workloads(all []runtime.Object) []workload {
	var out []workload
	for _, o := range all {
		switch o := o.(type) {
		case *appsv1.DaemonSet:
			out = append(out, workload{"DaemonSet", o.Name, o.Spec.Template, true, o.Spec.UpdateStrategy.Type != "",
				o.Spec.RevisionHistoryLimit != nil, 1, o})
		case *appsv1.Deployment:
			out = append(out, workload{"Deployment", o.Name, o.Spec.Template, true,
				o.Spec.Strategy.Type != "", o.Spec.RevisionHistoryLimit != nil, *o.Spec.Replicas, o})
		case *appsv1.StatefulSet:
			out = append(out, workload{"StatefulSet", o.Name, o.Spec.Template, true, o.Spec.UpdateStrategy.Type != "",
				o.Spec.RevisionHistoryLimit != nil, *o.Spec.Replicas, o})
		case *batchv1.Job:
			out = append(out, workload{"Job", o.Name, o.Spec.Template, false, true, true, 1, o})
		case *batchv1.CronJob:
			out = append(out, workload{"CronJob", o.Name, o.Spec.JobTemplate.Spec.Template, false, true, true, 1, o})
		case *corev1.Pod:
			out = append(out, workload{"Pod", o.Name, corev1.PodTemplateSpec{ObjectMeta: o.ObjectMeta, Spec: o.Spec}, false, true, true, 1,
				o})
		}
	}
	return out
}

// cooperative are values with which the chart has divvy-mps.
var cooperative = []string{"--set",
	"sharedResources[0].name=nvidia.com/gpu-memory,sharedResources[0].vendor=nvidia,sharedResources[0].isolation=cooperative"}

// claims are values with which nodes serve ResourceClaims.
var claims = []string{"--set", "node.allocationPath=dra"}

// everyPart are values with which each part of the chart is there in some of them.
var everyPart = map[string][]string{
	"defaults":                          nil,
	"pool":                              {"--set", "pool.enabled=true"},
	"pool only":                         {"--set", "pool.enabled=true", "--set-json", "sharedResources=[]"},
	"dedicated":                         {"--set", "scheduler.mode=dedicated"},
	"dedicated with the extender":       {"--set", "scheduler.mode=dedicated,scheduler.form=extender"},
	"by hand":                           {"--set", "scheduler.mode=none"},
	"operator":                          {"--set", "node.gpuOperator.enabled=true,node.ixConfigMap=ix-config"},
	"replicas":                          {"--set", "extender.replicas=2,pool.enabled=true,extender.hostNetwork=false"},
	"usage":                             {"--set", "node.usage.enabled=true"},
	"cooperative":                       cooperative,
	"claims":                            claims,
	"reviews of claims":                 {"--set", reviewed},
	"eviction":                          {"--set", evicting},
	"eviction by a dedicated scheduler": {"--set", evicting + ",scheduler.mode=dedicated"},
	"no logs":                           {"--set", "node.logDir=,extender.logDir="},
	"no trace":                          {"--set", "uninstall.removeLogs=true,pool.enabled=true"},
	"policies":                          {"--set", "networkPolicy.enabled=true,pool.enabled=true"},
}

// privileges are what a pod may have beyond the least, and why.
var privileges = map[string]map[string]string{
	"divvy-node": {
		"privileged": "the vendor's library opens the devices, which the device cgroup of other containers forbids",
		"root":       "kubelet's sockets and folders belong to root",
		"hostPID":    "a vendor's library names processes by their ids in the caller's PID namespace; with node.usage.enabled alone",
	},
	"divvy-mps": {
		"privileged": "the driver's programs open the devices, which the device cgroup of other containers forbids",
		"root":       "the compute mode of a device is set by root",
		"hostPID":    "MPS knows its clients by their process ids",
		"noProbes":   "a restart would end all programs that use the devices; divvy-node examines what it does",
	},
	"divvy-extender": {
		"root":        "its log folder on the host belongs to root; without any capability",
		"hostNetwork": "kube-scheduler of a kubeadm control plane reaches it at 127.0.0.1 without cluster networking",
	},
	"divvy-schedconf": {"root": "files in /etc/kubernetes belong to root",
		"hostNetwork": "it asks kube-scheduler, which answers at 127.0.0.1"},
	"divvy-uninstall-scheduler": {"root": "files in /etc/kubernetes belong to root",
		"hostNetwork": "it asks kube-scheduler, which answers at 127.0.0.1"},
	"divvy-uninstall-node":    {"root": "what the daemon left on the host belongs to root"},
	"divvy-uninstall-logs":    {"root": "the log files on the host belong to root"},
	"bitfusion-device-plugin": {"root": "kubelet's sockets belong to root"},
}

// check returns what of a workload is missing or too much.
func (w workload) check(bound map[string]bool) []string {
	var out []string
	want := func(ok bool, format string, args ...any) {
		if !ok {
			out = append(out, fmt.Sprintf(format, args...))
		}
	}
	may, spec := privileges[w.name], w.template.Spec
	_, hostNetwork := may["hostNetwork"]
	want(!spec.HostNetwork || hostNetwork, "it uses the node's network")
	_, hostPID := may["hostPID"]
	want((!spec.HostPID || hostPID) && !spec.HostIPC, "it shares processes or memory with the host")
	want(w.revisions, "revisionHistoryLimit is not set")
	want(w.rolls, "no strategy says how it is updated")
	want(spec.PriorityClassName != "", "no priorityClassName")
	want(spec.Tolerations != nil, "no tolerations: tainted control planes and accelerator nodes have no place for it")
	want(spec.EnableServiceLinks != nil && !*spec.EnableServiceLinks, "enableServiceLinks is not false")
	want(spec.TerminationGracePeriodSeconds != nil, "no terminationGracePeriodSeconds")
	want(spec.ServiceAccountName != "" && spec.ServiceAccountName != "default", "it has no account of its own")
	want(len(spec.ImagePullSecrets) == 1, "image.pullSecrets is not heeded")
	want(w.template.Annotations["kubectl.kubernetes.io/default-container"] != "", "no default container for kubectl logs")
	want(spec.AutomountServiceAccountToken != nil, "automountServiceAccountToken is not said")
	if spec.AutomountServiceAccountToken != nil {
		want(*spec.AutomountServiceAccountToken == bound[spec.ServiceAccountName],
			"automountServiceAccountToken is %t, and its account has rights: %t",
			*spec.AutomountServiceAccountToken, bound[spec.ServiceAccountName])
	}
	_, privileged := may["privileged"]
	_, root := may["root"]
	pod := spec.SecurityContext
	if pod == nil {
		pod = &corev1.PodSecurityContext{}
	}
	want(privileged || pod.SeccompProfile != nil && pod.SeccompProfile.Type == corev1.SeccompProfileTypeRuntimeDefault,
		"no seccomp profile RuntimeDefault for the pod")
	if w.replicas > 1 {
		apart := len(spec.TopologySpreadConstraints) > 0 || spec.Affinity != nil && spec.Affinity.PodAntiAffinity != nil
		want(apart, "nothing keeps its replicas on different nodes")
	}
	if job, ok := w.object.(*batchv1.Job); ok {
		want(job.Spec.BackoffLimit != nil && job.Spec.ActiveDeadlineSeconds != nil, "a Job without backoffLimit and activeDeadlineSeconds")
	}
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		want := func(ok bool, format string, args ...any) { want(ok, "container "+c.Name+": "+format, args...) }
		// kube-scheduler is not Divvy's.
		want(strings.HasPrefix(c.Image, "example.com/x/") || c.Name == "kube-scheduler", "image %s is not from image.registry", c.Image)
		want(c.ImagePullPolicy == corev1.PullAlways, "image.pullPolicy is not heeded")
		want(!c.Resources.Requests.Cpu().IsZero() && !c.Resources.Requests.Memory().IsZero(), "no requests of CPU and memory")
		want(!c.Resources.Limits.Memory().IsZero(), "no limit of memory")
		want(c.TerminationMessagePolicy == corev1.TerminationMessageFallbackToLogsOnError,
			"terminationMessagePolicy is not FallbackToLogsOnError")
		s := c.SecurityContext
		if s == nil {
			want(false, "no securityContext")
			continue
		}
		want(s.ReadOnlyRootFilesystem != nil && *s.ReadOnlyRootFilesystem, "its root file system can be written")
		if s.Privileged != nil && *s.Privileged {
			want(privileged, "it is privileged")
		} else {
			want(s.AllowPrivilegeEscalation != nil && !*s.AllowPrivilegeEscalation, "allowPrivilegeEscalation is not false")
			want(s.Capabilities != nil && slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) &&
				len(s.Capabilities.Add) == 0, "it has capabilities")
		}
		if user := first(s.RunAsUser, pod.RunAsUser); root && user != nil && *user == 0 {
			want(true, "")
		} else {
			nonRoot := first(s.RunAsNonRoot, pod.RunAsNonRoot)
			want(nonRoot != nil && *nonRoot && user != nil && *user != 0, "it may run as root")
		}
		for _, p := range c.Ports {
			want(p.Name != "" && (p.HostPort == 0 || spec.HostNetwork), "port %d has no name, or is opened on the host", p.ContainerPort)
		}
		if w.endless && slices.ContainsFunc(spec.Containers, func(o corev1.Container) bool { return o.Name == c.Name }) {
			_, unprobed := may["noProbes"]
			want(unprobed || c.StartupProbe != nil && c.LivenessProbe != nil && c.ReadinessProbe != nil,
				"it has not all of the three probes")
		}
	}
	return out
}

// first returns the first that is there.
func first[T any](values ...*T) *T {
	for _, v := range values {
		if v != nil {
			return v
		}
	}
	return nil
}

// TestWorkloadsAreComplete: every pod of the chart, hooks among them, has what an
// administrator expects of one, and no more rights on its node than it needs.
func TestWorkloadsAreComplete(t *testing.T) {
	seen := map[string]bool{}
	problems := map[string]bool{}
	for name, set := range everyPart {
		all := objects(t, rendered(t,
			append(slices.Clone(set), "--set", "image.registry=example.com/x,image.pullPolicy=Always,image.pullSecrets[0].name=login")...))
		accounts, bound := map[string]*corev1.ServiceAccount{}, map[string]bool{}
		for _, o := range all {
			switch o := o.(type) {
			case *corev1.ServiceAccount:
				accounts[o.Name] = o
			case *rbacv1.ClusterRoleBinding:
				bound[o.Subjects[0].Name] = true
			case *rbacv1.RoleBinding:
				bound[o.Subjects[0].Name] = true
			}
		}
		for _, w := range workloads(all) {
			seen[w.name] = true
			found := w.check(bound)
			if a := accounts[w.template.Spec.ServiceAccountName]; a == nil {
				found = append(found, "its account is not made: "+w.template.Spec.ServiceAccountName)
			} else if a.AutomountServiceAccountToken == nil || *a.AutomountServiceAccountToken {
				found = append(found, "its account hands its token to every pod that names it: automountServiceAccountToken is not false")
			}
			for _, text := range found {
				if text = fmt.Sprintf("%s: %s", w, text); problems[text] {
					continue
				}
				problems[text] = true
				t.Errorf("%s (with %s)", text, name)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(privileges)) {
		if !seen[name] {
			t.Errorf("%s has privileges and is not there", name)
		}
	}
}

// TestHostPIDIsForMeasuredUse: the host's processes are seen only where use is measured.
func TestHostPIDIsForMeasuredUse(t *testing.T) {
	for name, tt := range map[string]struct {
		set  []string
		want bool
	}{
		"the defaults":          {nil, false},
		"off, with an interval": {[]string{"--set", "node.usage.interval=1m"}, false},
		"on":                    {[]string{"--set", "node.usage.enabled=true"}, true},
		"on for some nodes":     {[]string{"--set", "node.configs.a.usage.enabled=true"}, true},
		"off for some nodes":    {[]string{"--set", "node.configs.a.usage.enabled=false"}, false},
		"on in a file of a node": {[]string{"--set-json",
			`node.configs={"a":"apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\nusage: {enabled: true}\n"}`},
			true},
	} {
		for _, w := range workloads(objects(t, rendered(t, tt.set...))) {
			mounted := slices.ContainsFunc(w.template.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "run" })
			if want := tt.want && w.name == "divvy-node"; w.template.Spec.HostPID != want || mounted != want {
				t.Errorf("%s: %s has hostPID %t, a folder for the report %t; want %t", name, w, w.template.Spec.HostPID, mounted, want)
			}
		}
	}
}
