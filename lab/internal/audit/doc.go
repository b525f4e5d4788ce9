// Package audit reads every place that says which card a container has, and
// compares them: what the running process really sees (its environment and
// its /dev), the units that kubelet gave it, the pod's annotations, and the
// extender's books.
//
// It shares no code with the product: formats are read here a second time, so
// that a mistake in the product's reading does not hide itself.
package audit
