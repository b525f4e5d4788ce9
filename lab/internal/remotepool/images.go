package remotepool

import (
	_ "embed" // scripts of the images
	"fmt"
	"io/fs"
	"os/exec"
	"path"
	"path/filepath"

	"github.com/divvy-gpu/divvy/lab/internal/image"
)

// Names of the images. The first three are those of the user guides, so that what
// they show runs unchanged.
const (
	ClientImage    = "docker.io/bitfusiondeviceplugin/bitfusion-client:0.4"
	OldClientImage = "docker.io/bitfusiondeviceplugin/bitfusion-client:0.1.1"
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

// clientImage is a published image of clients: the trees below /bitfusion, each as
// the package of a distribution unpacks.
type clientImage struct {
	name, libraries string
	// trees are the versions of the packages by the names of their folders.
	trees map[string]string
}

// clientImages lists what the published images contain, as far as the guides and the
// original's tables of releases 0.1 to 0.4 show it. It does not follow Divvy's
// catalog, which is compared with it.
var clientImages = []clientImage{
	{
		name: ClientImage, libraries: "opt/bitfusion/lib/x86_64-linux-gnu/bitfusion/lib",
		trees: map[string]string{
			"bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb": "4.5.0-4",
			"bitfusion-client-ubuntu2004_4.5.0-4_amd64.deb": "4.5.0-4",
			"bitfusion-client-centos7-4.5.0-4.x86_64.rpm":   "4.5.0-4",
			"bitfusion-client-centos8-4.5.0-4.x86_64.rpm":   "4.5.0-4",
			"bitfusion-client-ubuntu1804_4.0.1-5_amd64.deb": "4.0.1-5",
			"bitfusion-client-ubuntu2004_4.0.1-5_amd64.deb": "4.0.1-5",
			"bitfusion-client-centos7-4.0.1-5.x86_64.rpm":   "4.0.1-5",
			"bitfusion-client-centos8-4.0.1-5.x86_64.rpm":   "4.0.1-5",
			"bitfusion-client-ubuntu1804_3.5.0-5_amd64.deb": "3.5.0-5",
			"bitfusion-client-ubuntu2004_3.5.0-5_amd64.deb": "3.5.0-5",
			"bitfusion-client-centos7-3.5.0-5.x86_64.rpm":   "3.5.0-5",
			"bitfusion-client-centos8-3.5.0-5.x86_64.rpm":   "3.5.0-5",
		},
	},
	{
		name: OldClientImage, libraries: "opt/bitfusion/lib/x86_64-linux-gnu/lib",
		trees: map[string]string{
			"bitfusion-client-ubuntu1804_2.5.1-13": "2.5.1-13",
			"bitfusion-client-ubuntu2004_2.5.1-13": "2.5.1-13",
			"bitfusion-client-centos7-2.5.0-10":    "2.5.0-10",
			"bitfusion-client-centos8-2.5.1-13":    "2.5.1-13",
		},
	},
}

// ClientSpecs describes stand-ins for the published images of clients: a tree for
// each client, and what the init container needs. program is the stand-in for the
// client, a static one.
func ClientSpecs(program string) ([]image.Spec, error) {
	var specs []image.Spec
	for _, published := range clientImages {
		files, err := tools(copyTools)
		if err != nil {
			return nil, err
		}
		files = append(files, image.File{Path: sharedProgram, Source: program})
		for folder, version := range published.trees {
			root := path.Join("/bitfusion", folder)
			files = append(files,
				image.File{Path: path.Join(root, "usr/bin/bitfusion"), Same: sharedProgram},
				image.File{Path: path.Join(root, published.libraries, LibraryName), Content: []byte("a stand-in\n"), Mode: 0o644},
				image.File{Path: path.Join(root, "opt/bitfusion", VersionFile), Content: []byte(version + "\n"), Mode: 0o644})
		}
		specs = append(specs, image.Spec{Name: published.name, Files: files, Cmd: []string{"/bin/bash"}})
	}
	return specs, nil
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
	return image.Spec{Name: OtherImage, Files: append(files, image.File{Path: otherProgram, Content: rgpu}), Cmd: []string{"/bin/bash"}},
		nil
}

// ServerSpec describes the image of the pool's server, whose program is static.
func ServerSpec(program string) image.Spec {
	const place = "/usr/bin/pool-server"
	return image.Spec{Name: ServerImage, Files: []image.File{{Path: place, Source: program}}, Entrypoint: []string{place},
		User: "65532:65532"}
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
