package release

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/divvy-gpu/divvy/lab/internal/debian"
	"github.com/divvy-gpu/divvy/lab/internal/image"
	"github.com/divvy-gpu/divvy/lab/internal/sbom"
)

// digestsFile names the images by their digests.
const digestsFile = "digests.txt"

// ImageOptions say what images to build and where to put them.
type ImageOptions struct {
	// Repository is the root of the checkout, Dir the folder for the images. What
	// an earlier build left there is replaced.
	Repository, Dir string
	Stamp           Stamp
	// Images and Architectures are what to build.
	Images, Architectures []string
	// Base returns divvy-node's libraries for an architecture, and the packages that
	// they are from; Debian returns such a function.
	Base func(ctx context.Context, arch string) ([]image.File, []debian.Package, error)
	// Report is told what is being done.
	Report func(string)
}

// Built is an image that was built.
type Built struct {
	// Name is without tag, Digest that of all architectures together.
	Name, Tag, Digest string
	// Platforms are the digests by architecture.
	Platforms map[string]string
}

// Reference names the image by tag and digest.
func (b Built) Reference() string { return b.Name + ":" + b.Tag + "@" + b.Digest }

// BuildImages builds images and writes for each, with NAME the program's:
//
//	NAME/                        an OCI layout with all architectures and their SBOMs
//	NAME-VERSION.oci.tar         the same as one file
//	NAME-VERSION-linux-ARCH.tar  one architecture, for "docker load" and "ctr images import"
//	NAME-VERSION-linux-ARCH.cdx.json  what it is made of
//	digests.txt, SHA256SUMS      digests of images, and checksums of these files
//	values.yaml                  the chart's values that name the images
func BuildImages(ctx context.Context, o ImageOptions) ([]Built, error) {
	if strings.Contains(o.Stamp.Version, "/") || strings.ContainsAny(o.Stamp.Version, "+ ") {
		return nil, fmt.Errorf("version %q cannot be an image's tag: letters, digits, '.', '_' and '-' can", o.Stamp.Version)
	}
	if err := os.RemoveAll(o.Dir); err != nil {
		return nil, fmt.Errorf("remove older images: %w", err)
	}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("make a folder for images: %w", err)
	}
	work, err := os.MkdirTemp("", "divvy-images-")
	if err != nil {
		return nil, fmt.Errorf("build images: %w", err)
	}
	defer os.RemoveAll(work) //nolint:errcheck // nothing of it is used later
	var all []Built
	for _, name := range o.Images {
		built, err := buildImage(ctx, o, name, work)
		if err != nil {
			return nil, err
		}
		all = append(all, built)
	}
	var digests strings.Builder
	for _, b := range all {
		fmt.Fprintln(&digests, b.Reference())
		for _, arch := range o.Architectures {
			fmt.Fprintf(&digests, "%s@%s linux/%s\n", b.Name, b.Platforms[arch], arch)
		}
	}
	if err := os.WriteFile(filepath.Join(o.Dir, digestsFile), []byte(digests.String()), 0o644); err != nil {
		return nil, fmt.Errorf("write the images' digests: %w", err)
	}
	if err := WriteSums(o.Dir); err != nil {
		return nil, err
	}
	// Push writes it again.
	return all, writeValues(o.Dir, Registry, o.Stamp.Version)
}

