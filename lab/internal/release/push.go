package release

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Push pushes the images that BuildImages wrote to dir, with their SBOMs, to a
// registry, such as "registry.example.com/divvy", under a tag. It logs in as
// docker would ("docker login", or anything else that writes docker's
// configuration). It returns the references by digest.
func Push(ctx context.Context, dir, registry, tag string, images ...string) ([]string, error) {
	options := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	var pushed []string
	for _, image := range images {
		path, err := layout.FromPath(filepath.Join(dir, image))
		if err != nil {
			return pushed, fmt.Errorf("image %s is not built (make images does that): %w", image, err)
		}
		index, err := path.ImageIndex()
		if err != nil {
			return pushed, fmt.Errorf("read image %s: %w", image, err)
		}
		manifest, err := index.IndexManifest()
		if err != nil {
			return pushed, fmt.Errorf("read image %s: %w", image, err)
		}
		repository, err := name.NewRepository(registry + "/" + image)
		if err != nil {
			return pushed, fmt.Errorf("push image %s: %w", image, err)
		}
		// The image first: what refers to it comes after it.
		for _, d := range manifest.Manifests {
			if d.MediaType != types.OCIImageIndex {
				continue
			}
			whole, err := index.ImageIndex(d.Digest)
			if err != nil {
				return pushed, fmt.Errorf("read image %s: %w", image, err)
			}
			if err := remote.WriteIndex(repository.Tag(tag), whole, options...); err != nil {
				return pushed, fmt.Errorf("push image %s: %w", image, err)
			}
			pushed = append(pushed, repository.Digest(d.Digest.String()).String())
		}
		for _, d := range manifest.Manifests {
			if d.MediaType != types.OCIManifestSchema1 {
				continue
			}
			if err := pushDocument(index, d, repository, options); err != nil {
				return pushed, fmt.Errorf("push the SBOM of image %s: %w", image, err)
			}
		}
	}
	return pushed, nil
}

func pushDocument(index v1.ImageIndex, d v1.Descriptor, repository name.Repository, options []remote.Option) error {
	document, err := index.Image(d.Digest)
	if err != nil {
		return err
	}
	return remote.Write(repository.Digest(d.Digest.String()), document, options...)
}
