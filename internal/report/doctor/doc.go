// Package doctor examines an installation of Divvy and says how to mend what it
// finds.
//
// It works in two steps. Collect reads a Snapshot from the API server and from
// Divvy's own programs; it changes nothing, and notes what it was not allowed to
// read. Examine looks at the snapshot alone: a table of checks, each a function
// from the snapshot to findings, without clients and without a clock. A check
// whose material could not be read is "unknown", neither well nor ill.
//
// Why pods wait is a question to package why, which the caller passes as a function.
//
// Doctor sees what the API server shows. It does not see into the hosts: what a
// kube-scheduler really reads, which files are left on a node. Where it goes by a
// sign of such things, the check's text says so.
package doctor
