// Package admission decides about two kinds of changes before the API server takes
// them: changes of divvy-node's configuration, of which one that gives units of
// memory another size is refused while pods hold some, and new pods, which are
// given the scheduler that knows of devices where the cluster's own does not.
//
// CheckUnits and Scheduler.Patch are functions of values; the handlers put them
// behind reviews.
//
// Not promised: a pod that is bound while a review is under way is not seen by it.
// divvy-node holds such a change back itself.
package admission
