package remotepool

import (
	_ "embed" // scripts of the images
	"fmt"
	"io/fs"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/lab/internal/image"
)

// Names of the images. The first two are those of the user guide, so that what it
// shows runs unchanged.
const (
	ClientImage    = "docker.io/bitfusiondeviceplugin/bitfusion-client:0.4"
	BenchmarkImage = "nvcr.io/nvidia/tensorflow:19.07-py3"
	OtherImage     = "docker.io/divvy-gpu/rgpu-client:1.0"
	ServerImage    = "docker.io/divvy-gpu/lab-pool-server"
)

// VersionFile is where a client's tree says what version it is, in opt/bitfusion.
const VersionFile = "VERSION"

// otherProgram is another client of remote GPUs in its image.
const otherProgram = "/bitfusion/rgpu/bin/rgpu"

//go:embed files/python.sh
var python []byte

//go:embed files/rgpu.sh
var rgpu []byte

// copyTools is what the init container of a pod of the pool runs.
var copyTools = []string{"bash", "cp", "mkdir"}

// benchmarkTools is what workloads expect of a distribution's image.
var benchmarkTools = []string{"bash", "cat", "chmod", "cp", "env", "false", "grep", "id", "ls", "mkdir", "rm", "sleep", "true"}

// sharedProgram is where the client's image has the program that all of its trees
// have; it sorts before them.
const sharedProgram = "/.client/bitfusion"

// ClientSpec describes the image of the clients of a catalog whose entries name no
// image: a tree for each, as packages of distributions unpack, and what the init
// container needs. program is the stand-in for the client, a static one.
func ClientSpec(program string, catalog *pool.Catalog) (image.Spec, error) {
	files, err := tools(copyTools)
	if err != nil {
		return image.Spec{}, err
	}
	files = append(files, image.File{Path: sharedProgram, Source: program})
	seen := map[string]bool{}
	for _, c := range catalog.Clients {
		if c.Image != "" || seen[c.Root] {
			continue
		}
		seen[c.Root] = true
		library := image.File{Path: path.Join(c.LibraryPath, LibraryName), Content: []byte("a stand-in\n"), Mode: 0o644}
		files = append(files, image.File{Path: c.Binary, Same: sharedProgram}, library)
		if c.OptSource != "" {
			files = append(files, image.File{Path: path.Join(c.OptSource, VersionFile), Content: []byte(packageVersion(c.Root) + "\n"), Mode: 0o644})
		}
	}
	return image.Spec{Name: ClientImage, Files: files, Cmd: []string{"/bin/bash"}}, nil
}

var versionInName = regexp.MustCompile(`\d+(\.\d+)+-\d+`)

// packageVersion is the version in the name of a package, such as 4.5.0-4.
func packageVersion(root string) string {
	if version := versionInName.FindString(path.Base(root)); version != "" {
		return version
	}
	return "0"
}

// BenchmarkSpec describes the image that the user guide's pods run.
func BenchmarkSpec() (image.Spec, error) {
	files, err := tools(benchmarkTools)
	if err != nil {
		return image.Spec{}, err
	}
	return image.Spec{
		Name:  BenchmarkImage,
		Files: append(files, image.File{Path: "/usr/bin/python", Content: python}),
		Cmd:   []string{"/bin/bash"},
	}, nil
}

// OtherSpec describes the image of another client than Bitfusion's.
func OtherSpec() (image.Spec, error) {
	files, err := tools(copyTools)
	if err != nil {
		return image.Spec{}, err
	}
	return image.Spec{Name: OtherImage, Files: append(files, image.File{Path: otherProgram, Content: rgpu}), Cmd: []string{"/bin/bash"}}, nil
}

// ServerSpec describes the image of the pool's server, whose program is static.
func ServerSpec(program string) image.Spec {
	const place = "/usr/bin/pool-server"
	return image.Spec{Name: ServerImage, Files: []image.File{{Path: place, Source: program}}, Entrypoint: []string{place}, User: "65532:65532"}
}

// tools are programs of this machine with the libraries that they need.
func tools(names []string) ([]image.File, error) {
	files := []image.File{
		{Path: "/tmp", Dir: true, Mode: 0o777 | fs.ModeSticky},
		{Path: "/root", Dir: true, Mode: 0o700},
		{Path: "/etc/passwd", Content: []byte("root:x:0:0:root:/root:/bin/bash\n"), Mode: 0o644},
		{Path: "/etc/group", Content: []byte("root:x:0:\n"), Mode: 0o644},
	}
	known := map[string]bool{}
	for _, name := range names {
		program, err := exec.LookPath(name)
		if err != nil {
			return nil, fmt.Errorf("an image needs a program of this machine: %w", err)
		}
		source, err := filepath.EvalSymlinks(program)
		if err != nil {
			return nil, fmt.Errorf("an image needs a program of this machine: %w", err)
		}
		libraries, err := image.Libraries(source)
		if err != nil {
			return nil, err
		}
		for _, f := range append(libraries, image.File{Path: "/bin/" + name, Source: source}) {
			if !known[f.Path] {
				known[f.Path] = true
				files = append(files, f)
			}
		}
	}
	return files, nil
}
