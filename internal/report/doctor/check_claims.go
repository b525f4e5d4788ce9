package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// Claims are the objects of Dynamic Resource Allocation.
type Claims struct {
	// Served is false where the API server does not have their API.
	Served  bool
	Slices  []resourceapi.ResourceSlice
	Classes []resourceapi.DeviceClass
	Claims  []resourceapi.ResourceClaim
	// Events are those about claims that divvy-node has put on pods.
	Events []corev1.Event
}

// claimReasons are those of events about claims.
var claimReasons = []string{events.ClaimNotPrepared.Reason, events.ClaimMisused.Reason}

// driverOf is the driver of Divvy's that the name of a class ends with, "" for none.
func driverOf(class string) string {
	_, driver, _ := strings.Cut(class, ".")
	if !wire.IsDriver(driver) {
		return ""
	}
	return driver
}

// classesOf are the names of the classes that a claim requests.
func classesOf(spec *resourceapi.ResourceClaimSpec) []string {
	var out []string
	for i := range spec.Devices.Requests {
		r := &spec.Devices.Requests[i]
		if r.Exactly != nil {
			out = append(out, r.Exactly.DeviceClassName)
		}
		for k := range r.FirstAvailable {
			out = append(out, r.FirstAvailable[k].DeviceClassName)
		}
	}
	return out
}

// usedBy reports whether a pod names a claim of devices of Divvy's.
func (c *Claims) usedBy(p *corev1.Pod) bool {
	names := map[string]bool{}
	for one, name := range kube.ClaimsOf(p) {
		if one != "" { // a claim of extended resources is none that the pod names
			names[name] = true
		}
	}
	return len(names) > 0 && slices.ContainsFunc(c.Claims, func(one resourceapi.ResourceClaim) bool {
		return one.Namespace == p.Namespace && names[one.Name] && slices.ContainsFunc(classesOf(&one.Spec), c.isOurs)
	})
}

// isOurs reports whether a class is one of devices of Divvy's.
func (c *Claims) isOurs(name string) bool {
	return driverOf(name) != "" || slices.ContainsFunc(c.Classes, func(class resourceapi.DeviceClass) bool {
		return class.Name == name && kube.SelectsDriver(&class, ".divvy.dev")
	})
}

func withoutClaims(s *Snapshot) string {
	if nothing := withoutNode(s); nothing != "" {
		return nothing
	}
	if !serveClaims(s.Nodes) {
		return "no node serves ResourceClaims"
	}
	return ""
}

// serveClaims reports whether a node serves ResourceClaims.
func serveClaims(nodes []corev1.Node) bool {
	return slices.ContainsFunc(nodes, func(n corev1.Node) bool { return n.Labels[wire.PathLabel] != "" })
}

// checkClaimDevices reports the nodes whose devices for claims are not published, or not all of them.
func checkClaimDevices(s *Snapshot, f *findings) {
	if !s.Claims.Served {
		f.add(Error, "the API server", "it does not have resource.k8s.io/v1, and nodes have allocationPath dra or both",
			"Upgrade the cluster to Kubernetes 1.34 or later, or set allocationPath plugin.")
		return
	}
	published := map[string]map[string]int{} // number of devices, by driver and node
	for i := range s.Claims.Slices {
		r := &s.Claims.Slices[i].Spec
		if r.NodeName == nil || !wire.IsDriver(r.Driver) {
			continue
		}
		if published[r.Driver] == nil {
			published[r.Driver] = map[string]int{}
		}
		published[r.Driver][*r.NodeName] += len(r.Devices)
	}
	for i := range s.Nodes {
		if n := &s.Nodes[i]; n.Labels[wire.PathLabel] != "" {
			checkDrivers(s, n, published, f)
		}
	}
	for _, driver := range slices.Sorted(maps.Keys(published)) {
		if !slices.ContainsFunc(s.Claims.Classes, func(c resourceapi.DeviceClass) bool { return kube.SelectsDriver(&c, driver) }) {
			remedy, commands := s.restore(nameNode)
			f.add(Error, "DeviceClasses", "none selects devices of driver "+driver+", so no claim gets them", remedy, commands...)
		}
	}
	for i := range s.Claims.Classes {
		c := &s.Claims.Classes[i]
		name := c.Spec.ExtendedResourceName
		if name == nil {
			continue
		}
		for driver, on := range published {
			for k := range s.Nodes {
				n := &s.Nodes[k]
				if on[n.Name] > 0 && kube.SelectsDriver(c, driver) && amount(n.Status.Allocatable, *name) > 0 {
					f.add(Warning, "DeviceClass "+c.Name, fmt.Sprintf("its extendedResourceName %s is also what the device plugin of node "+
						"%s offers: pods that request it get no device that the node publishes for claims", *name, n.Name),
						"Use another name in deviceClasses.extendedResourceNames, or give the resource allocationPath dra.")
				}
			}
		}
	}
}

