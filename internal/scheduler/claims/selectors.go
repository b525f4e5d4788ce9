package claims

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
)

// maxExpressions is how many compiled expressions are kept.
const maxExpressions = 100

// Selectors evaluates selectors of devices as kube-scheduler does. It is safe for concurrent use.
type Selectors struct{ compiled *cel.Cache }

// NewSelectors returns an evaluator that keeps what it has compiled.
func NewSelectors() Selectors {
	return Selectors{cel.NewCache(maxExpressions, cel.Features{EnableConsumableCapacity: true})}
}

// Match reports whether an expression selects a device of a driver.
func (s Selectors) Match(ctx context.Context, expression, driver string, d *resourceapi.Device) (bool, error) {
	compiled := s.compiled.GetOrCompile(expression)
	if compiled.Error != nil {
		return false, compiled.Error
	}
	matches, _, err := compiled.DeviceMatches(ctx, cel.Device{Driver: driver, AllowMultipleAllocations: d.AllowMultipleAllocations,
		Attributes: d.Attributes, Capacity: d.Capacity})
	return matches, err
}
