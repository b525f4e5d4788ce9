// Package policy holds no code but tests: they ask the admission policies of the
// chart and the conditions of its webhooks, evaluated as the API server does, what
// Divvy's programs may change and which pods they are asked about.
package policy
