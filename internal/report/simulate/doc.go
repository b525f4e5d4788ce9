// Package simulate replays a workload on a cluster that exists only in memory:
// pods arrive in an order that a seed decides, a placement policy chooses a
// node and devices for each, and the result says how much of the cluster was
// allocated at each amount of arrived demand, or how much demand was refused
// when pods also leave.
//
// Placement goes through package place, as in the extender, whose policies are used as
// they are. lab/internal/packing adds baselines that were published for the same
// experiment, and its workloads.
//
// Equal inputs give equal results: the one source of chance is the seed. The
// experiment and the order of its random numbers are those of "Beware of
// Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient
// Descent" (USENIX ATC 2023) and of its artifact,
// hkust-adsl/kubernetes-scheduler-simulator, so that published numbers can be
// compared with.
package simulate
