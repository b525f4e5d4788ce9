package cluster

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"text/template"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

//go:embed templates
var templates embed.FS

// Images that the lab makes for itself.
const (
	PauseImage = "ghcr.io/divvy-gpu/lab-pause:dev"
	ShellImage = "ghcr.io/divvy-gpu/lab-shell:dev"
)

// values are what the templates of configuration files may use.
type values struct {
	BinDir, NodeIP, CgroupRoot, RuncPath string

	StateDir, RunDir, KubernetesDir, PKIDir, ManifestDir                 string
	ContainerdDir, ContainerdRunDir, ContainerdSocket, CNIConfigDir      string
	RegistryHostsDir                                                     string
	NodeName, PodCIDR, ServiceCIDR, ClusterDNSIP, BridgeName, PauseImage string
}

func newValues(binDir, nodeIP string) values {
	return values{
		BinDir: binDir, NodeIP: nodeIP, CgroupRoot: layout.CgroupRoot, RuncPath: configPath("runc"),
		StateDir: layout.StateDir, RunDir: layout.RunDir, KubernetesDir: layout.KubernetesDir,
		PKIDir: layout.PKIDir, ManifestDir: layout.ManifestDir,
		ContainerdDir: layout.ContainerdDir, ContainerdRunDir: layout.ContainerdRunDir,
		ContainerdSocket: layout.ContainerdSocket, CNIConfigDir: layout.CNIConfigDir, RegistryHostsDir: layout.RegistryHostsDir,
		NodeName: layout.NodeName, PodCIDR: layout.PodCIDR, ServiceCIDR: layout.ServiceCIDR,
		ClusterDNSIP: layout.ClusterDNSIP, BridgeName: layout.BridgeName, PauseImage: PauseImage,
	}
}

// configPath returns where the rendered file of a template lies.
func configPath(name string) string {
	if name == "cni.conflist" {
		return filepath.Join(layout.CNIConfigDir, "10-divvy-lab.conflist")
	}
	return filepath.Join(layout.ConfigDir, name)
}

// renderAll returns the configuration files by their place.
func renderAll(v values) (map[string][]byte, error) {
	names, err := fs.Glob(templates, "templates/*")
	if err != nil {
		return nil, fmt.Errorf("list templates: %w", err)
	}
	rendered := make(map[string][]byte, len(names))
	for _, name := range names {
		t, err := template.New(filepath.Base(name)).Option("missingkey=error").ParseFS(templates, name)
		if err != nil {
			return nil, fmt.Errorf("template %s: %w", name, err)
		}
		var b bytes.Buffer
		if err := t.Execute(&b, v); err != nil {
			return nil, fmt.Errorf("template %s: %w", name, err)
		}
		rendered[configPath(filepath.Base(name))] = b.Bytes()
	}
	return rendered, nil
}

// writeFile replaces a file as a whole, or leaves it alone where it has this
// content and mode already. The temporary file is hidden: kubelet and
// containerd read every file of the folders they watch but those.
func writeFile(path string, data []byte, mode fs.FileMode) error {
	if info, err := os.Stat(path); err == nil && info.Mode().Perm() == mode {
		if existing, err := os.ReadFile(path); err == nil && bytes.Equal(existing, data) {
			return nil
		}
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	file, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = file.Write(data)
	if err = errors.Join(err, file.Chmod(mode), file.Close()); err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, os.Remove(file.Name())))
	}
	return nil
}
