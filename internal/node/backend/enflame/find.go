package enflame

import (
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
)

// places returns where libefml can be: the names and folders in which the
// vendor's own binding looks, in its order. /usr/local/efsmi has a folder for
// each installed release of the vendor's tools; /usr/lib/libefml.so is a link
// there, and it is searched in case the link was not made.
func places(o backend.Options) libfile.Places {
	return libfile.Places{
		Names: []string{
			"libefml.so", "libefml.so.1", "libefml.so.2", "libefml.so.2.1", "libefml.so.2.0", "libefml.so.1.0.0",
		},
		Folders: []string{
			"/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
		},
		Releases: []string{"/usr/local/efsmi/efsmi-*/lib"},
		Root:     o.DriverRoot,
		Path:     o.LibraryPath,
	}
}
