package nvidia

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// capabilitiesFile says which device file gives access to which instance, below the
// folder in which the kernel's proc file system is seen.
const capabilitiesFile = "driver/nvidia-caps/mig-minors"

// capability is the access to a GPU instance, or to a compute instance in it.
type capability struct {
	// gpu is the number of the GPU's device file.
	gpu, gpuInstance int
	// computeInstance is noInstance for the GPU instance itself.
	computeInstance int
}

// noInstance is the computeInstance of a GPU instance's capability.
const noInstance = -1

// String is the capability as the file writes it.
func (c capability) String() string {
	if c.computeInstance == noInstance {
		return fmt.Sprintf("gpu%d/gi%d/access", c.gpu, c.gpuInstance)
	}
	return fmt.Sprintf("gpu%d/gi%d/ci%d/access", c.gpu, c.gpuInstance, c.computeInstance)
}

// capabilities are the numbers of the device files of capabilities.
type capabilities map[capability]int

// parseCapabilities reads the lines of capabilitiesFile: a capability, a blank and the
// number of its device file. Lines of another form, such as those of "config" and
// "monitor", are not about instances. Of two lines about the same capability neither
// counts, as the wrong one would give away another instance.
func parseCapabilities(text string) capabilities {
	out, twice := capabilities{}, map[capability]bool{}
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) != 2 {
			continue
		}
		c, ok := parseCapability(fields[0])
		number, numbered := parseNumber(fields[1])
		if !ok || !numbered {
			continue
		}
		_, known := out[c]
		twice[c] = twice[c] || known
		out[c] = number
	}
	maps.DeleteFunc(out, func(c capability, _ int) bool { return twice[c] })
	return out
}

// parseCapability reads what capability.String writes.
func parseCapability(text string) (capability, bool) {
	parts := strings.Split(text, "/")
	if len(parts) < 3 || len(parts) > 4 || parts[len(parts)-1] != "access" {
		return capability{}, false
	}
	numbers := []int{0, 0, noInstance}
	for i, part := range parts[:len(parts)-1] {
		digits, ok := strings.CutPrefix(part, []string{"gpu", "gi", "ci"}[i])
		if !ok {
			return capability{}, false
		}
		if numbers[i], ok = parseNumber(digits); !ok {
			return capability{}, false
		}
	}
	return capability{numbers[0], numbers[1], numbers[2]}, true
}

// maxMinor is the largest number of a device file that Linux has.
const maxMinor = 1<<20 - 1

func parseNumber(text string) (int, bool) {
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil || n > maxMinor || strconv.FormatUint(n, 10) != text {
		return 0, false
	}
	return int(n), true
}

// nodes returns the device files of a MIG device, seen from the driver root: that of
// its GPU instance and that of its compute instance. missing names capabilities of which
// no number is known.
func (c capabilities) nodes(gpu int, of instance) (nodes []string, missing []string) {
	for _, one := range []capability{
		{gpu, int(of.gpu), noInstance},
		{gpu, int(of.gpu), int(of.compute)},
	} {
		if number, ok := c[one]; ok {
			nodes = append(nodes, capabilityNodes+strconv.Itoa(number))
		} else {
			missing = append(missing, one.String())
		}
	}
	slices.Sort(missing)
	return nodes, missing
}