// checkDrivers compares what a daemon reports of its drivers with what is published.
func checkDrivers(s *Snapshot, n *corev1.Node, published map[string]map[string]int, f *findings) {
	daemon := s.daemonOn(n.Name)
	if daemon == nil {
		return // the check of labels reports it
	}
	object := "Node " + n.Name
	again := "kubectl delete pod " + daemon.Name + " -n " + daemon.Namespace
	drivers, err := wire.DecodeClaimDrivers(n.Annotations[wire.ClaimDriversAnnotation])
	switch {
	case err != nil:
		f.add(Warning, object, "its annotation "+wire.ClaimDriversAnnotation+" cannot be parsed: "+err.Error(),
			"Remove it; divvy-node writes it again.", "kubectl annotate node "+n.Name+" "+wire.ClaimDriversAnnotation+"-")
		return
	case len(drivers) == 0:
		f.add(Error, object, "its divvy-node serves ResourceClaims, but reports no driver of them",
			"Restart divvy-node, which registers its drivers with kubelet.", again).Transient = true
	}
	for _, d := range drivers {
		_, there := published[d.Driver][n.Name]
		switch {
		case d.Problem != "":
			f.add(Error, object, "driver "+d.Driver+": "+d.Problem, "See the log of divvy-node, or restart it: it registers its drivers "+
				"and publishes the devices again.", again).Transient = true
		case !there:
			f.add(Error, object, "driver "+d.Driver+" is registered, but none of its ResourceSlices exist",
				"Restart divvy-node, which publishes them.", again).Transient = true
		}
		if len(d.GatesOff) > 0 {
			f.add(Warning, object, fmt.Sprintf("driver %s: the API server drops the fields of %s, so devices are published in a reduced "+
				"form%s", d.Driver, list(d.GatesOff), leftOut(d.LeftOut)),
				"Switch these feature gates on in the API server, the controller manager and the scheduler; docs/dra.md says what each "+
					"is for.")
		} else if len(d.LeftOut) > 0 && d.Problem == "" {
			f.add(Warning, object, fmt.Sprintf("driver %s: some devices are not published, because more devices overlap than a "+
				"ResourceSlice can express: %s", d.Driver, list(d.LeftOut)), "Let fewer resources choose the same devices.")
		}
	}
}

func leftOut(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return ", without " + list(names)
}

// checkClaims reports claims that cannot be served, and those that could not be prepared.
func checkClaims(s *Snapshot, f *findings) {
	for i := range s.Claims.Claims {
		c := &s.Claims.Claims[i]
		if c.Status.Allocation != nil {
			continue
		}
		for _, name := range classesOf(&c.Spec) {
			there := slices.ContainsFunc(s.Claims.Classes, func(class resourceapi.DeviceClass) bool { return class.Name == name })
			if driverOf(name) == "" || there {
				continue
			}
			f.add(Error, "ResourceClaim "+c.Namespace+"/"+c.Name, "it requests the DeviceClass "+name+", which does not exist",
				"Correct the name in the claim or its template (docs/dra.md lists the classes). The chart creates those of the vendors "+
					"that sharedResources and node.configs name.")
		}
	}
	for i := range s.Claims.Events {
		e := &s.Claims.Events[i]
		p := lookup(s.Pods, e.InvolvedObject.Namespace, e.InvolvedObject.Name)
		if p == nil || p.UID != e.InvolvedObject.UID || ended(p) {
			continue
		}
		object := "Pod " + p.Namespace + "/" + p.Name
		switch {
		case e.Reason == events.ClaimMisused.Reason:
			f.add(Error, object, e.Message, "Change the pod as the message says, and create it again.")
		case p.Status.Phase == corev1.PodPending:
			f.add(Error, object, "it is on node "+p.Spec.NodeName+", and "+e.Message,
				"Remove the reason. Kubelet tries again by itself, after a minute or more.")
		}
	}
}
