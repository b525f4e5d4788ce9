package hardware

import (
	"path/filepath"
	"runtime"
	"strconv"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// place is where one vendor's packages put things.
type place struct {
	vendor string
	// library is the file of the vendor's library.
	library string
	// links lead to it or to its folder, and are what programs look for. The
	// target is relative where it must also hold for a process that sees this
	// machine's files below another folder.
	links []link
	// card is the name of a card's device node without its number; control are
	// the names of those that the driver makes besides.
	card    string
	control []string
	// real are files that only the vendor's real driver brings.
	real []string
}

type link struct{ path, target string }

// topology is the link beside the library to the one topology file.
func (p *place) topology() string {
	return filepath.Join(filepath.Dir(p.library), vendorsim.TopologyName)
}

// node returns the path of a card's device node.
func (p *place) node(dir string, minor int) string {
	return filepath.Join(dir, p.card+strconv.Itoa(minor))
}

// Default is this machine.
var Default = below("/")

// below returns the places of a machine whose root folder is root.
func below(root string) *Simulated {
	at := func(elements ...string) string { return filepath.Join(append([]string{root}, elements...)...) }
	// Where Debian and its relatives keep libraries. NVIDIA's own lie in a
	// folder of their own there, with a link to the management library.
	libraries := at("usr/lib", Multiarch())
	return &Simulated{
		topology:    at(layout.StateDir, vendorsim.TopologyName),
		deviceDir:   at("dev"),
		recordPath:  at(layout.StateDir, "hardware.json"),
		root:        root,
		driverFiles: at("proc/driver"),
		mknod:       makeNullDevice,
		isNode:      isNullDevice,
		mount:       mountFiles,
		unmount:     unmountFiles,
		places: []place{
			{
				vendor:  "enflame",
				library: at("usr/local/efsmi/efsmi-1.14.0/lib", vendorsim.LibraryName("enflame")),
				links: []link{{
					at("usr/lib/libefml.so"), at("usr/local/efsmi/efsmi-1.14.0/lib", vendorsim.LibraryName("enflame")),
				}},
				card: "gcu",
			},
			{
				vendor:  "nvidia",
				library: filepath.Join(libraries, "nvidia/current", vendorsim.LibraryName("nvidia")),
				links: []link{{
					filepath.Join(libraries, vendorsim.LibraryName("nvidia")),
					filepath.Join("nvidia/current", vendorsim.LibraryName("nvidia")),
				}},
				card:    "nvidia",
				control: []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"},
				real: []string{
					at("proc/driver/nvidia"), at("usr/lib64", vendorsim.LibraryName("nvidia")),
					at("usr/lib", vendorsim.LibraryName("nvidia")),
				},
			},
			{
				vendor:  "iluvatar",
				library: at("usr/local/corex-4.2.0/lib64", vendorsim.LibraryName("iluvatar")),
				links:   []link{{at("usr/local/corex"), "corex-4.2.0"}},
				card:    "iluvatar",
				control: []string{"itrctl"},
			},
		},
	}
}

// Multiarch is Debian's name of this machine's architecture.
func Multiarch() string {
	if runtime.GOARCH == "arm64" {
		return "aarch64-linux-gnu"
	}
	return "x86_64-linux-gnu"
}
