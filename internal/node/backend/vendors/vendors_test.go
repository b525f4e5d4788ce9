package vendors_test

import (
	"slices"
	"testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
)

func TestAll(t *testing.T) {
	all := vendors.All()
	if names := accel.VendorNames(); !slices.Equal(vendors.Names(), names) || !slices.IsSorted(names) {
		t.Errorf("vendors are %q, and %q in the table; both must be in the order of their names", vendors.Names(), names)
	}
	for _, v := range all {
		b, err := vendors.New(v.Name, backend.Options{})
		if err != nil {
			t.Errorf("New(%q): %v", v.Name, err)
			continue
		}
		if b.Vendor() != v.Name {
			t.Errorf("the backend of %q calls itself %q", v.Name, b.Vendor())
		}
		if err := b.Close(); err != nil {
			t.Errorf("close the backend of %q: %v", v.Name, err)
		}
	}
}

func TestNewErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		vendor  string
		options backend.Options
		want    string
	}{
		"unknown vendor": {"acme", backend.Options{}, `unknown vendor "acme", known are: enflame, iluvatar, nvidia`},
		"relative root": {
			"enflame", backend.Options{DriverRoot: "host", LibraryPath: "libefml.so"},
			"enflame: driver root \"host\" is not an absolute path\nlibrary path \"libefml.so\" is not an absolute path",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := vendors.New(tt.vendor, tt.options); err == nil || err.Error() != tt.want {
				t.Errorf("error is %v, want %s", err, tt.want)
			}
		})
	}
}
