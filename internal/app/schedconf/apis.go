package schedconf

import (
	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// APIs returns what the command writes.
func APIs() []version.API {
	return []version.API{{Use: version.Writes, Name: schedconf.APIGroup, Versions: []string{schedconf.APIVersion}}}
}
