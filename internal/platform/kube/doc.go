// Package kube is what every program needs to talk to the API server: clients,
// reflectors that are soon back, the key of the signed grants, and what a pod's
// spec requests of a resource.
package kube
