// Package extender answers kube-scheduler over HTTP: filter, preempt, prioritize and bind,
// and a person's question what every device holds.
//
// The handlers are thin: they turn JSON into questions for a [decision.Decider] and
// answers into JSON, bound what callers may take of the process, and hand requests to the
// replica that leads. What is decided, and what is remembered of it, is package decision's.
//
// kube-scheduler drops the body of an answer whose status is not 200, so what
// goes wrong is in the Error of the result, with status 200, where the
// result has one. Nothing that a client sends ends the process.
package extender
