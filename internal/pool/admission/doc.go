// Package admission decides about pods that use the remote pool: Mutate turns
// what a user writes into what kubelet, kube-scheduler and the pool's client
// need, Validate refuses what could never work, and Handler serves both to the
// API server. Mutate and Validate are pure functions of their arguments.
package admission
