// Package gpuoperator is the protocol of NVIDIA's GPU operator towards programs that hold
// the driver: what the labels of a node mean, and when the driver must be left alone.
//
// Since release 26.7 the operator has a label for such programs, nvidia.com/gpu.deploy.client:
// their DaemonSets select nodes by it, and the operator takes it away while it replaces the
// driver or changes MIG devices. For releases before that, and for the moments until a pod
// has ended, the daemon reads the labels itself. docs/design/037-operator-protocol.md has
// the reasons.
package gpuoperator
