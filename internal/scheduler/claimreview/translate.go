package claimreview

import (
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// Translation says which claim a pod has in place of its units of a resource.
type Translation struct {
	wire.ClaimedUnits

	// Devices are those of the template, whose name follows from them.
	Devices resourceapi.DeviceClaim `json:"devices"`
}

// maxNameLength is the longest name of a claim within a pod, a DNS label.
const maxNameLength = 63

// Translate returns what becomes of a pod's units, nil if it has none of these resources. An error
// says why the pod cannot have a claim in their place; paths in it begin at the pod. Warnings are
// about what does not hold for claims.
func Translate(pod *corev1.Pod, units []Unit) (all []Translation, warnings []string, err error) {
	var resources []accel.Resource
	for _, u := range units {
		resources = append(resources, u.Resource)
	}
	requests, err := kube.RequestsOf(pod, resources)
	if len(requests) == 0 {
		return nil, nil, nil
	}
	errs := []error{err}
	if _, done := pod.Annotations[wire.UnitsAnnotation]; done {
		errs = append(errs, field.Forbidden(field.NewPath("metadata", "annotations").Key(wire.UnitsAnnotation),
			"units of this pod have been translated into claims before, and containers request units again; remove the annotation, "+
				"the label "+wire.UnitsLabel+" and the claims that the annotation names, or the resource from the namespace's LimitRange, "+
				"if that is where the units come from"))
	}
	if _, set := pod.Annotations[wire.ComputeAnnotation]; set {
		errs = append(errs, field.Forbidden(field.NewPath("metadata", "annotations").Key(wire.ComputeAnnotation),
			"claims have no share of a device's multiprocessors; remove the annotation"))
	}
	if _, set := pod.Annotations[wire.PolicyAnnotation]; set {
		warnings = append(warnings, wire.PolicyAnnotation+" has no effect: kube-scheduler chooses the devices of claims")
	}
	for _, request := range requests {
		u := units[slices.Index(resources, request.Resource)]
		errs = append(errs, checkUnits(pod, u.Resource))
		t := Translation{ClaimedUnits: wire.ClaimedUnits{Resource: u.Resource, Unit: u.Size, Claim: u.claimName()}}
		if slices.ContainsFunc(pod.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.Name == t.Claim }) {
			errs = append(errs, field.Duplicate(field.NewPath("spec", "resourceClaims"), t.Claim))
		}
		var err error
		if t.Devices, t.Containers, err = u.devices(request); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", u.Resource, err))
			continue
		}
		t.Template = templateName(&t.Devices)
		all = append(all, t)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, nil, err
	}
	return all, warnings, nil
}

// checkUnits repeats what the API server requires of an extended resource, since it does not see
// the units: whole numbers, and a limit that equals the request.
func checkUnits(pod *corev1.Pod, name accel.Resource) error {
	var errs field.ErrorList
	for at, c := range containers(&pod.Spec) {
		limit, limited := c.Resources.Limits[corev1.ResourceName(name)]
		request, requested := c.Resources.Requests[corev1.ResourceName(name)]
		if !limited && !requested {
			continue
		}
		path := at.Child("resources", "limits").Key(string(name))
		if _, whole := limit.AsInt64(); limited && (!whole || limit.Sign() < 0) {
			errs = append(errs, field.Invalid(path, limit.String(), "must be a whole number of units"))
		}
		if !limited || requested && limit.Cmp(request) != 0 {
			errs = append(errs, field.Invalid(path, limit.String(), "must be equal to the request, which is "+request.String()))
		}
	}
	return errs.ToAggregate()
}

// containers returns the containers of a pod, each with its path.
func containers(spec *corev1.PodSpec) func(func(*field.Path, *corev1.Container) bool) {
	return func(yield func(*field.Path, *corev1.Container) bool) {
		for i := range spec.InitContainers {
			if !yield(field.NewPath("spec", "initContainers").Index(i), &spec.InitContainers[i]) {
				return
			}
		}
		for i := range spec.Containers {
			if !yield(field.NewPath("spec", "containers").Index(i), &spec.Containers[i]) {
				return
			}
		}
	}
}

// claimName is the name that the claim has in a pod: "divvy-enflame-gcu-memory".
func (u Unit) claimName() string {
	_, base, _ := strings.Cut(string(u.Resource), "/")
	name := []byte("divvy-" + u.Vendor + "-" + strings.ToLower(base))
	for i, c := range name {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			name[i] = '-'
		}
	}
	return strings.TrimRight(string(name[:min(len(name), maxNameLength)]), "-")
}

