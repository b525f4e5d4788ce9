// Package runtimesetup finds out how a node's container runtime gives containers NVIDIA's GPUs,
// and how the daemon has to answer kubelet accordingly.
//
// Read collects Facts from the host's files; Decide is a function of them alone. Findings are
// what an administrator should know of the same files: CDI specifications that contradict each
// other or that nothing keeps current, and ways around every device plugin.
package runtimesetup
