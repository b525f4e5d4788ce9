package agent

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/backend"
)

// injector puts what a container needs to reach its devices into the form of
// kubelet's answer, in the ways that the configuration names.
type injector struct {
	ways []config.Injection
	// annotation is the key under which CDI names travel, for cdiAnnotations.
	annotation string
}

// newInjector returns the injector of a vendor's resource.
func newInjector(c *config.NodeConfig, vendor string, resource accel.Resource) (injector, error) {
	ways := c.Vendors[vendor].Injection
	if len(ways) == 0 {
		ways = []config.Injection{c.Injection}
	}
	in := injector{ways: ways}
	if in.uses(config.InjectCDIAnnotations) {
		key, err := cdi.AnnotationKey("divvy", string(resource))
		if err != nil {
			return injector{}, fmt.Errorf("resource %s: injection %s: %w", resource, config.InjectCDIAnnotations, err)
		}
		in.annotation = key
	}
	return in, nil
}

func (in injector) uses(way config.Injection) bool { return slices.Contains(in.ways, way) }

// cdi reports whether containers are given names of CDI devices.
func (in injector) cdi() bool {
	return in.uses(config.InjectCDI) || in.uses(config.InjectCDIAnnotations)
}

// onlyCDI reports whether containers get devices by CDI or not at all.
func (in injector) onlyCDI() bool {
	return !slices.ContainsFunc(in.ways, func(way config.Injection) bool {
		return way != config.InjectCDI && way != config.InjectCDIAnnotations
	})
}

// check returns why the vendor's devices cannot be reached in the configured
// ways, given the edits of any of them.
func (in injector) check(vendor string, e backend.Edits) error {
	if in.uses(config.InjectVolumeMounts) && e.ByMounts == nil {
		return fmt.Errorf("injection %q is not possible for %s devices: their runtime reads no mounts", config.InjectVolumeMounts, vendor)
	}
	return nil
}

// answer is what a container gets that has been given these edits. ids are the
// unit ids for the variables of Edits.ReplicaEnv, none for resources whose ids
// mean nothing to the vendor's software.
func (in injector) answer(e backend.Edits, ids []string) *pluginapi.ContainerAllocateResponse {
	out := &pluginapi.ContainerAllocateResponse{Envs: maps.Clone(e.Env)}
	if out.Envs == nil {
		out.Envs = map[string]string{}
	}
	if len(ids) > 0 {
		for _, name := range e.ReplicaEnv {
			out.Envs[name] = strings.Join(ids, ",")
		}
	}
	if in.uses(config.InjectVolumeMounts) && e.ByMounts != nil {
		maps.Copy(out.Envs, e.ByMounts.Env)
		for _, m := range e.ByMounts.Mounts {
			out.Mounts = append(out.Mounts, &pluginapi.Mount{ContainerPath: m.Path, HostPath: m.HostPath, ReadOnly: m.ReadOnly})
		}
	}
	if in.uses(config.InjectDeviceNodes) {
		for _, n := range e.DeviceNodes {
			out.Devices = append(out.Devices, &pluginapi.DeviceSpec{ContainerPath: n.Path, HostPath: n.HostPath,
				Permissions: n.Permissions})
		}
	}
	var names []string
	for _, d := range e.CDIDevices {
		names = append(names, d.String())
	}
	if in.uses(config.InjectCDI) {
		for _, name := range names {
			out.CdiDevices = append(out.CdiDevices, &pluginapi.CDIDevice{Name: name})
		}
	}
	if in.uses(config.InjectCDIAnnotations) && len(names) > 0 {
		out.Annotations = map[string]string{in.annotation: strings.Join(names, ",")}
	}
	return out
}
