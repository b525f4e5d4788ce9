package extender

// APIVersion is the version of the messages that kube-scheduler and the extender
// exchange, that of package k8s.io/kube-scheduler/extender/v1.
const APIVersion = "v1"
