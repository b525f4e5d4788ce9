// Package doors has no code but tests: of what the two doors to decisions, the extender and the
// plugin of kube-scheduler, have in common. Each answers as kube-scheduler asks it: the extender
// over HTTP, the plugin in kube-scheduler's framework, with its filter that counts sums and its
// preemption. The tests need the libraries of one minor of Kubernetes.
package doors
