package wire

// The annotations by which a pod says which devices it wants. They are read by
// the extender when it places the pod, and by the node for a pod that came past
// the extender; what was granted is decided by the grant alone.
const (
	// CountAnnotation is how many devices the pod is spread over, a number from 1
	// to MaxDevices; each gets an equal part of what every container asks for.
	CountAnnotation = "divvy.dev/devices"
	// UseModelsAnnotation and AvoidModelsAnnotation are product names, joined by
	// commas; a "*" at the end stands for any end. Case does not matter.
	UseModelsAnnotation   = "divvy.dev/use-models"
	AvoidModelsAnnotation = "divvy.dev/avoid-models"
	// UseDevicesAnnotation and AvoidDevicesAnnotation are uuids, joined by commas.
	UseDevicesAnnotation   = "divvy.dev/use-devices"
	AvoidDevicesAnnotation = "divvy.dev/avoid-devices"
	// PolicyAnnotation is the placement policy for this pod.
	PolicyAnnotation = "divvy.dev/placement-policy"
	// IsolationAnnotation is the least tier of isolation that the pod's devices must have,
	// as accel.ParseTier reads it. The node reads it for every device that it gives out.
	IsolationAnnotation = "divvy.dev/isolation"
	// ComputeAnnotation is the share of a device's multiprocessors that each container of the
	// pod may use, a number from 1 to 100, in place of its share of the memory. Only the node
	// reads it, for a device of accel.TierCooperative.
	ComputeAnnotation = "divvy.dev/compute-percent"
)

// MaxDevices is the most devices that a pod can be spread over.
const MaxDevices = 64

// AskAnnotations returns the annotations by which a pod says which devices it
// wants.
func AskAnnotations() []string {
	return []string{
		CountAnnotation, UseModelsAnnotation, AvoidModelsAnnotation, UseDevicesAnnotation, AvoidDevicesAnnotation, PolicyAnnotation,
		IsolationAnnotation, ComputeAnnotation,
	}
}
