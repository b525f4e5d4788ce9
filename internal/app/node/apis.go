package node

import (
	"path"
	"strconv"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/node/deviceplugin"
	"github.com/divvy-gpu/divvy/internal/node/podresources"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

func apis() []version.API {
	return []version.API{
		{Use: version.Serves, Name: "kubelet device plugin", Versions: []string{deviceplugin.APIVersion}},
		{Use: version.Calls, Name: "kubelet pod resources", Versions: []string{podresources.APIVersion}},
		{Use: version.Reads, Name: path.Dir(v1alpha1.APIVersion), Versions: []string{path.Base(v1alpha1.APIVersion)}},
		{Use: version.Reads, Name: wire.GrantAnnotation, Versions: wire.GrantVersions()},
		{Use: version.Writes, Name: wire.InventoryAnnotation, Versions: []string{strconv.Itoa(wire.InventoryVersion)}},
		{Use: version.Writes, Name: "Container Device Interface", Versions: []string{agent.CDIVersion}},
	}
}
