package doctor

import (
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/wire"
)

// nriVariable switches on the NRI plugin of NVIDIA's container toolkit.
const nriVariable = "ENABLE_NRI_PLUGIN"

// checkSetup reports what the daemons found of their nodes' container runtimes, and ways for a
// container to get a GPU that no device plugin allocated.
func checkSetup(s *Snapshot, f *findings) {
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if s.daemonOn(n.Name) == nil {
			continue
		}
		object := "Node " + n.Name
		setup, err := wire.DecodeSetup(n.Annotations[wire.SetupAnnotation])
		switch {
		case err != nil:
			f.add(Warning, object, "its annotation "+wire.SetupAnnotation+" cannot be parsed: "+err.Error(),
				"Remove it; divvy-node writes it again.", "kubectl annotate node "+n.Name+" "+wire.SetupAnnotation+"-")
		case setup != nil:
			checkInjection(setup, object, f)
			for _, found := range setup.Findings {
				checkFound(s, n, found, f)
			}
		}
	}
	for i := range s.DaemonSets {
		d := &s.DaemonSets[i]
		beside := func(n corev1.Node) bool { return s.daemonOn(n.Name) != nil && chosen(d, &n) }
		if runsNRIPlugin(d) && slices.ContainsFunc(s.Nodes, beside) {
			f.add(Warning, "DaemonSet "+d.Namespace+"/"+d.Name, "its NRI plugin gives any container the CDI devices that the annotation "+
				"nvidia.cdi.k8s.io/container.NAME of its pod names, whether or not a device plugin allocated them",
				"Restrict that annotation with an admission policy, or set cdi.nriPluginEnabled=false of the GPU operator.")
		}
	}
}

// checkInjection compares a way that the configuration names with the one that the node calls for.
// The environment variable is set in every way but volumeMounts.
func checkInjection(setup *wire.NodeSetup, object string, f *findings) {
	has := func(way v1alpha1.Injection) bool { return slices.Contains(setup.Injection, string(way)) }
	var fits bool
	switch way := v1alpha1.Injection(setup.Detected); way {
	case v1alpha1.InjectCDI:
		fits = has(v1alpha1.InjectCDI) || has(v1alpha1.InjectCDIAnnotations)
	case v1alpha1.InjectVolumeMounts:
		fits = has(way)
	default:
		fits = true
	}
	if setup.Pinned && !fits {
		f.add(Warning, object, fmt.Sprintf("containers get NVIDIA's GPUs by %s, as configured, but the node calls for %s: %s",
			strings.Join(setup.Injection, ", "), setup.Detected, setup.Why),
			"Set node.vendors.nvidia.injection to [auto], or to the way that the node calls for.")
	}
}

// checkFound reports one finding of a daemon.
func checkFound(s *Snapshot, n *corev1.Node, found wire.SetupFinding, f *findings) {
	object := "Node " + n.Name
	switch found.Kind {
	case wire.ConflictingCDI:
		f.add(Error, object, found.What, "Remove the file that no program maintains; the runtime reads the folder again by itself.")
	case wire.StaleCDI:
		if !s.runsPluginOf(n, "nvidia") {
			f.add(Warning, object, found.What, "Remove the file once no container runs that NVIDIA's device plugin served.")
		}
	case wire.OpenEnvironment:
		f.add(Warning, object, found.What, "Set accept-nvidia-visible-devices-envvar-when-unprivileged = false in the toolkit's "+
			"configuration, with accept-nvidia-visible-devices-as-volume-mounts = true, or use CDI.")
	default: // of a newer release
		f.add(Warning, object, found.What, "See docs/doctor.md.")
	}
}

// runsPluginOf reports whether a device plugin of the vendor, other than Divvy's, runs on a node.
func (s *Snapshot) runsPluginOf(n *corev1.Node, vendor string) bool {
	return slices.ContainsFunc(s.Pods, func(p corev1.Pod) bool {
		o := originalOf(p.Name)
		return p.Spec.NodeName == n.Name && !ended(&p) && p.Labels[labelPartOf] != partOf && o != nil && o.plugin && o.vendor != nil &&
			o.vendor.Name == vendor
	})
}

func runsNRIPlugin(d *appsv1.DaemonSet) bool {
	return slices.ContainsFunc(d.Spec.Template.Spec.Containers, func(c corev1.Container) bool {
		return slices.ContainsFunc(c.Env, func(v corev1.EnvVar) bool { return v.Name == nriVariable && v.Value == "true" })
	})
}
