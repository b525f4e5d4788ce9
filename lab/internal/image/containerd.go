package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Store is the image store of a containerd, as kubelet sees it.
type Store struct {
	// CTR is the path of containerd's command line, Address its socket.
	CTR, Address string
	// TempDir holds archives for the time of an import.
	TempDir string
}

// Load imports the image under the names, unless the store has the very same
// image under all of them. It reports whether it imported anything.
func (s Store) Load(ctx context.Context, img v1.Image, names ...string) (changed bool, err error) {
	digest, err := img.Digest()
	if err != nil {
		return false, fmt.Errorf("digest of image %s: %w", names[0], err)
	}
	present, err := s.Digests(ctx)
	if err != nil {
		return false, err
	}
	missing := false
	for _, name := range names {
		missing = missing || present[name] != digest.String()
	}
	if !missing {
		return false, nil
	}
	if err := os.MkdirAll(s.TempDir, 0o755); err != nil {
		return false, fmt.Errorf("load image %s: %w", names[0], err)
	}
	archive := filepath.Join(s.TempDir, digest.Hex[:16]+".tar")
	if err := WriteArchive(img, archive, names...); err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, os.Remove(archive)) }()
	if _, err := s.ctr(ctx, "images", "import", archive); err != nil {
		return false, fmt.Errorf("load image %s: %w", names[0], err)
	}
	return true, nil
}

// Digests returns the digest of every image by name.
func (s Store) Digests(ctx context.Context) (map[string]string, error) {
	out, err := s.ctr(ctx, "images", "list")
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return parseImageList(out), nil
}

// parseImageList reads the table of "ctr images list": REF TYPE DIGEST ...
func parseImageList(out string) map[string]string {
	digests := map[string]string{}
	for line := range strings.Lines(out) {
		if fields := strings.Fields(line); len(fields) >= 3 && strings.HasPrefix(fields[2], "sha256:") {
			digests[fields[0]] = fields[2]
		}
	}
	return digests
}

func (s Store) ctr(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, s.CTR, append([]string{"--address", s.Address, "--namespace", "k8s.io"}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// Forget removes the names of images that begin with a prefix; kubelet pulls them again.
func (s Store) Forget(ctx context.Context, prefix string) error {
	present, err := s.Digests(ctx)
	if err != nil {
		return err
	}
	for name := range present {
		if !strings.HasPrefix(name, prefix) {
			continue
		}
		if _, err := s.ctr(ctx, "images", "remove", "--sync", name); err != nil {
			return fmt.Errorf("forget image %s: %w", name, err)
		}
	}
	return nil
}
