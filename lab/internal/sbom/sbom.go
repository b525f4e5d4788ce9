// Package sbom writes what an image is made of as a CycloneDX document: the
// program, the Go modules and the Go release that it was compiled from, as the
// program itself tells, and Debian packages. The same image gives the same
// document.
package sbom

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/uuid"
	"github.com/package-url/packageurl-go"

	"github.com/divvy-gpu/divvy/lab/internal/debian"
)

// MediaType is that of the document.
const MediaType = "application/vnd.cyclonedx+json"

// Image is what there is to describe.
type Image struct {
	// Name is without tag; Version is the tag.
	Name, Version string
	// Digest is that of the image's manifest, sha256:...
	Digest string
	// Architecture is as Go calls it.
	Architecture string
	Created      time.Time
	// Program is the file that the image runs, InImage its place there.
	Program, InImage string
	License          string
	// Packages are those whose files the image has, of Debian's release
	// DebianVersion, such as "12".
	Packages      []debian.Package
	DebianVersion string
}

// Describe returns the document.
func Describe(img Image) ([]byte, error) {
	info, err := buildinfo.ReadFile(img.Program)
	if err != nil {
		return nil, fmt.Errorf("ask %s what it was built from: %w", img.Program, err)
	}
	content, err := os.ReadFile(img.Program)
	if err != nil {
		return nil, fmt.Errorf("describe an image: %w", err)
	}
	sum := sha256.Sum256(content)
	program := cdx.Component{
		BOMRef: "program", Type: cdx.ComponentTypeApplication, Name: img.InImage, Version: img.Version,
		Hashes:   &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
		Licenses: &cdx.Licenses{{License: &cdx.License{ID: img.License}}},
		PackageURL: packageurl.NewPackageURL(packageurl.TypeGolang, parent(info.Path), base(info.Path), img.Version, nil, "").
			ToString(),
	}
	components := []cdx.Component{program}
	var modules []string
	release := strings.TrimPrefix(info.GoVersion, "go")
	std := cdx.Component{
		Type: cdx.ComponentTypeLibrary, Name: "std", Version: info.GoVersion,
		PackageURL: packageurl.NewPackageURL(packageurl.TypeGolang, "", "std", release, nil, "").ToString(),
	}
	std.BOMRef = std.PackageURL
	components, modules = append(components, std), append(modules, std.BOMRef)
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		c := cdx.Component{
			Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version,
			PackageURL: packageurl.NewPackageURL(packageurl.TypeGolang, parent(m.Path), base(m.Path), m.Version, nil, "").ToString(),
		}
		c.BOMRef = c.PackageURL
		if hash, found := strings.CutPrefix(m.Sum, "h1:"); found {
			raw, err := base64.StdEncoding.DecodeString(hash)
			if err != nil {
				return nil, fmt.Errorf("checksum of module %s: %w", m.Path, err)
			}
			c.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(raw)}}
		}
		components, modules = append(components, c), append(modules, c.BOMRef)
	}
	parts := []string{program.BOMRef}
	for _, p := range img.Packages {
		qualifiers := packageurl.QualifiersFromMap(map[string]string{
			"arch": p.Architecture, "distro": "debian-" + img.DebianVersion, "upstream": p.Source,
		})
		c := cdx.Component{
			Type: cdx.ComponentTypeLibrary, Name: p.Name, Version: p.Version,
			PackageURL: packageurl.NewPackageURL(packageurl.TypeDebian, "debian", p.Name, p.Version, qualifiers, "").ToString(),
		}
		c.BOMRef = c.PackageURL
		components, parts = append(components, c), append(parts, c.BOMRef)
	}
	whole := cdx.Component{
		BOMRef: "image", Type: cdx.ComponentTypeContainer, Name: img.Name, Version: img.Version,
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: strings.TrimPrefix(img.Digest, "sha256:")}},
		PackageURL: packageurl.NewPackageURL(packageurl.TypeOCI, "", base(img.Name), img.Digest,
			packageurl.QualifiersFromMap(map[string]string{"arch": img.Architecture, "repository_url": img.Name, "tag": img.Version}),
			"").ToString(),
	}
	bom := cdx.NewBOM()
	// A document of its own for every image, and the same for the same.
	bom.SerialNumber = uuid.NewSHA1(uuid.NameSpaceURL, []byte(whole.PackageURL)).URN()
	bom.Metadata = &cdx.Metadata{Timestamp: img.Created.UTC().Format(time.RFC3339), Component: &whole}
	bom.Components = &components
	bom.Dependencies = &[]cdx.Dependency{{Ref: whole.BOMRef, Dependencies: &parts}, {Ref: program.BOMRef, Dependencies: &modules}}
	var out bytes.Buffer
	if err := cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true).SetEscapeHTML(false).Encode(bom); err != nil {
		return nil, fmt.Errorf("write what image %s is made of: %w", img.Name, err)
	}
	return out.Bytes(), nil
}

// parent and base split a path as package URLs do, into namespace and name.
func parent(path string) string {
	i := strings.LastIndexByte(path, '/')
	return path[:max(i, 0)]
}

func base(path string) string { return path[strings.LastIndexByte(path, '/')+1:] }
