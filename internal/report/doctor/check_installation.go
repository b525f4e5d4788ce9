package doctor

import (
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/pool"
)

func checkRelease(s *Snapshot, f *findings) {
	r := s.Release()
	if r == nil {
		f.add(Error, "cluster", "Divvy is not installed: no DaemonSet or Deployment has the label "+labelPartOf+"="+partOf,
			"Install the chart from a checkout: helm install divvy charts/divvy --namespace divvy-system --create-namespace -f "+
				"dist/images/values.yaml. See docs/install.md for the images.")
		return
	}
	for _, other := range s.Releases[1:] {
		remedy := "Keep only one release, because they allocate the same devices independently. This command removes the second one; to " +
			"remove the other one, run helm uninstall for it."
		var commands []string
		if other.Helm {
			commands = []string{"helm uninstall " + other.Name + " -n " + other.Namespace}
		}
		f.add(Error, fmt.Sprintf("release %s in namespace %s", other.Name, other.Namespace),
			fmt.Sprintf("it is installed in addition to release %s in namespace %s", r.Name, r.Namespace), remedy, commands...)
	}
	object := fmt.Sprintf("release %s in namespace %s", r.Name, r.Namespace)
	switch {
	case strings.HasPrefix(r.Status, "pending"):
		f.add(Warning, object, fmt.Sprintf("helm's revision %d is %s: a helm command is running or was interrupted", r.Revision, r.Status),
			"If no helm command is running, roll back to the last successful revision.",
			fmt.Sprintf("helm rollback %s -n %s", r.Name, r.Namespace))
	case r.Status == "failed":
		f.add(Warning, object, fmt.Sprintf("helm's revision %d failed", r.Revision),
			fmt.Sprintf("Find the reason with helm status %s -n %s, and upgrade again. This command rolls back to the previous revision.",
				r.Name, r.Namespace),
			fmt.Sprintf("helm rollback %s -n %s", r.Name, r.Namespace))
	case r.Status == "uninstalling":
		f.add(Warning, object, "it is being uninstalled, or the command was interrupted",
			"Run the command again; it continues where it stopped.",
			fmt.Sprintf("helm uninstall %s -n %s", r.Name, r.Namespace))
	}
}

func checkObjects(s *Snapshot, f *findings) {
	for _, l := range s.Objects.Live {
		remedy, commands := s.restore(l.Object.label(labelName))
		switch {
		case l.Error != "":
			f.add(Unknown, l.Object.String(), l.Error, "Request the permission to read it, or let an administrator run this check.")
		case !l.Found:
			f.add(Error, l.Object.String(), "it is missing: the release installed it, but it was deleted since", remedy, commands...)
		case l.Differs != "":
			f.add(Error, l.Object.String(), "it was changed after the installation, at "+l.Differs, remedy, commands...)
		}
	}
}

// original is a program that Divvy takes the place of, or one of a kind with it.
type original struct {
	// vendor is the one whose devices it serves, nil for all.
	vendor *accel.Vendor
	// plugin is true for a device plugin, false for a scheduler or its helper.
	plugin bool
}

// originalOf returns the program that an object's name is one of.
func originalOf(name string) *original {
	begins := func(prefix string) bool { return strings.HasPrefix(name, prefix) }
	if begins("bitfusion-cli-device-plugin") {
		return &original{plugin: true}
	}
	for i := range accel.Vendors {
		v := &accel.Vendors[i]
		if plugin := slices.ContainsFunc(v.Plugins, begins); plugin || slices.ContainsFunc(v.Schedulers, begins) {
			return &original{vendor: v, plugin: plugin}
		}
	}
	return nil
}

// remove returns the command that takes a workload away.
func remove(kind string, m *metav1.ObjectMeta) string {
	if release := m.Annotations[annotationRelease]; release != "" {
		return "helm uninstall " + pool.Quote(release) + " -n " + pool.Quote(m.Annotations[annotationNamespace])
	}
	return "kubectl delete " + kind + " " + m.Name + " -n " + m.Namespace
}

func checkLeftovers(s *Snapshot, f *findings) {
	instances := map[string]bool{}
	for _, r := range s.Releases {
		instances[r.Name] = true
	}
	for _, o := range s.Labelled {
		if instances[o.Instance] {
			continue
		}
		severity, problem := Warning, fmt.Sprintf("it belongs to release %q, which is not installed", o.Instance)
		if strings.Contains(o.Kind, "webhook") || strings.HasPrefix(o.Kind, "validatingadmission") {
			severity, problem = Error, problem+"; the API server still enforces it"
		}
		f.add(severity, o.Kind+" "+o.Name, problem, "Delete it.", "kubectl delete "+o.Kind+" "+o.Name)
	}
	if program(s.Release(), s.DaemonSets, nameNode) == nil {
		for i := range s.Nodes {
			n := &s.Nodes[i]
			if !slices.ContainsFunc(published, func(key string) bool { _, ok := n.Annotations[key]; return ok }) {
				continue
			}
			f.add(Warning, "Node "+n.Name, "it has annotations of divvy-node, which is not installed", "Remove the annotations.",
				forget(n.Name))
		}
	}
	if !s.hasExtender() {
		for i := range s.Pods {
			if p := &s.Pods[i]; isScheduler(p) && !ended(p) && p.Annotations[annotationWired] != "" {
				f.add(Warning, podObject(p), "this kube-scheduler calls an extender that is not installed, so pods that request memory "+
					"stay Pending",
					"Run on its node: divvy-control schedconf uninstall")
			}
		}
	}
	// Old schedulers and their helpers. Device plugins are the matter of another
	// check, as they may serve other nodes rightly.
	for _, w := range s.workloads() {
		if o := originalOf(w.Name); o != nil && !o.plugin && w.Labels[labelPartOf] != partOf {
			f.add(Warning, w.String(), "a program that Divvy replaces still runs, and both allocate the same devices independently",
				"Follow docs/migrating.md; this command removes it.", remove(strings.ToLower(w.kind), w.ObjectMeta))
		}
	}
}

// published are the annotations of a node that divvy-node writes.
var published = []string{wire.InventoryAnnotation, "divvy.dev/labels", "divvy.dev/counts"}

// forget takes off a node what divvy-node published there.
func forget(node string) string {
	return "kubectl annotate node " + node + " " + strings.Join(published, "- ") + "-"
}
