package nvidia

import (
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

// The binding panics if a list grows between two calls of the library.
func TestListThatGrows(t *testing.T) {
	growing := func(times int) func() ([]int, nvml.Return) {
		return func() ([]int, nvml.Return) {
			times--
			switch {
			case times < 0:
				return []int{1}, nvml.SUCCESS
			case times%2 == 0:
				return nil, nvml.ERROR_INSUFFICIENT_SIZE
			}
			return make([]int, 1)[:2+times], nvml.SUCCESS
		}
	}
	for times, want := range []nvml.Return{
		0: nvml.SUCCESS, 1: nvml.SUCCESS, sizedTries - 1: nvml.SUCCESS, sizedTries: nvml.ERROR_INSUFFICIENT_SIZE,
	} {
		list, code := sized(growing(times))
		if code != want || (code == nvml.SUCCESS) != (len(list) == 1) {
			t.Errorf("a list that grows %d times: %v, %v; want %v", times, list, code, want)
		}
	}
	if _, code := sized(func() ([]int, nvml.Return) { return nil, nvml.ERROR_UNKNOWN }); code != nvml.ERROR_UNKNOWN {
		t.Errorf("a function that fails: %v", code)
	}
}

func TestUtilizationOfSamples(t *testing.T) {
	type sample = nvml.ProcessUtilizationSample
	start := time.Now()
	before := utilization{of: map[uint32]float64{1: 0.5}, last: 100, read: start}
	for name, tt := range map[string]struct {
		samples []sample
		after   time.Duration
		want    utilization
	}{
		"several of a process": {
			[]sample{{Pid: 2, TimeStamp: 120, SmUtil: 100}, {Pid: 3, TimeStamp: 110, SmUtil: 1}, {Pid: 2, TimeStamp: 130, SmUtil: 50}},
			time.Minute, utilization{of: map[uint32]float64{2: 0.75, 3: 0.01}, last: 130, read: start.Add(time.Minute)},
		},
		"old ones and impossible ones": {
			[]sample{{Pid: 1, TimeStamp: 100, SmUtil: 10}, {Pid: 2, TimeStamp: 120, SmUtil: 101}, {Pid: 3, TimeStamp: 110, SmUtil: 0}},
			time.Millisecond, utilization{of: map[uint32]float64{3: 0}, last: 110, read: start.Add(time.Millisecond)},
		},
		"none yet": {nil, samplePeriod - 1, before},
		"none any more": {
			[]sample{{Pid: 1, TimeStamp: 100, SmUtil: 10}}, samplePeriod,
			utilization{of: map[uint32]float64{}, last: 100, read: start.Add(samplePeriod)},
		},
	} {
		got := before.next(tt.samples, start.Add(tt.after))
		if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(utilization{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
