// Package probe asks the servers of a remote pool whether they are there and
// prove who they are: over TCP, then TLS, verified with the certificate of the
// pool's authority. It sends no token and speaks no protocol of the pool.
package probe
