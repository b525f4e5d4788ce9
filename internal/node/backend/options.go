package backend

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// Complete returns o with the defaults filled in, for New of a vendor. Its
// error tells all that is wrong, a line each.
func (o Options) Complete() (Options, error) {
	if o.DriverRoot == "" {
		o.DriverRoot = "/"
	}
	if o.HostDriverRoot == "" {
		o.HostDriverRoot = "/"
	}
	if o.HostRoot == "" {
		o.HostRoot = "/"
	}
	if o.SysfsRoot == "" {
		o.SysfsRoot = filepath.Join(o.DriverRoot, "sys")
	}
	if o.ProcRoot == "" {
		o.ProcRoot = filepath.Join(o.DriverRoot, "proc")
	}
	if o.DevRoot == "" {
		o.DevRoot = o.DriverRoot
	}
	if o.MIG == "" {
		o.MIG = MIGNone
	}
	if o.CallTimeout == 0 {
		o.CallTimeout = DefaultCallTimeout
	}
	if o.CDI.Timeout == 0 {
		o.CDI.Timeout = DefaultCDITimeout
	}
	var errs []error
	for _, p := range []struct{ what, path string }{
		{"driver root", o.DriverRoot},
		{"host driver root", o.HostDriverRoot},
		{"host root", o.HostRoot},
		{"library path", o.LibraryPath},
		{"CDI hook path", o.CDI.HookPath},
	} {
		if p.path != "" && !filepath.IsAbs(p.path) {
			errs = append(errs, fmt.Errorf("%s %q is not an absolute path", p.what, p.path))
		}
	}
	if len(errs) == 0 {
		for _, p := range []struct{ what, path string }{
			{"sysfs root", o.SysfsRoot}, {"proc root", o.ProcRoot}, {"dev root", o.DevRoot},
		} {
			if !filepath.IsAbs(p.path) {
				errs = append(errs, fmt.Errorf("%s %q is not an absolute path", p.what, p.path))
			}
		}
	}
	if !slices.Contains([]string{MIGNone, MIGSingle, MIGMixed}, o.MIG) {
		errs = append(errs, fmt.Errorf("MIG strategy %q is not known; use one of %s, %s, %s", o.MIG, MIGNone, MIGSingle, MIGMixed))
	}
	if o.CallTimeout < 0 {
		errs = append(errs, fmt.Errorf("call timeout %v is negative", o.CallTimeout))
	}
	return o, errors.Join(errs...)
}

// DeviceRoot returns the folder whose dev has the device nodes, as this process sees it and
// as the host does. That of a driver whose root has no dev, as on GKE, is the host's own;
// NVIDIA's plugin has the same rule. It looks each time, for a driver can come later.
func (o Options) DeviceRoot() (seen, host string) {
	seen, host = cmp.Or(o.DevRoot, o.DriverRoot, "/"), cmp.Or(o.HostDriverRoot, "/")
	if seen != cmp.Or(o.DriverRoot, "/") || host == "/" {
		return seen, host
	}
	if info, err := os.Stat(filepath.Join(seen, "dev")); err == nil && info.IsDir() {
		return seen, host
	}
	return cmp.Or(o.HostRoot, "/"), "/"
}
