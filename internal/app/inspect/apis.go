package inspect

import (
	"strconv"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// APIs returns what the command reads.
func APIs() []version.API {
	return []version.API{
		{Use: version.Reads, Name: wire.InventoryAnnotation, Versions: []string{strconv.Itoa(wire.InventoryVersion)}},
		{Use: version.Reads, Name: wire.GrantAnnotation, Versions: wire.GrantVersions()},
	}
}
