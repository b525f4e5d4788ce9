package wire

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

func twoQuarantined() QuarantineStatus {
	at := time.Date(2026, 7, 1, 10, 0, 0, 0, time.UTC)
	return QuarantineStatus{
		Devices: []accel.Quarantine{
			{Device: "GPU-b", Vendor: "nvidia", Index: 1, Cause: "xid-79", Reason: "critical error XID 79", Since: at},
			{Device: "GPU-a", Vendor: "nvidia", Cause: accel.CauseAdministrator, Reason: "fan", Since: at.Add(time.Minute)},
		},
		Answered: RequestAnswer{ID: "7", Error: "no such device", Warning: "not saved"},
	}
}

func TestQuarantineThereAndBack(t *testing.T) {
	for name, want := range map[string]QuarantineStatus{
		"nothing": {}, "two and an answer": twoQuarantined(), "an answer alone": {Answered: RequestAnswer{ID: "7"}},
	} {
		text, err := EncodeQuarantine(want)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		got, err := DecodeQuarantine(text)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
	}
	const want = `{"v":1,"devices":[` +
		`{"device":"GPU-b","vendor":"nvidia","index":1,"cause":"xid-79","reason":"critical error XID 79","since":"2026-07-01T10:00:00Z"},` +
		`{"device":"GPU-a","vendor":"nvidia","index":0,"cause":"administrator","reason":"fan","since":"2026-07-01T10:01:00Z"}],` +
		`"answered":{"id":"7","error":"no such device","warning":"not saved"}}`
	q := twoQuarantined()
	q.Devices[0], q.Devices[1] = q.Devices[1], q.Devices[0]
	if got, err := EncodeQuarantine(q); got != want || err != nil {
		t.Errorf("%v\n%s\nwant\n%s", err, got, want)
	}
}

func TestBadQuarantine(t *testing.T) {
	many := make([]string, MaxQuarantined+1)
	for i := range many {
		many[i] = fmt.Sprintf(`{"device":"%d","since":"2026-07-01T10:00:00Z"}`, i)
	}
	for text, want := range map[string]string{
		`x`:                      "invalid character",
		`{"v":2}`:                "version 2 was written by a newer release",
		`{"v":1,"devices":[{}]}`: `the device "" is empty`,
		`{"v":1,"devices":[{"device":"a","since":"yesterday"}]}`:                                 "yesterday",
		`{"v":1,"devices":[{"device":"a"},{"device":"a"}]}`:                                      "listed twice",
		`{"v":1,"devices":[` + strings.Join(many, ",") + `]}`:                                    "257 devices, at most 256",
		`{"v":1,"devices":[{"device":"a","reason":"` + strings.Repeat("r", MaxReason+1) + `"}]}`: "longer than 256 bytes",
		`{"v":1,"answered":{"id":"` + strings.Repeat("i", maxRequestID+1) + `"}}`:                "too long",
		`{"v":1,"devices":[{"device":"` + strings.Repeat("x", maxQuarantineBytes) + `"}]}`:       "at most 196608 are read",
	} {
		_, err := DecodeQuarantine(text)
		if se := (*SyntaxError)(nil); !errors.As(err, &se) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: %v, want a *SyntaxError with %q", text, err, want)
		}
	}
}

func TestDeviceRequest(t *testing.T) {
	want := DeviceRequest{ID: "7", Verb: QuarantineDevices, Devices: []accel.DeviceID{"a", "b"}, Reason: "fan"}
	text, err := EncodeDeviceRequest(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := DecodeDeviceRequest(text)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	for text, want := range map[string]struct{ text, id string }{
		`true`:                              {"a JSON bool where an object is expected", ""},
		`{"v":9,"id":"7"}`:                  {"version 9 was written by a newer release", "7"},
		`{"v":1,"id":"7","verb":"release"}`: {"no device is named", "7"},
		`{"v":1,"id":"7","verb":"destroy","devices":["a"]}`: {`the verb "destroy" is neither ` +
			`quarantine nor release`, "7"},
		`{"v":1,"verb":"release","devices":["a"]}`:                                                      {`the id "" is empty`, ""},
		`{"v":1,"id":"7","verb":"release","devices":["a","a"]}`:                                         {"listed twice", "7"},
		`{"v":1,"id":"` + strings.Repeat("7", 65) + `","verb":"release","devices":["a"]}`:               {"longer than 64 bytes", ""},
		`{"v":1,"id":"7","verb":"release","devices":["a"],"reason":"` + strings.Repeat("r", 257) + `"}`: {"the reason is", "7"},
	} {
		r, err := DecodeDeviceRequest(text)
		if se := (*SyntaxError)(nil); !errors.As(err, &se) || !strings.Contains(err.Error(), want.text) || r.ID != want.id {
			t.Errorf("%.80s: id %q, %v, want id %q and a *SyntaxError with %q", text, r.ID, err, want.id, want.text)
		}
	}
	if _, err := EncodeDeviceRequest(DeviceRequest{ID: "7", Verb: ReleaseDevices}); err == nil {
		t.Error("a request about no device was encoded")
	}
}

// FuzzDecodeQuarantine: garbage is a *SyntaxError; what is read can be written, and
// reads the same from then on. So are requests.
func FuzzDecodeQuarantine(f *testing.F) {
	s, err := EncodeQuarantine(twoQuarantined())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(s)
	f.Add(`{"v":1,"id":"7","verb":"release","devices":["a","b"],"reason":"fan"}`)
	f.Add(`{"v":1,"devices":[{"device":"a","since":"0000-01-01T00:00:00+23:00"}]}`)
	f.Fuzz(func(t *testing.T, s string) {
		check := func(err error) bool {
			if se := (*SyntaxError)(nil); err != nil && !errors.As(err, &se) {
				t.Fatalf("error %T %v, want a *SyntaxError", err, err)
			}
			return err == nil
		}
		if q, err := DecodeQuarantine(s); check(err) {
			text, err := EncodeQuarantine(q)
			if err != nil {
				if !strings.Contains(err.Error(), "at most") { // escaping makes it longer
					t.Fatalf("decoded, but not encoded again: %v", err)
				}
				return
			}
			again, err := DecodeQuarantine(text)
			if err != nil || len(q.Devices) != len(again.Devices) || q.Answered != again.Answered {
				t.Fatalf("round trip: %+v became %+v, %v", q, again, err)
			}
		}
		if r, err := DecodeDeviceRequest(s); check(err) {
			text, err := EncodeDeviceRequest(r)
			if err != nil {
				if !strings.Contains(err.Error(), "at most") {
					t.Fatalf("decoded, but not encoded again: %v", err)
				}
				return
			}
			if again, err := DecodeDeviceRequest(text); err != nil || !reflect.DeepEqual(r, again) {
				t.Fatalf("round trip: %+v became %+v, %v", r, again, err)
			}
		}
	})
}
