package release

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// Options say what a release is made of and where it goes.
type Options struct {
	// Repository is the root of the checkout, Dir the folder for the release. What an
	// earlier one left there is replaced.
	Repository, Dir string
	// Images is the folder that BuildImages wrote to; what is in the release names
	// them by digest.
	Images string
	// Helm is the path of helm.
	Helm  string
	Stamp Stamp
	// Platforms are those of kubectl-divvy.
	Platforms []Platform
	// Pins is a record of base images and actions, which becomes part of the release;
	// "" or a file that is missing for none.
	Pins string
	// Report is told what is being done.
	Report func(string)
}

// KubectlPlatforms are where people run kubectl.
func KubectlPlatforms() []Platform {
	var all []Platform
	for _, system := range []string{"linux", "darwin", "windows"} {
		for _, arch := range []string{"amd64", "arm64"} {
			all = append(all, Platform{OS: system, Arch: arch})
		}
	}
	return all
}

// Make makes a release:
//
//	divvy.yaml, divvy-EXAMPLE.yaml      the chart rendered, for people without helm
//	...-uninstall.yaml, ...-uninstall-after.yaml  what removes it again
//	divvy-VERSION.tgz                   the chart
//	kustomize/, divvy-kustomize-VERSION.tar.gz  bases and an overlay
//	kubectl-divvy_VERSION_OS_ARCH.tar.gz, .zip  the plugin of kubectl
//	krew.yaml                           the plugin's entry in an index of krew
//	digests.txt                         the images
//	pins.txt                            digests of base images, commits of actions
//	SHA256SUMS
func Make(ctx context.Context, o Options) error {
	if o.Helm == "" {
		return errNoHelm
	}
	images, err := readDigests(o.Images)
	if err != nil {
		return err
	}
	if built := images[0].Tag; built != o.Stamp.Version {
		return fmt.Errorf("the images in %s are of version %s, and the release is %s: run make images again", o.Images, built,
			o.Stamp.Version)
	}
	if err := os.RemoveAll(o.Dir); err != nil {
		return fmt.Errorf("remove an older release: %w", err)
	}
	o.Report("manifests and kustomize bases")
	if err := writeManifests(ctx, o, images); err != nil {
		return err
	}
	files, err := folder(filepath.Join(o.Dir, "kustomize"), "kustomize")
	if err != nil {
		return err
	}
	if err := writeTarGz(filepath.Join(o.Dir, "divvy-kustomize-"+o.Stamp.Version+".tar.gz"), o.Stamp.Time, files); err != nil {
		return err
	}
	o.Report("chart")
	if err := packChart(ctx, o); err != nil {
		return err
	}
	if err := writeKubectl(ctx, o); err != nil {
		return err
	}
	digests, err := os.ReadFile(filepath.Join(o.Images, digestsFile))
	if err != nil {
		return fmt.Errorf("read the images' digests: %w", err)
	}
	if err := writeFile(filepath.Join(o.Dir, digestsFile), digests); err != nil {
		return err
	}
	if pins, err := os.ReadFile(o.Pins); err == nil {
		if err := writeFile(filepath.Join(o.Dir, "pins.txt"), pins); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read what was pinned: %w", err)
	}
	return WriteSums(o.Dir)
}

// readDigests reads what BuildImages said of the images in a folder, Images or more; all have
// one tag.
func readDigests(dir string) ([]Built, error) {
	path := filepath.Join(dir, digestsFile)
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the images' digests: %w: run make images first", err)
	}
	var all []Built
	for line := range strings.Lines(string(content)) {
		if m := wholeImage.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			all = append(all, Built{Name: m[1], Tag: m[2], Digest: m[3]})
		}
	}
	if len(all) < len(Images) {
		return nil, fmt.Errorf("%s names %d images with all architectures, and there are %d: run make images again", path, len(all),
			len(Images))
	}
	return all, nil
}

// wholeImage is the line of an image with all its architectures.
var wholeImage = regexp.MustCompile(`^(\S+):([^\s:@]+)@(sha256:[0-9a-f]{64})$`)

// semantic is a version as helm and krew want it, without the v.
var semantic = regexp.MustCompile(`^v?([0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.-]+)?)$`)

// chartVersion is the version of the chart in a release. Where the checkout has no
// release's tag it is one before the next release.
func chartVersion(repository, version string) (string, error) {
	if m := semantic.FindStringSubmatch(version); m != nil {
		return m[1], nil
	}
	content, err := os.ReadFile(filepath.Join(repository, "charts", "divvy", "Chart.yaml"))
	if err != nil {
		return "", fmt.Errorf("read the chart's version: %w", err)
	}
	var chart struct {
		Version string `json:"version"`
	}
	if err := yaml.Unmarshal(content, &chart); err != nil {
		return "", fmt.Errorf("read the chart's version: %w", err)
	}
	return chart.Version + "-dev.g" + regexp.MustCompile(`[^0-9A-Za-z-]`).ReplaceAllString(version, "-"), nil
}

