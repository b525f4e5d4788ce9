package product

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"
)

// chartValues is what an installation needs to know of its values.
type chartValues struct {
	pool bool
	// scheduler is true where divvy-scheduler may run.
	scheduler bool
}

// schedules reports whether divvy-scheduler may run with a value of scheduler.mode.
func schedules(mode string) bool { return mode == "dedicated" || mode == "replace" }

func readValues(o Options) (chartValues, error) {
	var found chartValues
	files := append([]string{filepath.Join(o.RepositoryDir, "lab", "values", "lab.yaml")}, o.Values...)
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return chartValues{}, fmt.Errorf("values: %w", err)
		}
		var values struct {
			Pool struct {
				Enabled *bool `json:"enabled"`
			} `json:"pool"`
			Scheduler struct {
				Mode string `json:"mode"`
			} `json:"scheduler"`
		}
		if err := yaml.Unmarshal(data, &values); err != nil {
			return chartValues{}, fmt.Errorf("values %s: %w", file, err)
		}
		if values.Pool.Enabled != nil {
			found.pool = *values.Pool.Enabled
		}
		if values.Scheduler.Mode != "" {
			found.scheduler = schedules(values.Scheduler.Mode)
		}
	}
	for _, set := range o.Set {
		if value, ok := strings.CutPrefix(set, "pool.enabled="); ok {
			found.pool = value == "true"
		}
		if value, ok := strings.CutPrefix(set, "scheduler.mode="); ok {
			found.scheduler = schedules(value)
		}
	}
	return found, nil
}
