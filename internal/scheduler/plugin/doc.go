// Package plugin is the door to decisions that is compiled into kube-scheduler: a plugin of the
// scheduling framework. What is decided is package decision's; this package knows the framework.
//
//   - PreFilter surveys the ledger once, for all that is asked in the attempt, and names one
//     node where the pod leaves the choice to the policy. A pod that asks for nothing of ours
//     is skipped.
//   - Filter answers from that survey. Where kube-scheduler tries what would be without some
//     pods, or with nominated ones, the ledger is asked what if, device by device.
//   - PostFilter ends attempts for which nothing must be evicted: one node was named and
//     something stood against it, or room is on its way.
//   - Reserve is in memory and can be repeated. Bind writes the Binding with the grant.
//   - EventsToRegister says which events may help a pod that was rejected. What only the ledger
//     sees, such as containers that ended, ends in Activate.
//
// There is no Permit and no PreBind, which would cost a write of the pod each, and nothing
// waits for the API server within the scheduling cycle.
//
// All profiles of a process share one Core. The package imports the framework's interfaces
// alone, so it compiles with each of the minors that divvy-scheduler is made for.
package plugin
