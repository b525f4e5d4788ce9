package nodeagent

import (
	"fmt"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/backend"
)

// specsOf returns the CDI specifications of the devices, by kind. Every
// device's name is defined with its device nodes alone; the environment names
// all devices of a container together and travels in kubelet's answer.
func specsOf(b backend.Backend, shares []accel.Share) map[string]*cdiSpec {
	specs := map[string]*cdiSpec{}
	for _, s := range shares {
		edits, err := b.Edits(s.ID)
		if err != nil {
			continue // away since before this program started: nobody gets it
		}
		for _, name := range edits.CDIDevices {
			spec := specs[name.Kind]
			if spec == nil {
				spec = &cdiSpec{Version: cdiVersion, Kind: name.Kind}
				specs[name.Kind] = spec
			}
			spec.Devices = append(spec.Devices, cdiDevice(name.Name, edits.DeviceNodes))
		}
	}
	return specs
}

// writeCDI writes the specifications into dir, one file per kind.
func writeCDI(dir string, specs map[string]*cdiSpec) error {
	registry, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		return fmt.Errorf("open the CDI folder %s: %w", dir, err)
	}
	for kind, spec := range specs {
		if err := registry.WriteSpec(spec, "divvy-"+strings.ReplaceAll(kind, "/", "-")); err != nil {
			return fmt.Errorf("write the CDI specification of %s: %w", kind, err)
		}
	}
	return nil
}

type cdiSpec = specs.Spec

// cdiVersion is the oldest version of the specification that has all that is
// used, so that older runtimes read it.
const cdiVersion = "0.5.0"

func cdiDevice(name string, nodes []backend.DeviceNode) specs.Device {
	d := specs.Device{Name: name}
	for _, n := range nodes {
		d.ContainerEdits.DeviceNodes = append(d.ContainerEdits.DeviceNodes, &specs.DeviceNode{
			Path: n.Path, HostPath: n.HostPath, Permissions: n.Permissions,
		})
	}
	return d
}
