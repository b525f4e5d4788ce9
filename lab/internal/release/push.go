package release

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"path"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"sigs.k8s.io/yaml"
)

// ValuesFile is the file beside the images with the values of the chart that name
// them: as they were built, and once they are pushed, in the registry.
const ValuesFile = "values.yaml"

// PushOptions say what to push and where to.
type PushOptions struct {
	// Dir is the folder that BuildImages wrote to.
	Dir string
	// Registry is what stands before the images' names, such as
	// "registry.example.com/divvy"; with "http://" before it, the registry has no TLS.
	Registry string
	// Tag is the version of the images when empty; where that is of a changed
	// checkout, it has a part that follows the content.
	Tag string
}

// Pushed is what Push has pushed.
type Pushed struct {
	// Registry and Tag are those of the images, for the values of the chart.
	Registry, Tag string
	// References name the images by digest.
	References []string
}

// SBOMError reports that a registry rejected the SBOMs of images that it took.
type SBOMError struct{ Err error }

// Error implements error.
func (e *SBOMError) Error() string {
	return fmt.Sprintf("the images are pushed; the registry rejected their SBOMs: %v", e.Err)
}

// Unwrap returns what the registry said.
func (e *SBOMError) Unwrap() error { return e.Err }

// Push pushes the images that BuildImages wrote, then their SBOMs, and writes
// ValuesFile. It logs in as docker would ("docker login", or anything else that
// writes docker's configuration). With an SBOMError the images can be used.
func Push(ctx context.Context, o PushOptions) (Pushed, error) {
	p := Pushed{Tag: o.Tag}
	built, err := readDigests(o.Dir)
	if err != nil {
		return p, err
	}
	var insecure []name.Option
	registry := strings.TrimSuffix(o.Registry, "/")
	if plain, found := strings.CutPrefix(registry, "http://"); found {
		registry, insecure = plain, []name.Option{name.Insecure}
	}
	p.Registry = strings.TrimPrefix(registry, "https://")
	if p.Tag == "" {
		p.Tag = defaultTag(built)
	}
	options := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	var documents []func() error
	for _, b := range built {
		image := path.Base(b.Name)
		repository, err := name.NewRepository(p.Registry+"/"+image, insecure...)
		if err != nil {
			return p, fmt.Errorf("push image %s to %q: %w", image, o.Registry, err)
		}
		folder, err := layout.FromPath(filepath.Join(o.Dir, image))
		if err != nil {
			return p, fmt.Errorf("image %s is not built (make images does that): %w", image, err)
		}
		index, err := folder.ImageIndex()
		if err != nil {
			return p, fmt.Errorf("read image %s: %w", image, err)
		}
		manifest, err := index.IndexManifest()
		if err != nil {
			return p, fmt.Errorf("read image %s: %w", image, err)
		}
		for _, d := range manifest.Manifests {
			switch d.MediaType { //nolint:exhaustive // a layout of ours has no other
			case types.OCIImageIndex:
				whole, err := index.ImageIndex(d.Digest)
				if err != nil {
					return p, fmt.Errorf("read image %s: %w", image, err)
				}
				if err := remote.WriteIndex(repository.Tag(p.Tag), whole, options...); err != nil {
					return p, fmt.Errorf("push image %s: %w", repository.Tag(p.Tag), advise(err, repository.Registry))
				}
				p.References = append(p.References, repository.Digest(d.Digest.String()).String())
			case types.OCIManifestSchema1:
				documents = append(documents, func() error { return pushDocument(index, d, repository, options) })
			}
		}
	}
	if err := writeValues(o.Dir, p.Registry, p.Tag); err != nil {
		return p, err
	}
	for _, push := range documents {
		if err := push(); err != nil {
			return p, &SBOMError{err}
		}
	}
	return p, nil
}

func pushDocument(index v1.ImageIndex, d v1.Descriptor, repository name.Repository, options []remote.Option) error {
	document, err := index.Image(d.Digest)
	if err != nil {
		return err
	}
	return remote.Write(repository.Digest(d.Digest.String()), document, options...)
}

// advise adds to an error of a registry what to do.
func advise(err error, registry name.Registry) error {
	var answer *transport.Error
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &answer) && (answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden):
		return fmt.Errorf("%w: log in with an account that may push there: docker login %s, or any tool that writes ~/.docker/config.json",
			err, registry.Name())
	case errors.As(err, &unknown):
		return fmt.Errorf("%w: name the folder with the registry's CA in SSL_CERT_DIR, or add the CA to those of this machine", err)
	case strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		return fmt.Errorf("%w: a registry without TLS is written as IMAGE_REPO=http://%s/NAME", err, registry.Name())
	default:
		return err
	}
}

// dirty ends the version of a checkout with changes, as git describes it.
const dirty = "-dirty"

// defaultTag is the version of the images in a folder. That of a changed checkout does
// not say which changes, and nodes that have the tag already would not pull it again;
// it gets a part that follows the content.
func defaultTag(built []Built) string {
	tag := built[0].Tag
	if !strings.HasSuffix(tag, dirty) {
		return tag
	}
	content := sha256.New()
	for _, b := range built {
		content.Write([]byte(b.Digest))
	}
	return tag + "-" + hex.EncodeToString(content.Sum(nil)[:6])
}

func writeValues(dir, registry, tag string) error {
	values, err := yaml.Marshal(map[string]any{"image": map[string]string{"registry": registry, "tag": tag}})
	if err != nil {
		return fmt.Errorf("write %s: %w", ValuesFile, err)
	}
	header := "# Names the images for the chart: helm install ... --values " + ValuesFile + "\n"
	return writeFile(filepath.Join(dir, ValuesFile), append([]byte(header), values...))
}
