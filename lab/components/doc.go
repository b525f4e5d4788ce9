// Package components imports the main packages of all programs that the lab
// builds. It is a module of its own, so that nothing but a change of their
// versions makes anybody build a Kubernetes anew. No build sets the tag
// components; the imports tell `go mod tidy` what go.sum has to cover.
package components
