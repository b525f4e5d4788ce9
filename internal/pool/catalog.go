package pool

import (
	_ "embed" // the catalog of the guides
	"fmt"
	"slices"
	"strings"
	"sync"
)

// APIVersion and Kind head a catalog file. A file of the original, whose root is
// BitfusionClients, needs neither.
const (
	APIVersion = "pool.divvy.dev/v1alpha1"
	Kind       = "ClientCatalog"
)

// Catalog lists the clients that pods may choose. It is never changed after it
// was decoded, so any number of goroutines may read it.
type Catalog struct {
	// DefaultOS and DefaultVersion are used for pods that do not say; "" when
	// they must.
	DefaultOS, DefaultVersion string
	// Clients are in the order of the file; no two have the same version and OS.
	Clients []Client
}

// Client is one client program: a version for an operating system.
type Client struct {
	// Version and OS are what pods write in their annotations.
	Version, OS string
	// Image is the image that holds Root; "" for the webhook's setting.
	Image string
	// Root is the folder of the client's files, in the image and, once copied,
	// in the container; below MountPath.
	Root string
	// Binary is the absolute path of the client program, below Root.
	Binary string
	// LibraryPath goes before LD_LIBRARY_PATH; "" for nothing. Its folders, parted
	// by colons, are below Root or OptPath.
	LibraryPath string
	// OptSource is the folder whose content becomes OptPath in the container; ""
	// for none. It is below Root.
	OptSource string
	// Command is how a container's command is put behind the client.
	Command CommandForm
	// SingleSecret is true for clients whose token is in the one secret
	// SingleSecret instead of three.
	SingleSecret bool
}

const (
	// MountPath is where the clients' files are, in their image and in containers.
	MountPath = "/bitfusion"
	// OptPath is where the content of a client's OptSource is in containers.
	OptPath = "/opt/bitfusion"
)

// CommandForm is the command line of a client, word by word. In the words
// ${amount} stands for the number of GPUs, ${percent} for the percent of each,
// ${fraction} for the same with six decimals (0.500000), ${megabytes} for the
// memory of each in MB (10^6 bytes), ${filter} for one filter (key=value), and
// ${units} for the units of Resource.
type CommandForm struct {
	// Shell is the program that the text of the command is given to with -c, such
	// as /bin/bash. When empty the words are the command itself and no shell is
	// needed in the container's image.
	Shell string
	// Percent and Memory follow the binary, for requests by percent and by memory.
	// A client that takes only one of the kinds has no words for the other.
	Percent, Memory []string
	// Filter is added for every filter; empty when the client knows no filters.
	Filter []string
	// Separator stands between these words and the container's command.
	Separator []string
	// Padded adds the surplus blanks that the original wrote into the text of the
	// command: one behind Percent, two between Memory and Filter. They mean nothing
	// and are kept so that commands are the same byte for byte.
	Padded bool
}

// Names of the command forms that a catalog can name in place of writing them.
const (
	// formBitfusion is that of Bitfusion 4.0 and later.
	formBitfusion = "bitfusion"
	// formBitfusion3 is that of 3.5: as above, without filters.
	formBitfusion3 = "bitfusion-3"
	// formBitfusion2 is that of 2.5: without a separator, too.
	formBitfusion2 = "bitfusion-2"
)

var formNames = []string{formBitfusion, formBitfusion3, formBitfusion2}

func namedForm(name string) CommandForm {
	f := CommandForm{
		Shell:   "/bin/bash",
		Percent: []string{"run", "-n", "${amount}", "-p", "${fraction}"},
		Memory:  []string{"run", "-n", "${amount}", "-m", "${megabytes}"},
	}
	if name != formBitfusion2 {
		f.Separator, f.Padded = []string{"--"}, true
	}
	if name == formBitfusion {
		f.Filter = []string{"--filter", "${filter}"}
	}
	return f
}

// Find returns the client of a version and an operating system. Empty values are
// replaced by the catalog's defaults. The error names the annotation to add or to
// change and what the catalog has.
func (c *Catalog) Find(version, os string) (*Client, error) {
	var missing []string
	if version == "" {
		if version = c.DefaultVersion; version == "" {
			missing = append(missing, VersionAnnotation+" ("+c.versions("")+")")
		}
	}
	if os == "" {
		if os = c.DefaultOS; os == "" {
			missing = append(missing, OSAnnotation+" ("+c.oses(version)+")")
		}
	}
	if len(missing) > 0 {
		noun := "annotation"
		if len(missing) > 1 {
			noun = "annotations"
		}
		return nil, fmt.Errorf("the pod does not select a client; add the %s %s", noun, strings.Join(missing, " and "))
	}
	for i := range c.Clients {
		if c.Clients[i].Version == version && c.Clients[i].OS == os {
			return &c.Clients[i], nil
		}
	}
	has := func(f func(Client) bool) bool { return slices.ContainsFunc(c.Clients, f) }
	switch {
	case !has(func(k Client) bool { return k.Version == version }):
		return nil, fmt.Errorf("annotation %s: unknown client %q; use one of %s", VersionAnnotation, short(version), c.versions(""))
	case !has(func(k Client) bool { return k.OS == os }):
		return nil, fmt.Errorf("annotation %s: no client for %q; use one of %s", OSAnnotation, short(os), c.oses(version))
	}
	return nil, fmt.Errorf("annotations %s and %s: no client %q for %q; client %s exists for %s, and for %s there are clients %s",
		VersionAnnotation, OSAnnotation, short(version), short(os), short(version), c.oses(version), short(os), c.versions(os))
}

// versions lists the versions for an operating system, or all.
func (c *Catalog) versions(os string) string {
	return c.list(func(k Client) (string, bool) { return k.Version, os == "" || k.OS == os })
}

// oses lists the operating systems of a version, or all when there is no such
// version.
func (c *Catalog) oses(version string) string {
	if s := c.list(func(k Client) (string, bool) { return k.OS, k.Version == version }); s != nothing {
		return s
	}
	return c.list(func(k Client) (string, bool) { return k.OS, true })
}

const nothing = "none"

func (c *Catalog) list(f func(Client) (string, bool)) string {
	const most = 20
	var names []string
	for _, k := range c.Clients {
		name, ok := f(k)
		if !ok || slices.Contains(names, name) {
			continue
		}
		if names = append(names, name); len(names) == most {
			names = append(names, "...")
			break
		}
	}
	if names == nil {
		return nothing
	}
	return strings.Join(names, ", ")
}

//go:embed default-catalog.yaml
var defaultCatalogYAML []byte

// DefaultCatalogYAML returns the text of DefaultCatalog.
func DefaultCatalogYAML() []byte { return slices.Clone(defaultCatalogYAML) }

var decodeDefault = sync.OnceValue(func() *Catalog {
	c, err := DecodeCatalog(defaultCatalogYAML)
	if err != nil {
		return &Catalog{} // a test decodes it
	}
	return c
})

// DefaultCatalog returns the catalog of the guides: 450, 401, 350 and 250 for
// ubuntu18, ubuntu20, centos7 and centos8. DefaultCatalogYAML is its text. All
// callers get the same one.
func DefaultCatalog() *Catalog { return decodeDefault() }
