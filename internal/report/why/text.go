package why

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
)

// quantity is an amount as Kubernetes writes it.
func quantity(name v1.ResourceName, n int64) string {
	switch name {
	case v1.ResourceCPU:
		return resource.NewMilliQuantity(n, resource.DecimalSI).String()
	case v1.ResourceMemory, v1.ResourceEphemeralStorage:
		return resource.NewQuantity(n, resource.BinarySI).String()
	}
	return strconv.FormatInt(n, 10)
}

// bytesOf are the bytes of units, 0 where their size is unknown or not the same on all devices.
func bytesOf(unit string, n accel.Units) uint64 {
	u, err := sharing.ParseMemoryUnit(unit)
	if err != nil {
		return 0
	}
	return u.Bytes(n, 0)
}

// gigabytes is an amount of memory in GB of 2^30 bytes, as units are.
func gigabytes(bytes uint64) string {
	return strings.TrimRight(strings.TrimRight(fmt.Sprintf("%.3f", float64(bytes)/(1<<30)), "0"), ".") + " GB"
}

// ago is how long something has lasted, in two units at most.
func ago(d time.Duration) string {
	switch d = max(d, 0); {
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%d h", d/time.Hour)
	}
	return fmt.Sprintf("%d days", d/(24*time.Hour))
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// listed joins at most so many names.
func listed(names []string, most int) string {
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
