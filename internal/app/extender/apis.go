package extender

import (
	"strconv"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/version"
	"github.com/divvy-gpu/divvy/internal/scheduler/extender"
)

// APIs returns what the extender speaks with others.
func APIs() []version.API {
	return []version.API{
		{Use: version.Serves, Name: "kube-scheduler extender", Versions: []string{extender.APIVersion}},
		{Use: version.Reads, Name: wire.InventoryAnnotation, Versions: []string{strconv.Itoa(wire.InventoryVersion)}},
		{Use: version.Writes, Name: wire.GrantAnnotation, Versions: wire.GrantVersions()},
	}
}
