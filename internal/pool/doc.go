// Package pool knows the contract of GPUs in a remote pool: the keys that pods
// write, how a request becomes units, the catalog of client programs, and how a
// container's command is put behind the client. It is pure: no clients, no
// clocks, no logging.
//
// The contract is that of "Bitfusion on Kubernetes" 0.1 to 0.4. Where it is
// faulty there, docs/compatibility.md says what is different here.
package pool
