package pool

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// ErrNoRequest says that a container asks for nothing of the pool.
var ErrNoRequest = errors.New("the container requests no GPUs of the pool")

// maxAmount is more GPUs than any pool has; it keeps all products small.
const maxAmount = 1_000_000

// bytesPerMB is the unit of the original and of the client's -m.
const bytesPerMB = 1_000_000

// Request is what one container asks for, checked.
type Request struct {
	// Amount is the number of GPUs, 1 or more.
	Amount int64
	// Percent is the share of each GPU's memory, 1 to 100; 0 when MemoryBytes
	// says it.
	Percent int64
	// MemoryBytes is the memory of each GPU in bytes; 0 when Percent says it.
	MemoryBytes int64
	// Units is what the container takes of Resource.
	Units int64
}

// MemoryMB is the memory that the client is asked for, in MB (10^6 bytes),
// rounded down as the original does.
func (r Request) MemoryMB() int64 { return r.MemoryBytes / bytesPerMB }

// ParseRequest reads what a container asks for. totalMB is the memory of one GPU
// of the pool in MB (10^6 bytes), 0 when the administrator has not said it:
// requests by memory are refused then. It returns ErrNoRequest when none of the
// three keys is there, and otherwise all problems joined, each naming key, value
// and what would be accepted; the container is named by the caller.
//
// Units are Percent x Amount, or ceil(MemoryBytes x Amount x 100 / (totalMB x
// 10^6)), in exact integer arithmetic.
func ParseRequest(r corev1.ResourceRequirements, totalMB int64) (Request, error) {
	if !Asks(r) {
		return Request{}, ErrNoRequest
	}
	var problems []error
	problem := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	read := func(key corev1.ResourceName, accepted string) (value int64, text string, there bool) {
		q, there, err := quantity(r, key)
		if !there {
			return 0, "", false
		}
		text = q.String()
		if err != nil {
			problems = append(problems, err)
			return 0, text, true
		}
		if value, err = whole(q); err != nil {
			problem("%s: %s is %w; write %s", key, text, err, accepted)
			return 0, text, true
		}
		return value, text, true
	}

	var req Request
	before := len(problems)
	amount, text, there := read(AmountResource, "a whole number of GPUs, 1 or more")
	switch {
	case len(problems) > before:
	case !there:
		problem("%s is missing; add it, with the number of GPUs (1 or more), to the limits", AmountResource)
	case amount < 1:
		problem("%s: %s is not accepted; write a whole number of GPUs, 1 or more", AmountResource, text)
	case amount > maxAmount:
		problem("%s: %s is more than any pool has; write a whole number from 1 to %d", AmountResource, text, maxAmount)
	default:
		req.Amount = amount
	}

	before = len(problems)
	percent, percentText, byPercent := read(PercentResource, "a whole number from 1 to 100")
	if byPercent && len(problems) == before && (percent < 1 || percent > 100) {
		problem("%s: %s is not accepted; write a whole number from 1 to 100", PercentResource, percentText)
	}

	before = len(problems)
	memory, memoryText, byMemory := read(MemoryResource, "a whole number of bytes, such as 8000M")
	switch {
	case !byMemory || len(problems) > before:
	case totalMB <= 0:
		problem("%s: %s cannot be converted, because the memory of the pool's GPUs is not set; write %s, or ask the administrator "+
			"to set TOTAL_GPU_MEMORY (the memory of one GPU in MB)", MemoryResource, memoryText, PercentResource)
	case memory < bytesPerMB:
		problem("%s: %s is less than 1 MB, without a suffix it is counted in bytes; write 1M to %dM", MemoryResource, memoryText, totalMB)
	case moreThan(memory, totalMB):
		problem("%s: %s is more than one GPU of the pool has; write 1M to %dM", MemoryResource, memoryText, totalMB)
	}

	if byPercent && byMemory {
		problem("%s: %s and %s: %s exclude each other; remove one", PercentResource, percentText, MemoryResource, memoryText)
	}
	if q, there, _ := quantity(r, Resource); there {
		problem("%s: %s is derived from the other keys; remove it", Resource, q.String())
	}
	if unknown := unknownKeys(r); len(unknown) > 0 {
		name, more := corev1.ResourceName(unknown[0]), ""
		if n := len(unknown) - 1; n > 0 {
			more = fmt.Sprintf(" (and %d more)", n)
		}
		q, _, _ := quantity(r, name)
		problem("%s: %s%s is not a key of the pool; write %s with %s or %s", short(unknown[0]), q.String(), more, AmountResource,
			PercentResource, MemoryResource)
	}
	if len(problems) > 0 {
		return Request{}, errors.Join(problems...)
	}

	switch {
	case byMemory:
		req.MemoryBytes = memory
		req.Units = memoryUnits(memory, req.Amount, totalMB)
	case byPercent:
		req.Percent = percent
		req.Units = percent * req.Amount
	default:
		req.Percent = 100
		req.Units = 100 * req.Amount
	}
	return req, nil
}

