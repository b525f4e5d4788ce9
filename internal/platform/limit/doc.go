// Package limit bounds the memory that the clients of a process can hold: their
// connections, the bodies that they send, and the answers that they have not read
// yet. A process has one Limiter for all its HTTP servers.
//
// Everything counts in bytes against one of two budgets. Callers that the process
// depends on, such as kube-scheduler, have a reserve of their own; all others share
// the rest. A connection counts with what net/http keeps for it, a request with its
// goroutine and header, a body from before it is read, an answer until it was written.
//
// # What happens at a bound
//
// Nothing waits for memory. Where a budget is used up, a holder that has more than twice
// as much as the caller would have loses the connection that holds most. If there is
// none, an idle connection is closed for a new one. Otherwise the new connection or request is
// rejected with status 503. A holder is a remote address, so however many connections
// one pod opens, another pod that holds less is served. Among callers with a
// reserve each connection is a holder, because kube-scheduler and other programs of its
// host have one address.
//
// # What it does not do
//
// It limits neither requests per second nor processor time. Handlers that compute for
// long bound that themselves, and Reports makes large answers one at a time.
package limit
