// Package secrets brings the secrets that hold the pool's token to the
// namespaces of the pods that use the pool, keeps the copies up to date, and
// removes them with their last user.
//
// Copies are made only in namespaces that an administrator allowed by a label.
// A copy is known by ManagedByLabel and SourceAnnotation; secrets without them
// belong to somebody else and are never touched.
//
// Any number of replicas may run at once: each does what is missing, and finding
// that another was quicker is normal. Data is never logged.
package secrets
