package wire

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// FuzzDecodeInventory: garbage is a *SyntaxError; what is read can be written,
// and reads and writes the same from then on.
func FuzzDecodeInventory(f *testing.F) {
	s, err := EncodeInventory(twoCards())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(s)
	f.Add(strings.ReplaceAll(s, "U53000090104", "U53000090105"))
	f.Add(`{"v":1,"resources":null}`)
	f.Add(`{"v":1,"resources":[{"resource":"r","devices":[{"index":1,"id":"x"},{"id":"y","units":1099511627776,"numa":3}]},` +
		`{"resource":"a"}]}`)
	f.Add("{\"v\":1,\"resources\":[{\"resource\":\"\xff\",\"devices\":[{\"id\":\"\\ud800\"}]}]}")
	f.Add(`[[[[`)
	f.Add(`{"v":1,"resources":[{"resource":"r","devices":[{"index":1,"id":"x","unhealthy":true,` +
		`"quarantined":"2026-07-01T10:00:00.5+02:00"}]}]}`)
	f.Add(`{"v":1,"resources":[{"resource":"r","devices":[{"index":1,"id":"x","quarantined":"0000-01-01T00:00:00+23:00"}]}]}`)
	f.Add(`{"v":1,"resources":[{"resource":"r","devices":[{"index":1,"id":"x","units":16,"withheld":16},{"id":"y","units":1}]}]}`)
	f.Add(`{"v":1,"resources":[{"resource":"r","devices":[{"index":1,"id":"x","units":16,"withheld":17}]}]}`)
	f.Add(`{"v":1,"resources":[{"resource":"r","devices":[{"index":1,"id":"x","tier":"driver","compute":"driver","backend":"dmem",` +
		`"attested":"2026-07-01T10:00:00.5+02:00"}]}]}`)
	f.Add(`{"v":1,"resources":[{"resource":"r","devices":[{"index":1,"id":"x","tier":"hardware","compute":"hardware","backend":"mig"},` +
		`{"id":"y","tier":"none","compute":"none","backend":"\xff"},{"index":2,"id":"z","tier":"vault","compute":"cooperative",` +
		`"attested":"0000-01-01T00:00:00+23:00"}]}]}`)
	f.Fuzz(func(t *testing.T, s string) {
		inv, err := DecodeInventory(s)
		if err != nil {
			if se := (*SyntaxError)(nil); !errors.As(err, &se) {
				t.Fatalf("error %T %v, want a *SyntaxError", err, err)
			}
			return
		}
		text, err := EncodeInventory(inv)
		if err != nil {
			// Escaping may make a value longer than what is read.
			if !strings.Contains(err.Error(), "at most") {
				t.Fatalf("decoded, but not encoded again: %v", err)
			}
			return
		}
		again, err := DecodeInventory(text)
		if err != nil || !reflect.DeepEqual(inv, again) {
			t.Fatalf("round trip: %+v became %+v, %v", inv, again, err)
		}
		if text2, err := EncodeInventory(again); err != nil || text2 != text {
			t.Fatalf("round trip: %q became %q, %v", text, text2, err)
		}
	})
}

// FuzzDecodeGrant: nothing counts that the signer did not write, and no
// garbage does harm.
func FuzzDecodeGrant(f *testing.F) {
	s := signer(f, testKey())
	v, err := s.EncodeGrant(podUID, guideGrant())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(v)
	several, err := s.EncodeGrant(podUID, severalGrant())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(several)
	f.Add(strings.Replace(several, `"v":2`, `"v":1`, 1))
	f.Add(strings.Replace(v, `"index":1`, `"index":0`, 1))
	f.Add(strings.Replace(v, `"units":12`, `"units":1,"units":12`, 1))
	f.Add(`{"v":1,"at":"0001-01-01T00:00:00+23:59"}`)
	f.Add("null")
	f.Fuzz(func(t *testing.T, value string) {
		g, err := s.DecodeGrant(podUID, value)
		shown, errShown := DecodeGrantUnverified(value)
		switch {
		case err == nil:
			// The same key signed the same meaning, however it is written.
			if errShown != nil || !reflect.DeepEqual(shown, g) {
				t.Fatalf("verified %+v, unverified %+v, %v", g, shown, errShown)
			}
			if !reflect.DeepEqual(g, guideGrant()) && !reflect.DeepEqual(g, severalGrant()) {
				t.Fatalf("a grant that was never signed counts: %+v", g)
			}
		case errors.Is(err, ErrSignature):
			if errShown != nil {
				t.Fatalf("the unverified reading failed: %v", errShown)
			}
			// What could be read can be signed, unless it is too long then.
			again, err := s.EncodeGrant(podUID, shown)
			if err != nil {
				if !strings.Contains(err.Error(), "at most") {
					t.Fatalf("read, but not written again: %v", err)
				}
				return
			}
			if back, err := s.DecodeGrant(podUID, again); err != nil || !reflect.DeepEqual(back, shown) {
				t.Fatalf("round trip: %+v became %+v, %v", shown, back, err)
			}
		default:
			if se := (*SyntaxError)(nil); !errors.As(err, &se) {
				t.Fatalf("error %T %v, want a *SyntaxError or ErrSignature", err, err)
			}
		}
	})
}

// FuzzGrantRoundTrip: whatever is accepted for writing reads back equal, for
// this pod and for no other.
func FuzzGrantRoundTrip(f *testing.F) {
	f.Add(podUID, string(gcuMemory), "node", "GCU-1", 1, int64(16), int64(12), int64(1662453232515055293), false)
	f.Add("u", "r", "\xff", "<&>\u2028", 0, int64(-1), int64(0), int64(-1), true)
	f.Fuzz(func(t *testing.T, uid, resource, node, device string, index int, total, units, ns int64, confirmed bool) {
		s := signer(t, testKey())
		g := accel.Grant{
			Resource: accel.Resource(resource), Node: node, Device: accel.DeviceID(device), Index: index,
			DeviceUnits: accel.Units(total), Units: accel.Units(units), At: time.Unix(0, ns).UTC(), Confirmed: confirmed,
		}
		v, err := s.EncodeGrant(uid, g)
		if err != nil {
			return // refused with a reason, see TestEncodeGrantRefused
		}
		if back, err := s.DecodeGrant(uid, v); err != nil || !reflect.DeepEqual(back, g) {
			t.Fatalf("round trip: %+v became %+v, %v", g, back, err)
		}
		if _, err := s.DecodeGrant(uid+"x", v); !errors.Is(err, ErrSignature) {
			t.Fatalf("another pod's grant: error %v, want ErrSignature", err)
		}
	})
}
