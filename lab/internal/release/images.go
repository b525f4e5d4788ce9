package release

import (
	"context"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/divvy-gpu/divvy/lab/internal/debian"
	"github.com/divvy-gpu/divvy/lab/internal/image"
)

// Registry is where Divvy's images are; the chart has it as default.
const Registry = "ghcr.io/divvy-gpu"

// Images are the programs that have an image, which is called like its program, but for
// Schedulers.
var Images = []string{Node, Control}

// sources are told in every image's labels.
const sources = "https://" + module

// license is that of Divvy's own code, by its SPDX identifier.
const license = "Apache-2.0"

var titles = map[string]string{
	Node:    "Divvy's node daemon: offers the accelerators of a node to its pods",
	Control: "Divvy's scheduler extender, webhooks and other parts that serve the control plane",

	Schedulers[0]: "kube-scheduler of Kubernetes 1.37 with Divvy's placement inside",
	Schedulers[1]: "kube-scheduler of Kubernetes 1.36 with Divvy's placement inside",
	Schedulers[2]: "kube-scheduler of Kubernetes 1.35 with Divvy's placement inside",
}

// Labels returns an image's labels.
func (s Stamp) Labels(name string) map[string]string {
	return map[string]string{
		"org.opencontainers.image.title":       name,
		"org.opencontainers.image.description": titles[name],
		"org.opencontainers.image.source":      sources,
		"org.opencontainers.image.version":     s.Version,
		"org.opencontainers.image.revision":    s.Commit,
		"org.opencontainers.image.licenses":    license,
	}
}

// UserID is who images run as but for the node daemon's, and their group.
const UserID = "65532:65532"

// ImageSpec describes the image of a program. file is the program on disk. base
// are the libraries that it loads; those of divvy-control are none. Beside the program of Node
// is Hook.
func ImageSpec(name, file string, base []image.File, s Stamp) image.Spec {
	program := "/usr/bin/" + name
	spec := image.Spec{
		Name:       path.Join(Registry, name),
		Entrypoint: []string{program},
		Base:       base,
		Files: []image.File{
			{Path: "/tmp", Dir: true, Mode: 0o777 | fs.ModeSticky},
			{Path: program, Source: file},
		},
		Labels: s.Labels(name), Created: s.Time,
	}
	switch name {
	case Node:
		// Where a vendor's container runtime is in use, the daemon sees all cards,
		// and of NVIDIA's libraries the one for management.
		spec.Files = append(spec.Files, image.File{Path: "/usr/bin/" + Hook, Source: filepath.Join(filepath.Dir(file), Hook)})
		spec.Env = []string{"ENFLAME_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=utility"}
	default:
		spec.User = UserID
	}
	return spec
}

// VendorLibraryNeeds are what vendors' libraries name besides what divvy-node
// itself does: it loads them while it runs.
func VendorLibraryNeeds() []string {
	return []string{
		"libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6",
	}
}

// Suite is the Debian release whose libraries divvy-node's image has, and
// debianVersion its number. The Dockerfile names the same.
const (
	Suite         = "bookworm"
	debianVersion = "12"
)

// basePackages are the libraries and what says which Debian they are of. The last
// has the copyright notices of the two before it.
var basePackages = []string{"base-files", "libc6", "libstdc++6", "libgcc-s1", "gcc-12-base"}

// Debian returns a function that fetches divvy-node's libraries for an
// architecture: the C and the C++ library, and no program of any kind.
func Debian(archive debian.Archive) func(context.Context, string) ([]image.File, []debian.Package, error) {
	return func(ctx context.Context, arch string) ([]image.File, []debian.Package, error) {
		packages, err := archive.Fetch(ctx, arch, basePackages...)
		if err != nil {
			return nil, nil, err
		}
		files, err := base(ctx, packages)
		return files, packages, err
	}
}

func base(ctx context.Context, packages []debian.Package) ([]image.File, error) {
	byPath := map[string]image.File{}
	for _, p := range packages {
		files, err := p.Files(ctx, inBase)
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			byPath[f.Path] = f
		}
	}
	for _, f := range append(debian.Merged(),
		image.File{Path: "/etc/passwd", Mode: 0o644,
			Content: []byte("root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n")},
		image.File{Path: "/etc/group", Mode: 0o644, Content: []byte("root:x:0:\nnonroot:x:65532:\n")}) {
		byPath[f.Path] = f
	}
	return slices.SortedFunc(maps.Values(byPath), func(a, b image.File) int { return strings.Compare(a.Path, b.Path) }), nil
}

// inBase says which files of the packages are needed: libraries and the loader,
// the name of the release, and what licenses ask to be passed on. Left out are
// conversions between character sets, what debuggers read, and the like.
func inBase(file string) bool {
	switch {
	case strings.HasPrefix(file, "/usr/share/doc/"):
		return path.Base(file) == "copyright" || strings.Count(file, "/") == 4 // a link to another package's folder
	case strings.HasPrefix(file, "/usr/share/common-licenses/"):
		return true
	case file == "/etc/os-release", file == "/usr/lib/os-release", file == "/etc/debian_version":
		return true
	case strings.HasPrefix(file, "/usr/lib"):
		// Not below a folder of the architecture's folder, such as gconv.
		return strings.Count(file, "/") <= 4 && strings.Contains(path.Base(file), ".so")
	default:
		return false
	}
}