// devices returns the requests of the claim. Containers that run at the same time have one each,
// on the same device. Init containers end before what comes after the last of them starts, so they
// share the largest request of that, which has what any of them needs.
func (u Unit) devices(r accel.Request) (resourceapi.DeviceClaim, []wire.ClaimedContainer, error) {
	var claim resourceapi.DeviceClaim
	var amounts []accel.Units // by request
	var initial accel.Units
	last := -1                             // the last init container
	uses := make([]int, len(r.Containers)) // the request that each container uses
	for i, c := range r.Containers {
		if c.Kind == accel.InitContainer {
			initial, last = max(initial, c.Units), i
			continue
		}
		uses[i] = len(amounts)
		amounts = append(amounts, c.Units)
	}
	if initial > 0 {
		shared := -1
		for i := last + 1; i < len(r.Containers); i++ {
			if shared < 0 || amounts[uses[i]] > amounts[shared] {
				shared = uses[i]
			}
		}
		if shared < 0 {
			shared, amounts = len(amounts), append(amounts, 0)
		}
		amounts[shared] = max(amounts[shared], initial)
		for i, c := range r.Containers {
			if c.Kind == accel.InitContainer {
				uses[i] = shared
			}
		}
	}
	count := max(r.Devices, 1)
	switch {
	case len(amounts) > resourceapi.DeviceRequestsMaxSize:
		return claim, nil, fmt.Errorf("%d containers request units, and a claim has %d requests at most; write claims instead of units",
			len(amounts), resourceapi.DeviceRequestsMaxSize)
	case count > resourceapi.AllocationResultsMaxSize:
		return claim, nil, fmt.Errorf("annotation %s: a claim has %d devices at most, not %d", wire.CountAnnotation,
			resourceapi.AllocationResultsMaxSize, count)
	case count > 1 && len(amounts) > 1:
		return claim, nil, fmt.Errorf("annotation %s: %d containers that run at the same time request units, and claims cannot keep "+
			"them on the same %d devices; let one of them request units, or write a claim that they share", wire.CountAnnotation,
			len(amounts), count)
	}
	selectors, err := u.selectors(r.Selection)
	if err != nil {
		return claim, nil, err
	}
	var names []string
	for i, amount := range amounts {
		name := "memory"
		if len(amounts) > 1 {
			name += "-" + strconv.Itoa(i)
		}
		names = append(names, name)
		memory := u.MiB(amount/accel.Units(count)) * wire.MemoryStep
		claim.Requests = append(claim.Requests, resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{
			DeviceClassName: u.Class(), Selectors: selectors,
			AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: int64(count),
			Capacity: &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{
				wire.MemoryCapacity: *resource.NewQuantity(memory, resource.BinarySI),
			}},
		}})
	}
	if len(amounts) > 1 {
		same := resourceapi.FullyQualifiedName(wire.Driver(u.Vendor) + "/" + wire.DeviceUUID)
		claim.Constraints = []resourceapi.DeviceConstraint{{MatchAttribute: &same}}
	}
	var used []wire.ClaimedContainer
	for i, c := range r.Containers {
		used = append(used, wire.ClaimedContainer{Name: c.Name, Units: c.Units, Request: names[uses[i]]})
	}
	return claim, used, nil
}

// selectors says in CEL what the annotations say of models, devices and isolation.
func (u Unit) selectors(s *accel.Selection) ([]resourceapi.DeviceSelector, error) {
	if s == nil {
		return nil, nil
	}
	attribute := func(name string) string { return fmt.Sprintf("device.attributes[%q].%s", wire.Driver(u.Vendor), name) }
	models := func(names []string) string {
		var either []string
		for _, name := range names {
			model, is := attribute(wire.DeviceModel)+".lowerAscii()", "%s == %s"
			if prefix, open := strings.CutSuffix(name, "*"); open {
				name, is = prefix, "%s.startsWith(%s)"
			}
			either = append(either, fmt.Sprintf(is, model, quoted(strings.ToLower(name))))
		}
		return "(" + strings.Join(either, " || ") + ")"
	}
	among := func(name string, values []string) string {
		var list []string
		for _, v := range values {
			list = append(list, quoted(v))
		}
		return "(" + attribute(name) + " in [" + strings.Join(list, ", ") + "])"
	}
	var all []string
	if len(s.UseModels) > 0 {
		all = append(all, models(s.UseModels))
	}
	if len(s.AvoidModels) > 0 {
		all = append(all, "!"+models(s.AvoidModels))
	}
	if len(s.UseIDs) > 0 {
		all = append(all, among(wire.DeviceUUID, s.UseIDs))
	}
	if len(s.AvoidIDs) > 0 {
		all = append(all, "!"+among(wire.DeviceUUID, s.AvoidIDs))
	}
	if s.Isolation != accel.TierNone {
		var tiers []string
		for _, name := range accel.TierNames() {
			if tier, err := accel.ParseTier(name); err == nil && tier.Meets(s.Isolation) {
				tiers = append(tiers, name)
			}
		}
		all = append(all, among(wire.DeviceIsolation, tiers))
	}
	expression := strings.Join(all, " && ")
	if len(expression) > resourceapi.CELSelectorExpressionMaxLength {
		return nil, fmt.Errorf("the annotations that choose devices become a selector of %d bytes, and a claim may have %d; name fewer "+
			"models or devices", len(expression), resourceapi.CELSelectorExpressionMaxLength)
	}
	return []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}}, nil
}

