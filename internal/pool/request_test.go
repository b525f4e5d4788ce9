package pool

import (
	"errors"
	"math"
	"math/big"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// exactUnits is ceil(memory x amount x 100 / (totalMB x 10^6)), slowly.
func exactUnits(memory, amount, totalMB int64) int64 {
	n := new(big.Int).Mul(big.NewInt(memory), big.NewInt(amount))
	n.Mul(n, big.NewInt(100))
	total := new(big.Int).Mul(big.NewInt(totalMB), big.NewInt(1_000_000))
	quotient, rest := n.QuoRem(n, total, new(big.Int))
	if rest.Sign() > 0 {
		quotient.Add(quotient, big.NewInt(1))
	}
	return quotient.Int64()
}

// Guards W17: floating point gave a unit too many for some.
func TestUnitsOfEveryWholeMBAreExact(t *testing.T) {
	const totalMB = 16000
	for mb := int64(1); mb <= totalMB; mb++ {
		for amount := int64(1); amount <= 8; amount++ {
			list := corev1.ResourceList{
				AmountResource: *resource.NewQuantity(amount, resource.DecimalSI),
				MemoryResource: *resource.NewQuantity(mb*1_000_000, resource.DecimalSI),
			}
			r, err := ParseRequest(corev1.ResourceRequirements{Limits: list, Requests: list}, totalMB)
			if err != nil {
				t.Fatalf("%d x %dM: %v", amount, mb, err)
			}
			want := Request{Amount: amount, MemoryBytes: mb * 1_000_000, Units: exactUnits(mb*1_000_000, amount, totalMB)}
			if r != want {
				t.Fatalf("%d x %dM: %+v, want %+v", amount, mb, r, want)
			}
		}
	}
}

// Guards W17 and W18: units come from the exact bytes, and so does nothing for
// free.
func TestUnitsOfValuesThatWereCountedWrong(t *testing.T) {
	tests := []struct {
		memory string
		amount string
		units  int64
	}{
		{"1120M", "1", 7}, {"2240M", "1", 14}, {"4480M", "1", 28}, {"8800M", "1", 55}, // W17: 8, 15, 29, 56
		{"1120000001", "1", 8}, {"8000M", "1", 50}, {"8000000001", "1", 51}, {"160000000", "1", 1}, {"160000001", "1", 2}, // W18
		{"5Gi", "3", 101}, {"1Mi", "1", 1}, {"16000M", "8", 800}, {"1e9", "1", 7},
	}
	for _, tt := range tests {
		r, err := ParseRequest(limits("amount", tt.amount, "memory", tt.memory), 16000)
		if err != nil || r.Units != tt.units {
			t.Errorf("%s x %s: %d units and %v, want %d", tt.amount, tt.memory, r.Units, err, tt.units)
		}
	}
}

func TestUnitsOfLargeNumbers(t *testing.T) {
	const most = math.MaxInt64
	for _, totalMB := range []int64{1, 2, 3, 16160, 1 << 40, most / 1_000_000, most/1_000_000 + 1, most} {
		for _, memory := range []int64{1_000_000, 1_000_001, 1_999_999, 16_160_000_000, most/100 + 1, most - 1, most} {
			if moreThan(memory, totalMB) {
				continue
			}
			for _, amount := range []int64{1, 7, maxAmount} {
				if got, want := memoryUnits(memory, amount, totalMB), exactUnits(memory, amount, totalMB); got != want {
					t.Errorf("%d x %d of %d MB: %d units, want %d", amount, memory, totalMB, got, want)
				}
			}
		}
	}
}

func TestMoreThan(t *testing.T) {
	for _, tt := range []struct {
		memory, totalMB int64
		want            bool
	}{
		{16_000_000_000, 16000, false}, {16_000_000_001, 16000, true}, {15_999_999_999, 16000, false},
		{math.MaxInt64, math.MaxInt64, false}, {math.MaxInt64, 1, true},
	} {
		if got := moreThan(tt.memory, tt.totalMB); got != tt.want {
			t.Errorf("%d bytes and %d MB: %v", tt.memory, tt.totalMB, got)
		}
	}
}

func TestPercentTimesAmount(t *testing.T) {
	for percent := int64(1); percent <= 100; percent++ {
		list := corev1.ResourceList{
			AmountResource:  resource.MustParse("3"),
			PercentResource: *resource.NewQuantity(percent, resource.DecimalSI),
		}
		r, err := ParseRequest(corev1.ResourceRequirements{Limits: list}, 0)
		if want := (Request{Amount: 3, Percent: percent, Units: 3 * percent}); err != nil || r != want {
			t.Errorf("%d percent: %+v and %v, want %+v", percent, r, err, want)
		}
	}
}

func TestQuantitiesThatAreWhole(t *testing.T) {
	for _, amount := range []string{"2", "2000m", "0.2e1", "2e0"} {
		if r, err := ParseRequest(limits("amount", amount), 0); err != nil || r.Amount != 2 {
			t.Errorf("%s: %+v and %v, want 2 GPUs", amount, r, err)
		}
	}
	if r, err := ParseRequest(limits("amount", "1k"), 0); err != nil || r.Amount != 1000 || r.Units != 100_000 { // W19
		t.Errorf("1k: %+v and %v, want 1000 GPUs", r, err)
	}
}

func TestNothingAsked(t *testing.T) {
	for name, r := range map[string]corev1.ResourceRequirements{
		"nothing":      {},
		"other things": {Limits: corev1.ResourceList{"cpu": resource.MustParse("1"), "nvidia.com/gpu": resource.MustParse("1")}},
		"converted":    {Limits: corev1.ResourceList{Resource: resource.MustParse("50")}},
	} {
		if _, err := ParseRequest(r, 16000); !errors.Is(err, ErrNoRequest) || Asks(r) {
			t.Errorf("%s: %v, asks: %v", name, err, Asks(r))
		}
	}
	for _, key := range []corev1.ResourceName{AmountResource, PercentResource, MemoryResource} {
		list := corev1.ResourceList{key: {}}
		if !Asks(corev1.ResourceRequirements{Limits: list}) || !Asks(corev1.ResourceRequirements{Requests: list}) {
			t.Errorf("%s is not seen", key)
		}
	}
}

// Guards W20 and V5: all problems at once, each with key, value and what would be
// accepted.
func TestAllProblemsOfARequestAreTold(t *testing.T) {
	r := limits("amount", "1500m", "percent", "101", "memory", "17G", "num", "3")
	r.Limits[Resource] = resource.MustParse("50")
	r.Requests[PercentResource] = resource.MustParse("7")
	_, err := ParseRequest(r, 16000)
	var joined interface{ Unwrap() []error }
	if !errors.As(err, &joined) {
		t.Fatalf("the problems of %v are not apart", err)
	}
	want := []string{
		"bitfusion.io/gpu-amount: 1500m is not a whole number; write a whole number of GPUs, 1 or more",
		"bitfusion.io/gpu-percent: 7 in requests and 101 in limits differ; write the same in both, or in limits only",
		"bitfusion.io/gpu-memory: 17G is more than one GPU of the pool has; write 1M to 16000M",
		"bitfusion.io/gpu-percent: 101 and bitfusion.io/gpu-memory: 17G exclude each other; remove one",
		"bitfusion.io/gpu: 50 is derived from the other keys; remove it",
		"bitfusion.io/gpu-num: 3 is not a key of the pool; write bitfusion.io/gpu-amount with bitfusion.io/gpu-percent or " +
			"bitfusion.io/gpu-memory",
	}
	if got := err.Error(); got != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
}

func TestNumbersThatNothingHolds(t *testing.T) {
	for _, tt := range []struct{ key, value, says string }{
		{"amount", "1000001", "more than any pool has"},
		{"amount", "10E", "out of range"},
		{"amount", "-10E", "out of range"},
		{"percent", "100001m", "not a whole number"},
		{"percent", "-1", "write a whole number from 1 to 100"},
		{"memory", "100m", "not a whole number"},
		{"memory", "1n", "not a whole number"},
		{"memory", "-4G", "less than 1 MB"},
		{"memory", "900E", "out of range"},
	} {
		r := limits("amount", "1")
		r.Limits[corev1.ResourceName("bitfusion.io/gpu-"+tt.key)] = resource.MustParse(tt.value)
		r.Requests = nil
		_, err := ParseRequest(r, 16000)
		if err == nil || !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), "bitfusion.io/gpu-"+tt.key) {
			t.Errorf("%s %s: %v, want %q", tt.key, tt.value, err, tt.says)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add("1", "50", "", int64(16000))
	f.Add("1", "", "8000M", int64(16000))
	f.Add("1500m", "1n", "900E", int64(-5))
	f.Add("9223372036854775807", "", "9223372036854775807", int64(math.MaxInt64))
	f.Fuzz(func(t *testing.T, amount, percent, memory string, totalMB int64) {
		list := corev1.ResourceList{}
		for key, text := range map[corev1.ResourceName]string{AmountResource: amount, PercentResource: percent, MemoryResource: memory} {
			if q, err := resource.ParseQuantity(text); err == nil {
				list[key] = q
			}
		}
		r, err := ParseRequest(corev1.ResourceRequirements{Limits: list, Requests: list}, totalMB)
		if err != nil {
			return
		}
		switch {
		case r.Amount < 1, r.Units < 1, r.Units > 100*r.Amount, (r.Percent == 0) == (r.MemoryBytes == 0):
			t.Errorf("%+v", r)
		case r.MemoryBytes > 0 && r.Units != exactUnits(r.MemoryBytes, r.Amount, totalMB):
			t.Errorf("%+v, want %d units", r, exactUnits(r.MemoryBytes, r.Amount, totalMB))
		}
	})
}
