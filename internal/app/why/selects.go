package why

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/divvy-gpu/divvy/internal/scheduler/claims"
)

// selects returns what evaluates selectors of devices. The package of the report does not depend on
// CEL.
func selects() func(expression, driver string, d *resourceapi.Device) (bool, error) {
	selectors := claims.NewSelectors()
	return func(expression, driver string, d *resourceapi.Device) (bool, error) {
		return selectors.Match(context.Background(), expression, driver, d)
	}
}
