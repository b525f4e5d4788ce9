package testenv

import (
	"strings"
	"testing"
)

func TestCountReloads(t *testing.T) {
	const metrics = `# HELP divvy_node_config_reloads_total Changes.
# TYPE divvy_node_config_reloads_total counter
divvy_node_config_reloads_total{result="applied"} 2
divvy_node_config_reloads_total{result="rejected"} 1
go_goroutines 17
`
	if got, err := countReloads(strings.NewReader(metrics)); got != 3 || err != nil {
		t.Errorf("counted %d (%v), want 3", got, err)
	}
	if _, err := countReloads(strings.NewReader(`divvy_node_config_reloads_total{result="applied"} many`)); err == nil {
		t.Error("no error for a number that is none")
	}
}
