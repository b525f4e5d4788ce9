package claimreview

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/client-go/kubernetes"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// page is how many nodes or ResourceSlices are read at a time: some have tens of kilobytes.
const page = 200

// Offers are the nodes whose device plugins offer the extended resource of a class, in the order of
// their names.
type Offers struct {
	// Beside are those with allocationPath both that publish devices of the class's drivers to claims.
	Beside []string
	// Elsewhere are all others.
	Elsewhere []string
}

// driversOf returns the drivers of Divvy's whose devices a class selects, by its name or its selectors.
func driversOf(class *resourceapi.DeviceClass) (out []string) {
	for _, vendor := range accel.VendorNames() {
		if driver := wire.Driver(vendor); kube.SelectsDriver(class, driver) {
			out = append(out, driver)
		}
	}
	return out
}

// CheckClass returns why a class must not have its extended resource, and else what its author should
// know. For such a resource, kube-scheduler makes claims on the nodes whose device plugin offers none of
// it. So a cluster may have nodes of both kinds, but a node must not be of both.
func CheckClass(class *resourceapi.DeviceClass, units []Unit, offers Offers) (warnings []string, err error) {
	name := *class.Spec.ExtendedResourceName
	at := field.NewPath("spec", "extendedResourceName")
	if slices.ContainsFunc(units, func(u Unit) bool { return string(u.Resource) == name }) {
		return nil, field.Invalid(at, name, fmt.Sprintf("it counts units of memory, and a claim of class %s for it would count devices; "+
			"use another name", class.Name))
	}
	if len(offers.Beside) > 0 {
		return nil, field.Invalid(at, name, fmt.Sprintf("the device plugin of %s offers it beside devices for claims of class %s, and "+
			"pods that request it get none of these; set allocationPath=dra there for the resource, or for the node, and wait until its "+
			"pods have ended, or use another name", nodesText(offers.Beside), class.Name))
	}
	if len(offers.Elsewhere) > 0 {
		warnings = append(warnings, fmt.Sprintf("the device plugin of %s offers %s: pods that request it get its devices there, and "+
			"claims of class %s on other nodes, until these nodes have allocationPath=dra", nodesText(offers.Elsewhere), name, class.Name))
	}
	return warnings, nil
}

// nodesText names one of the nodes, and how many there are.
func nodesText(names []string) string {
	if len(names) == 1 {
		return "node " + names[0]
	}
	return fmt.Sprintf("each of %d nodes, such as %s,", len(names), names[0])
}

// offersOf reads which nodes offer the extended resource of a class. They are read when a class gets
// such a name, which is rare: what nodes offer is not followed.
func offersOf(ctx context.Context, client kubernetes.Interface, class *resourceapi.DeviceClass) (Offers, error) {
	name := corev1.ResourceName(*class.Spec.ExtendedResourceName)
	var out Offers
	var both []string
	err := kube.EachItem(ctx, "nodes", metav1.ListOptions{Limit: page}, client.CoreV1().Nodes().List, func(o runtime.Object) {
		n, _ := o.(*corev1.Node)
		// An unhealthy device counts in the capacity alone, until it recovers.
		capacity, allocatable := n.Status.Capacity[name], n.Status.Allocatable[name]
		switch {
		case capacity.Sign() <= 0 && allocatable.Sign() <= 0:
		case n.Labels[wire.PathLabel] == string(config.PathBoth):
			both = append(both, n.Name)
		default:
			out.Elsewhere = append(out.Elsewhere, n.Name)
		}
	})
	if err != nil {
		return Offers{}, err
	}
	publish := map[string]bool{}
	if len(both) > 0 {
		for _, driver := range driversOf(class) {
			options := metav1.ListOptions{Limit: page, FieldSelector: resourceapi.ResourceSliceSelectorDriver + "=" + driver}
			err := kube.EachItem(ctx, "ResourceSlices", options, client.ResourceV1().ResourceSlices().List, func(o runtime.Object) {
				slice, _ := o.(*resourceapi.ResourceSlice)
				if slice.Spec.NodeName != nil && len(slice.Spec.Devices) > 0 {
					publish[*slice.Spec.NodeName] = true
				}
			})
			if err != nil {
				return Offers{}, err
			}
		}
	}
	for _, node := range both {
		if publish[node] {
			out.Beside = append(out.Beside, node)
		} else {
			out.Elsewhere = append(out.Elsewhere, node)
		}
	}
	slices.Sort(out.Beside)
	slices.Sort(out.Elsewhere)
	return out, nil
}