// Asks reports whether the requirements name any resource of the pool that a
// user writes (amount, percent or memory), with whatever value.
func Asks(r corev1.ResourceRequirements) bool {
	for _, key := range []corev1.ResourceName{AmountResource, PercentResource, MemoryResource} {
		if _, ok := r.Requests[key]; ok {
			return true
		}
		if _, ok := r.Limits[key]; ok {
			return true
		}
	}
	return false
}

// quantity returns the value of a key, which limits and requests must agree on
// when both have it.
func quantity(r corev1.ResourceRequirements, key corev1.ResourceName) (q resource.Quantity, there bool, err error) {
	request, requested := r.Requests[key]
	limit, limited := r.Limits[key]
	switch {
	case requested && limited && request.Cmp(limit) != 0:
		return limit, true, fmt.Errorf("%s: %s in requests and %s in limits differ; write the same in both, or in limits only",
			key, request.String(), limit.String())
	case limited:
		return limit, true, nil
	}
	return request, requested, nil
}

func whole(q resource.Quantity) (int64, error) {
	if q.CmpInt64(math.MaxInt64) > 0 || q.CmpInt64(math.MinInt64) < 0 {
		return 0, errors.New("out of range")
	}
	v := q.Value() // rounded up
	if q.CmpInt64(v) != 0 {
		return 0, errors.New("not a whole number")
	}
	return v, nil
}

func unknownKeys(r corev1.ResourceRequirements) []string {
	var names []string
	for _, list := range []corev1.ResourceList{r.Requests, r.Limits} {
		for name := range list {
			switch name {
			case Resource, AmountResource, PercentResource, MemoryResource:
			default:
				if strings.HasPrefix(string(name), Prefix) && !slices.Contains(names, string(name)) {
					names = append(names, string(name))
				}
			}
		}
	}
	slices.Sort(names)
	return names
}

// moreThan reports whether the bytes are more than MB, where neither is
// negative.
func moreThan(memory, totalMB int64) bool {
	whole := memory / bytesPerMB
	return whole > totalMB || whole == totalMB && memory%bytesPerMB > 0
}

// memoryUnits returns ceil(memory x amount x 100 / (totalMB x 10^6)). The
// product may need more than 64 bits; memory is at most totalMB x 10^6, so the
// quotient is at most amount x 100.
func memoryUnits(memory, amount, totalMB int64) int64 {
	if totalMB > math.MaxInt64/bytesPerMB { // an absurd setting, but no wrong answer
		total := new(big.Int).Mul(big.NewInt(totalMB), big.NewInt(bytesPerMB))
		n := new(big.Int).Mul(big.NewInt(memory), big.NewInt(amount*UnitsPerGPU))
		return n.Add(n, total).Sub(n, big.NewInt(1)).Div(n, total).Int64()
	}
	hi, lo := bits.Mul64(uint64(memory), uint64(amount)*UnitsPerGPU) //nolint:gosec // neither is negative
	quotient, rest := bits.Div64(hi, lo, uint64(totalMB)*bytesPerMB) //nolint:gosec // hi is below the divisor, see above
	if rest > 0 {
		quotient++
	}
	return int64(quotient) //nolint:gosec // at most amount x 100
}
