package pool

import "errors"

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
	// LibraryPath goes before LD_LIBRARY_PATH; "" for nothing.
	LibraryPath string
	// OptSource is the folder whose content becomes /opt/bitfusion in the
	// container; "" for none.
	OptSource string
	// Command is how a container's command is put behind the client.
	Command CommandForm
	// SingleSecret is true for clients whose token is in the one secret
	// SingleSecret instead of three.
	SingleSecret bool
}

// MountPath is where the clients' files are, in their image and in containers.
const MountPath = "/bitfusion"

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
	Percent, Memory []string
	// Filter is added for every filter; empty when the client knows no filters.
	Filter []string
	// Separator stands between these words and the container's command.
	Separator []string
}

// Find returns the client of a version and an operating system. Empty values are
// replaced by the catalog's defaults. The error names the annotation to add or to
// change and what the catalog has.
func (c *Catalog) Find(version, os string) (*Client, error) { return nil, errors.New("not written") }

// DecodeCatalog reads a catalog, in the present form or the original's, and
// checks it: unknown keys, missing fields, doubles, paths outside MountPath. All
// mistakes are reported at once, each with its place.
func DecodeCatalog(data []byte) (*Catalog, error) { return nil, errors.New("not written") }

// DefaultCatalog returns the catalog of the guides: 450, 401, 350 and 250 for
// ubuntu18, ubuntu20, centos7 and centos8. DefaultCatalogYAML is its text.
func DefaultCatalog() *Catalog { return &Catalog{} }
