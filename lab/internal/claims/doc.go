// Package claims compares what the node publishes for ResourceClaims with Kubernetes'
// own code: the API server's rules for ResourceSlices, and the allocator of kube-scheduler,
// whose every allocation the node's engine has to accept.
package claims
