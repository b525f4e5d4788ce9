// Package monitoring holds no code but tests: what the chart makes for Prometheus and
// Grafana is taken by their own decoders and parsers. It is in the lab's module, as
// those are nothing that Divvy needs.
package monitoring
