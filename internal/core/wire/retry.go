package wire

// RetryAnnotation is the annotation of a waiting Pod by which the extender makes
// kube-scheduler look at it again. Its value, a time, is for people.
const RetryAnnotation = "divvy.dev/retry"
