// Package policy holds no code but tests: they ask the admission policy of the
// chart, evaluated as the API server does, what divvy-node may change.
package policy