func buildImage(ctx context.Context, o ImageOptions, name, work string) (Built, error) {
	full := Registry + "/" + name
	built := Built{Name: full, Tag: o.Stamp.Version, Platforms: map[string]string{}}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	type described struct {
		image    v1.Image
		document []byte
	}
	var platforms []described
	for _, arch := range o.Architectures {
		o.Report(fmt.Sprintf("%s for linux/%s", name, arch))
		img, document, err := buildPlatform(ctx, o, name, arch, filepath.Join(work, arch))
		if err != nil {
			return Built{}, err
		}
		digest, err := img.Digest()
		if err != nil {
			return Built{}, fmt.Errorf("image %s: %w", name, err)
		}
		built.Platforms[arch] = digest.String()
		file := filepath.Join(o.Dir, fmt.Sprintf("%s-%s-linux-%s", name, o.Stamp.Version, arch))
		if err := os.WriteFile(file+".cdx.json", document, 0o644); err != nil {
			return Built{}, fmt.Errorf("image %s: %w", name, err)
		}
		if err := image.WriteArchive(img, file+".tar", full+":"+o.Stamp.Version); err != nil {
			return Built{}, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{
			Add: plainImage{img}, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
		platforms = append(platforms, described{img, document})
	}
	digest, err := index.Digest()
	if err != nil {
		return Built{}, fmt.Errorf("image %s: %w", name, err)
	}
	built.Digest = digest.String()
	dir := filepath.Join(o.Dir, name)
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return Built{}, fmt.Errorf("write image %s: %w", name, err)
	}
	if err := path.AppendIndex(index, layout.WithAnnotations(image.NameAnnotations(full, o.Stamp.Version))); err != nil {
		return Built{}, fmt.Errorf("write image %s: %w", name, err)
	}
	for _, p := range platforms {
		if err := attach(path, p.image, p.document); err != nil {
			return Built{}, fmt.Errorf("write image %s: %w", name, err)
		}
	}
	return built, image.Pack(dir, filepath.Join(o.Dir, fmt.Sprintf("%s-%s.oci.tar", name, o.Stamp.Version)))
}

// buildPlatform builds one image for one architecture, and describes it.
func buildPlatform(ctx context.Context, o ImageOptions, name, arch, work string) (v1.Image, []byte, error) {
	var base []image.File
	var packages []debian.Package
	var err error
	if name == Node {
		if err := EnsureCompiler(ctx, arch, o.Report); err != nil {
			return nil, nil, err
		}
		if base, packages, err = o.Base(ctx, arch); err != nil {
			return nil, nil, fmt.Errorf("libraries of %s for linux/%s: %w", name, arch, err)
		}
	}
	programs := []string{name}
	if name == Node {
		programs = append(programs, Hook)
	}
	if err := Build(ctx, o.Repository, work, o.Stamp, Linux(arch), programs...); err != nil {
		return nil, nil, err
	}
	file := filepath.Join(work, name)
	if name == Node {
		err = image.Resolve(file, base, VendorLibraryNeeds()...)
	} else {
		err = image.Resolve(file, nil)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("the image of %s would not start: %w", name, err)
	}
	spec := ImageSpec(name, file, base, o.Stamp)
	spec.Architecture, spec.Compress = arch, true
	terms, err := notices(ctx, o.Repository, recipes[name].folder, file)
	if err != nil {
		return nil, nil, err
	}
	for _, f := range terms {
		spec.Files = append(spec.Files, image.File{Path: filepath.Join("/usr/share/doc", name, f.name), Content: f.content, Mode: f.mode})
	}
	img, err := image.Build(spec)
	if err != nil {
		return nil, nil, err
	}
	digest, err := img.Digest()
	if err != nil {
		return nil, nil, fmt.Errorf("image %s: %w", name, err)
	}
	document, err := sbom.Describe(sbom.Image{
		Name: spec.Name, Version: o.Stamp.Version, Digest: digest.String(), Architecture: arch, Created: o.Stamp.Time,
		Program: file, InImage: spec.Entrypoint[0], License: license, Packages: packages, DebianVersion: debianVersion,
	})
	return img, document, err
}

// plainImage is an image that an index lists as one. The library would list the
// type of its configuration as an artifact's, and those that look for images may
// pass over artifacts.
type plainImage struct{ v1.Image }

// Descriptor implements what partial.Descriptor looks for.
func (p plainImage) Descriptor() (*v1.Descriptor, error) {
	d, err := partial.Descriptor(p.Image)
	if err != nil {
		return nil, err
	}
	d.ArtifactType = ""
	return d, nil
}

// attach adds a document to a layout that refers to an image, as the OCI
// specification says; registries list it as the image's.
func attach(to layout.Path, img v1.Image, document []byte) error {
	subject, err := partial.Descriptor(img)
	if err != nil {
		return err
	}
	empty := []byte("{}")
	manifest := v1.Manifest{
		SchemaVersion: 2,
		MediaType:     types.OCIManifestSchema1,
		ArtifactType:  sbom.MediaType,
		Config:        v1.Descriptor{MediaType: "application/vnd.oci.empty.v1+json"},
		Layers:        []v1.Descriptor{{MediaType: sbom.MediaType}},
		Subject:       &v1.Descriptor{MediaType: subject.MediaType, Size: subject.Size, Digest: subject.Digest},
	}
	write := func(content []byte, d *v1.Descriptor) error {
		d.Size = int64(len(content))
		if d.Digest, _, err = v1.SHA256(bytes.NewReader(content)); err != nil {
			return err
		}
		return to.WriteBlob(d.Digest, io.NopCloser(bytes.NewReader(content)))
	}
	if err := errors.Join(write(empty, &manifest.Config), write(document, &manifest.Layers[0])); err != nil {
		return err
	}
	content, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	d := v1.Descriptor{MediaType: manifest.MediaType, ArtifactType: manifest.ArtifactType}
	if err := write(content, &d); err != nil {
		return err
	}
	return to.AppendDescriptor(d)
}

// sumsFile is the list of checksums, in the form that sha256sum --check reads.
const sumsFile = "SHA256SUMS"

// WriteSums writes the checksums of the files in a folder, those of folders below
// left out, into the folder.
func WriteSums(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("write checksums: %w", err)
	}
	slices.SortFunc(entries, func(a, b os.DirEntry) int { return cmp.Compare(a.Name(), b.Name()) })
	var out bytes.Buffer
	for _, entry := range entries {
		if !entry.Type().IsRegular() || entry.Name() == sumsFile {
			continue
		}
		sum, err := sumOf(filepath.Join(dir, entry.Name()))
		if err != nil {
			return fmt.Errorf("write checksums: %w", err)
		}
		fmt.Fprintf(&out, "%s  %s\n", sum, entry.Name())
	}
	if err := os.WriteFile(filepath.Join(dir, sumsFile), out.Bytes(), 0o644); err != nil {
		return fmt.Errorf("write checksums: %w", err)
	}
	return nil
}

func sumOf(path string) (sum string, err error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	h := sha256.New()
	if _, err := io.Copy(h, file); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
