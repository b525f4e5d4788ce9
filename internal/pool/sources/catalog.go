package sources

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// recheck is how often the file is read: it is small, and a mounted ConfigMap changes by a swap of
// links that file watches tend to miss.
const recheck = time.Second

// CatalogFile holds the catalog of a file and follows it. A file that cannot be
// used leaves the catalog as it was. Its methods may be called by many
// goroutines.
type CatalogFile struct {
	path string
	// imageless says what is wrong with a client that names no image, nil when
	// there is an image for such clients.
	imageless error
	recheck   time.Duration

	mu      sync.RWMutex // guards what follows
	content []byte       // that catalog was made from
	catalog *pool.Catalog
	err     error // of the last read
}

// OpenCatalog reads the catalog, the built-in one when path is "". clientImage is
// the image of clients that name none.
func OpenCatalog(path, clientImage string) (*CatalogFile, error) {
	c := &CatalogFile{path: path, recheck: recheck}
	if clientImage == "" {
		c.imageless = errors.New("no image is set, and --client-image is empty")
	}
	if path == "" {
		c.catalog = pool.DefaultCatalog()
		if err := c.check(c.catalog); err != nil {
			return nil, fmt.Errorf("built-in catalog: %w", err)
		}
		return c, nil
	}
	if _, err := c.reload(); err != nil {
		return nil, err
	}
	return c, nil
}

// Current returns the catalog that holds now.
func (c *CatalogFile) Current() *pool.Catalog {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.catalog
}

// Problem returns why the file as it is now cannot be used, nil when it is used.
func (c *CatalogFile) Problem() error {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.err
}

// reload reads the file and reports whether it brought another catalog.
func (c *CatalogFile) reload() (changed bool, err error) {
	content, err := readCatalog(c.path)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && c.catalog != nil && bytes.Equal(content, c.content) {
		c.err = nil
		return false, nil
	}
	var catalog *pool.Catalog
	if err == nil {
		if catalog, err = pool.DecodeCatalog(content); err == nil {
			err = c.check(catalog)
		}
		if err != nil {
			err = fmt.Errorf("catalog %s: %w", c.path, err)
		}
	}
	if c.err = err; err != nil {
		return false, err
	}
	c.catalog, c.content = catalog, content
	return true, nil
}

// check finds the clients that could not be brought to a pod.
func (c *CatalogFile) check(catalog *pool.Catalog) error {
	var errs []error
	for _, client := range catalog.Clients {
		if client.Image == "" && c.imageless != nil {
			errs = append(errs, fmt.Errorf("client %s for %s: %w", client.Version, client.OS, c.imageless))
		}
	}
	return errors.Join(errs...)
}

func readCatalog(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the catalog: %w", err)
	}
	defer f.Close() //nolint:errcheck // opened for reading
	content, err := io.ReadAll(io.LimitReader(f, pool.MaxCatalog+1))
	if err != nil {
		return nil, fmt.Errorf("read the catalog: %w", err)
	}
	return content, nil
}

// Run follows the file until ctx ends. It calls accepted after each new catalog,
// and rejected with each new reason why the file cannot be used.
func (c *CatalogFile) Run(ctx context.Context, accepted func(*pool.Catalog), rejected func(error)) {
	if c.path == "" {
		return
	}
	trouble := ""
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		switch changed, err := c.reload(); {
		case err != nil:
			if err.Error() != trouble {
				trouble = err.Error()
				rejected(err)
			}
		case changed:
			trouble = ""
			accepted(c.Current())
		case trouble != "":
			trouble = ""
			klog.FromContext(ctx).Info("The catalog is valid again and unchanged", "file", c.path)
		}
	}, c.recheck)
}
