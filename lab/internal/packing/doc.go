// Package packing compares Divvy's placement policies with the ones that were
// published, on the published workloads: the simulation of the product, on lists of
// nodes and pods in the format of the public trace cluster-trace-gpu-v2023, with the
// baselines of "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with
// Fragmentation Gradient Descent" (USENIX ATC 2023) beside the product's policies.
package packing