// packChart writes the chart. helm stamps its files with the time at which it
// packs; they get the commit's.
func packChart(ctx context.Context, o Options) (err error) {
	version, err := chartVersion(o.Repository, o.Stamp.Version)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "divvy-chart-")
	if err != nil {
		return fmt.Errorf("pack the chart: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	if _, err := output(ctx, o.Helm, "package", filepath.Join(o.Repository, "charts", "divvy"),
		"--version", version, "--app-version", o.Stamp.Version, "--destination", work); err != nil {
		return fmt.Errorf("pack the chart: %w", err)
	}
	name := "divvy-" + version + ".tgz"
	packed, err := os.Open(filepath.Join(work, name))
	if err != nil {
		return fmt.Errorf("pack the chart: %w", err)
	}
	defer func() { err = errors.Join(err, packed.Close()) }()
	unzipped, err := gzip.NewReader(packed)
	if err != nil {
		return fmt.Errorf("pack the chart: %w", err)
	}
	var files []file
	for r := tar.NewReader(unzipped); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("pack the chart: %w", err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			return fmt.Errorf("pack the chart: %w", err)
		}
		files = append(files, file{name: header.Name, content: content, mode: 0o644})
	}
	return writeTarGz(filepath.Join(o.Dir, name), o.Stamp.Time, files)
}

// writeKubectl compiles kubectl-divvy and writes an archive for each platform, and
// the entry for an index of krew.
func writeKubectl(ctx context.Context, o Options) (err error) {
	work, err := os.MkdirTemp("", "divvy-kubectl-")
	if err != nil {
		return fmt.Errorf("build kubectl-divvy: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	var platforms []map[string]any
	for _, p := range o.Platforms {
		o.Report("kubectl-divvy for " + p.String())
		dir := filepath.Join(work, p.OS+"-"+p.Arch)
		if err := Build(ctx, o.Repository, dir, o.Stamp, p, Kubectl); err != nil {
			return err
		}
		program := fileName(Kubectl, p)
		content, err := os.ReadFile(filepath.Join(dir, program))
		if err != nil {
			return fmt.Errorf("build kubectl-divvy: %w", err)
		}
		terms, err := notices(ctx, o.Repository, "", filepath.Join(dir, program))
		if err != nil {
			return err
		}
		files := []file{{program, content, 0o755}}
		for _, f := range terms {
			if f.name != "LICENSE" {
				f.name = "licenses/" + f.name
			}
			files = append(files, f)
		}
		name := fmt.Sprintf("%s_%s_%s_%s", Kubectl, o.Stamp.Version, p.OS, p.Arch)
		pack := writeTarGz
		if p.OS == "windows" {
			name, pack = name+".zip", writeZip
		} else {
			name += ".tar.gz"
		}
		path := filepath.Join(o.Dir, name)
		if err := pack(path, o.Stamp.Time, files); err != nil {
			return err
		}
		sum, err := sumOf(path)
		if err != nil {
			return fmt.Errorf("checksum of %s: %w", name, err)
		}
		platforms = append(platforms, map[string]any{
			"selector": map[string]any{"matchLabels": map[string]string{"os": p.OS, "arch": p.Arch}},
			"uri":      fmt.Sprintf("%s/releases/download/%s/%s", sources, o.Stamp.Version, name),
			"sha256":   sum,
			"bin":      program,
		})
	}
	version, err := chartVersion(o.Repository, o.Stamp.Version)
	if err != nil {
		return err
	}
	plugin, err := yaml.Marshal(map[string]any{
		"apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
		"kind":       "Plugin",
		"metadata":   map[string]any{"name": "divvy"},
		"spec": map[string]any{
			"version": "v" + version, "homepage": sources, "platforms": platforms,
			"shortDescription": "See and check how accelerators are shared",
			"description": "Shows which pods hold how much of which GPU or GCU that Divvy shares,\nexamines an installation of " +
				"Divvy, and manages the token of a remote pool.\n",
		},
	})
	if err != nil {
		return fmt.Errorf("write the entry for krew: %w", err)
	}
	return writeFile(filepath.Join(o.Dir, "krew.yaml"), plugin)
}

// file is one of an archive.
type file struct {
	name    string
	content []byte
	mode    fs.FileMode
}

// folder reads the files below a folder; in the archive they lie below name.
func folder(dir, name string) ([]file, error) {
	var files []file
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(dir, path)
		files = append(files, file{filepath.ToSlash(filepath.Join(name, relative)), content, 0o644})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read files of the release: %w", err)
	}
	return files, nil
}

// writeTarGz writes an archive in which every file has the same time and belongs
// to root, so that the same files give the same archive.
func writeTarGz(path string, at time.Time, files []file) error {
	var b bytes.Buffer
	zipped, err := gzip.NewWriterLevel(&b, gzip.BestCompression)
	if err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	w := tar.NewWriter(zipped)
	for _, f := range files {
		header := &tar.Header{Name: f.name, Mode: int64(f.mode), Size: int64(len(f.content)), ModTime: at, Typeflag: tar.TypeReg,
			Format: tar.FormatPAX}
		if err := w.WriteHeader(header); err != nil {
			return fmt.Errorf("write %s: %w", filepath.Base(path), err)
		}
		if _, err := w.Write(f.content); err != nil {
			return fmt.Errorf("write %s: %w", filepath.Base(path), err)
		}
	}
	if err := errors.Join(w.Close(), zipped.Close()); err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	return writeFile(path, b.Bytes())
}

// writeZip is writeTarGz for Windows.
func writeZip(path string, at time.Time, files []file) error {
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, f := range files {
		header := &zip.FileHeader{Name: f.name, Method: zip.Deflate, Modified: at}
		header.SetMode(f.mode)
		to, err := w.CreateHeader(header)
		if err == nil {
			_, err = to.Write(f.content)
		}
		if err != nil {
			return fmt.Errorf("write %s: %w", filepath.Base(path), err)
		}
	}
	if err := w.Close(); err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	return writeFile(path, b.Bytes())
}
