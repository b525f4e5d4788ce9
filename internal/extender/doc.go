// Package extender answers kube-scheduler: filter, preempt, prioritize and bind,
// and a person's question what every device holds.
//
// The handlers are thin: they turn JSON into questions for the ledger and
// answers into JSON. filter and prioritize only read. preempt says which pods
// would have to go and evicts none. bind reserves a device in the ledger, makes
// one call to the API server without holding any lock, and takes the reservation
// back when that fails.
//
// kube-scheduler drops the body of an answer whose status is not 200, so what
// goes wrong is told in the Error of the result, with status 200, where the
// result has one. Nothing that a client sends ends the process.
package extender
