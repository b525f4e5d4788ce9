package sources

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

const catalogName = "bitfusion-client-config.yaml"

// original is a catalog of the original's form with one client.
func original(version string) string {
	return "BitfusionClients:\n- BitfusionVersion: \"" + version + "\"\n  OSVersion: ubuntu18\n" +
		"  BinaryPath: /bitfusion/bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb/usr/bin/bitfusion\n" +
		"  EnvVariable: /bitfusion/bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb/opt/bitfusion/lib/x86_64-linux-gnu/bitfusion/lib/\n"
}

// follower notes what a CatalogFile tells.
type follower struct {
	mu       sync.Mutex // guards what follows
	accepted []string
	rejected []string
}

func (f *follower) accept(c *pool.Catalog) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.accepted = append(f.accepted, c.Clients[0].Version)
}

func (f *follower) reject(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rejected = append(f.rejected, err.Error())
}

func (f *follower) counts() (accepted, rejected int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.accepted), len(f.rejected)
}

func follow(t *testing.T, c *CatalogFile) *follower {
	t.Helper()
	f := &follower{}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.Run(ctx, f.accept, f.reject) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return f
}

func TestCatalogFollowsAMountedConfigMap(t *testing.T) {
	m := kubetest.MountConfigMap(t, catalogName, original("450"))
	c, err := OpenCatalog(m.File(), "image")
	if err != nil {
		t.Fatal(err)
	}
	c.recheck = 20 * time.Millisecond
	f := follow(t, c)
	first := c.Current()
	if first.Clients[0].Version != "450" {
		t.Fatalf("%+v", first)
	}
	version := 1
	eventually(t, "a new catalog arrives", func() bool {
		version++
		m.Write(original(strconv.Itoa(version)))
		<-time.After(2 * c.recheck)
		return c.Current() != first
	})
	if first.Clients[0].Version != "450" {
		t.Error("the catalog that reviews under way use was changed")
	}
	last := c.Current()

	m.Write(strings.Replace(original("7"), "OSVersion", "Colour", 1))
	eventually(t, "it is told that the file cannot be used", func() bool { return c.Problem() != nil })
	if c.Current() != last {
		t.Error("a catalog with mistakes took the place of the one before")
	}
	m.Write(original(last.Clients[0].Version))
	eventually(t, "the file can be used again", func() bool { return c.Problem() == nil })
	if c.Current() != last {
		t.Error("the same catalog was taken for another")
	}
	m.Write(original("401"))
	eventually(t, "a good one takes over", func() bool { return c.Current().Clients[0].Version == "401" })
	_, rejected := f.counts()
	if rejected != 1 || !strings.Contains(f.rejected[0], m.File()) || !strings.Contains(f.rejected[0], "Colour") {
		t.Errorf("rejected: %q, want one with the file's name and the mistake", f.rejected)
	}
}

// A folder that is not watched, and one that goes and comes, is looked at from
// time to time; a problem is told once.
func TestCatalogIsReadFromTimeToTime(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "catalog")
	file := filepath.Join(dir, catalogName)
	write := func(text string) {
		t.Helper()
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write(original("450"))
	c, err := OpenCatalog(file, "image")
	if err != nil {
		t.Fatal(err)
	}
	c.recheck = 20 * time.Millisecond
	f := follow(t, c)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is told that the file is gone", func() bool { _, n := f.counts(); return n == 1 })
	<-time.After(10 * c.recheck)
	if _, n := f.counts(); n != 1 || c.Current().Clients[0].Version != "450" {
		t.Errorf("told %d times of the same problem; catalog %+v", n, c.Current())
	}
	write(original("401"))
	eventually(t, "it is read when it is back", func() bool { return c.Current().Clients[0].Version == "401" })
}

// Defect P8: start-up errors were logged and the program went on. Defect W25:
// entries that lacked something stopped it at a pod's creation.
func TestBadCatalogsAreRefusedAtTheStart(t *testing.T) {
	huge := append([]byte(original("450")), bytes.Repeat([]byte("#"), pool.MaxCatalog)...)
	for name, tt := range map[string]struct{ content, image, want string }{
		"missing":          {"", "i", "no such file"},
		"no YAML":          {"{", "i", "catalog "},
		"unknown key":      {original("450") + "  Colour: blue\n", "i", "Colour"},
		"no image":         {original("450"), "", "client 450 for ubuntu18: no image is set, and --client-image is empty"},
		"larger than any":  {string(huge), "i", "a catalog has at most 1048576"},
		"nothing in it":    {"\n", "i", "catalog "},
		"another document": {"apiVersion: v1\nkind: ConfigMap\n", "i", "catalog "},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), catalogName)
			if tt.content != "" {
				if err := os.WriteFile(file, []byte(tt.content), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			c, err := OpenCatalog(file, tt.image)
			if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), "catalog") || c != nil {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
	if _, err := OpenCatalog("", ""); err == nil || !strings.Contains(err.Error(), "--client-image is empty") {
		t.Errorf("the built-in catalog without an image: %v", err)
	}
	c, err := OpenCatalog("", "image")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Current().Find("450", "ubuntu18"); err != nil {
		t.Errorf("the built-in catalog: %v", err)
	}
}
