// Package podfuzz holds tests only: the webhook of the remote pool against
// Kubernetes' own defaulting and validation of pods, with pods of every shape.
//
// Its seeds run as a plain test. To look for more:
//
//	go test -run '^$' -fuzz FuzzMutate -fuzztime 1m ./podfuzz
package podfuzz
