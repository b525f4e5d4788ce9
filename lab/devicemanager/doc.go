// Package devicemanager holds tests only: divvy-node against kubelet's own
// device manager, admission and pod-resources server, all in one process,
// without root and without a cluster.
//
// Real are everything of kubelet that decides about devices (device manager
// with its checkpoint and sockets, topology manager, allocation manager,
// pod-resources server), the agent of divvy-node and its backends. The
// vendors' libraries are the stand-ins of internal/testing/vendorsim. The tests play the
// rest: the API server (a fake clientset whose watch can be held back), the
// extender that signs grants, the parts of kubelet that feed pods to admission,
// and the container runtime.
package devicemanager