// quoted is a text in CEL. What is not plain ASCII is written as a code point, which CEL and Go
// write alike.
func quoted(text string) string { return strconv.QuoteToASCII(text) }

// templateName is the name of the template for these devices, the same for the same devices.
func templateName(devices *resourceapi.DeviceClaim) string {
	data, _ := json.Marshal(devices) //nolint:errchkjson // values of the API, which can always be written
	sum := sha256.Sum256(data)
	return fmt.Sprintf("divvy-memory-%x", sum[:10])
}

// template is the object of that name.
func template(namespace string, t *Translation) *resourceapi.ResourceClaimTemplate {
	return &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: t.Template,
			Labels: map[string]string{wire.UnitsLabel: wire.UnitsAsClaims}},
		Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: t.Devices}},
	}
}

// operation is a step of a JSON patch.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// patch returns the JSON patch that gives a pod the claims in place of the units.
func patch(pod *corev1.Pod, all []Translation) ([]byte, error) {
	record, err := json.Marshal(all)
	if err != nil {
		return nil, fmt.Errorf("write annotation %s: %w", wire.UnitsAnnotation, err)
	}
	var out []operation
	put := func(path, key, value string, there bool) {
		if !there {
			out = append(out, operation{"add", path, map[string]string{}})
		}
		out = append(out, operation{"add", path + "/" + pointer(key), value})
	}
	put("/metadata/annotations", wire.UnitsAnnotation, string(record), pod.Annotations != nil)
	put("/metadata/labels", wire.UnitsLabel, wire.UnitsAsClaims, pod.Labels != nil)
	if pod.Spec.ResourceClaims == nil {
		out = append(out, operation{"add", "/spec/resourceClaims", []any{}})
	}
	claimed := map[*corev1.Container]bool{}
	for i := range all {
		t := &all[i]
		out = append(out, operation{"add", "/spec/resourceClaims/-", corev1.PodResourceClaim{Name: t.Claim,
			ResourceClaimTemplateName: &t.Template}})
		for at, c := range containers(&pod.Spec) {
			used := slices.IndexFunc(t.Containers, func(u wire.ClaimedContainer) bool { return u.Name == c.Name })
			if used < 0 {
				continue
			}
			resources := "/" + strings.NewReplacer("[", "/", "]", "", ".", "/").Replace(at.Child("resources").String())
			for list, amounts := range map[string]corev1.ResourceList{"limits": c.Resources.Limits, "requests": c.Resources.Requests} {
				if _, there := amounts[corev1.ResourceName(t.Resource)]; there {
					out = append(out, operation{Op: "remove", Path: resources + "/" + list + "/" + pointer(string(t.Resource))})
				}
			}
			if c.Resources.Claims == nil && !claimed[c] {
				out = append(out, operation{"add", resources + "/claims", []any{}})
			}
			claimed[c] = true
			out = append(out, operation{"add", resources + "/claims/-", corev1.ResourceClaim{Name: t.Claim,
				Request: t.Containers[used].Request}})
		}
	}
	return json.Marshal(out)
}

// pointer escapes a key in the path of a JSON patch.
func pointer(key string) string { return strings.NewReplacer("~", "~0", "/", "~1").Replace(key) }

// Translations reads the annotation of a pod that was translated, nil for another pod. What it
// does not understand is an error.
func Translations(annotations map[string]string) ([]Translation, error) {
	text, ok := annotations[wire.UnitsAnnotation]
	if !ok {
		return nil, nil
	}
	var all []Translation
	if err := json.Unmarshal([]byte(text), &all); err != nil {
		return nil, fmt.Errorf("annotation %s: %w", wire.UnitsAnnotation, err)
	}
	for i := range all {
		// The name proves the content: a template of a name that Divvy chose has what Divvy wrote.
		if name := templateName(&all[i].Devices); name != all[i].Template {
			return nil, fmt.Errorf("annotation %s: template %q is not that of its devices, which is %q", wire.UnitsAnnotation,
				all[i].Template, name)
		}
	}
	slices.SortFunc(all, func(a, b Translation) int { return cmp.Compare(a.Template, b.Template) })
	return all, nil
}
