package iluvatar

import (
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/libfile"
)

// places returns where libixml can be: where the vendor's package puts it, the
// folders of releases that are installed side by side, and where a distribution
// puts libraries. The vendor's folder is rarely on the dynamic loader's path,
// and what is there is older when it is, so the loader comes last.
func places(o backend.Options) libfile.Places {
	return libfile.Places{
		Names: []string{"libixml.so", "libixml.so.1"},
		Folders: []string{
			"/usr/local/corex/lib64", "/usr/local/corex/lib",
			"/usr/lib64", "/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
		},
		Releases:   []string{"/usr/local/corex-*/lib64", "/usr/local/corex-*/lib"},
		LoaderLast: true,
		Root:       o.DriverRoot,
		Path:       o.LibraryPath,
	}
}
