package links

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend/devicelist"
)

func devices(ids ...accel.DeviceID) []*devicelist.Device {
	var out []*devicelist.Device
	for i, id := range ids {
		out = append(out, &devicelist.Device{Device: accel.Device{Index: i, ID: id}})
	}
	return out
}

func TestBetween(t *testing.T) {
	scores := map[Pair]int{{"a", "b"}: 10, {"b", "c"}: 20}
	got, err := Between(devices("c", "a", "b"), func(one, two *devicelist.Device) (int, error) {
		return scores[Pair{one.ID, two.ID}], nil
	})
	want := []accel.Link{{A: "a", B: "b", Score: 10}, {A: "b", B: "c", Score: 20}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("error %v, links (-want +got):\n%s", err, diff)
	}
	hung := errors.New("hung")
	asked := 0
	_, err = Between(devices("a", "b", "c"), func(_, _ *devicelist.Device) (int, error) { asked++; return 0, hung })
	if !errors.Is(err, hung) || asked != 1 {
		t.Errorf("error %v after %d questions, want the first one's", err, asked)
	}
}

func TestMemo(t *testing.T) {
	var m Memo[string, int]
	asked := 0
	get := func(answer int, known bool, fails error) (int, error) {
		return m.Get("k", func() (int, bool, error) { asked++; return answer, known, fails })
	}
	want := func(got int, err error) func(value, questions int) {
		return func(value, questions int) {
			t.Helper()
			if got != value || err != nil || asked != questions {
				t.Errorf("answer %d, %v after %d questions; want %d after %d", got, err, asked, value, questions)
			}
		}
	}
	d := devices("a", "b")
	m.For(Slots(d))
	want(get(1, false, nil))(1, 1) // used, and asked for again
	if _, err := get(0, true, errors.New("hung")); err == nil {
		t.Error("an error got lost")
	}
	want(get(2, true, nil))(2, 3)
	want(get(3, true, nil))(2, 3)
	m.For(Slots(devices("b", "a"))) // under other numbers, in the same slots
	want(get(3, true, nil))(2, 3)
	d[1].PCI = "0000:10:00.0"
	m.For(Slots(d))
	want(get(4, true, nil))(4, 4)
}
