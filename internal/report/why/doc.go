// Package why explains why a pod waits, and which smallest changes would admit it.
//
// Explain is a function from a Snapshot, which the caller has read, and a pod to an
// Explanation: no clients and no clock. Where a shared resource fits is decided by the
// extender's own code on a copy: cluster.State reads the nodes and pods, and a ledger
// answers. Of kube-scheduler's filters it judges those that a node and the pods on it
// decide (node affinity, taints, cordon, resources, ports), with Kubernetes' own helper
// packages. The others, spread and affinity between pods, volumes and claims, are quoted
// from kube-scheduler's message, and a change of a pod that has any of them is never
// called verified.
//
// Explainer is the entrance. A pod that has, or had, a node is explained by bound, one without
// a node by diagnosis: it asks the nodes by a judge, and a search looks for changes that admit
// the pod.
//
// Explainer.Admit and Explainer.Empty plan moves of pods: a layout is a copy of the cluster in
// which pods end and are placed, a mover searches on it, and replayed carries out what was
// found on a fresh one, from which the plan is written.
//
// Planned allocations are read without a look at their signatures, as package inspect
// does: the key is the programs' alone.
package why
