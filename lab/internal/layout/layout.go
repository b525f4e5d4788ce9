// Package layout says where the lab keeps things on the host. Whatever the lab
// itself can place freely lies under StateDir and RunDir; the rest are the
// fixed places of Kubernetes that tools and charts expect.
package layout

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
)

// Fixed addresses and names of the lab's one-node cluster.
const (
	// NodeName is the name of the only node.
	NodeName = "divvy-lab-0"
	// ClusterName names the cluster in kubeconfig files.
	ClusterName = "divvy-lab"
	// ServiceCIDR is the range of service addresses, PodCIDR that of pods.
	ServiceCIDR = "10.96.0.0/16"
	PodCIDR     = "10.244.0.0/24"
	// APIServerServiceIP is the address of the service kubernetes.default.
	APIServerServiceIP = "10.96.0.1"
	// ClusterDNSIP is given to pods as their name server. Nothing answers
	// there: the lab has no cluster DNS.
	ClusterDNSIP = "10.96.0.10"
	// BridgeName is the network bridge that pods are attached to.
	BridgeName = "divvylab0"
	// APIServerPort is where the API server listens on the node's address.
	APIServerPort = 6443
)

// Places on the host.
const (
	// StateDir holds configuration, logs, pid files and data of the lab.
	StateDir = "/var/lib/divvy-lab"
	// RunDir holds sockets and what must not survive a reboot.
	RunDir = "/run/divvy-lab"
	// KubernetesDir is laid out as kubeadm lays it out.
	KubernetesDir = "/etc/kubernetes"
	// KubeletDir is fixed: kubelet's device-plugin folder cannot be moved.
	KubeletDir = "/var/lib/kubelet"
	// DriverDir holds the state of NVIDIA's simulated driver where it limits memory. It is
	// in /dev because divvy-node sees that at the same path and may write to it. CgroupRoot
	// is where control groups of version 2 are while there is such a driver.
	DriverDir  = "/dev/divvy-lab"
	CgroupRoot = DriverDir + "/cgroup"
)

// Files and folders below those places.
var (
	LogDir           = filepath.Join(StateDir, "logs")
	ConfigDir        = filepath.Join(StateDir, "config")
	CNIConfigDir     = filepath.Join(StateDir, "cni", "net.d")
	ImageDir         = filepath.Join(StateDir, "images")
	EtcdDir          = filepath.Join(StateDir, "etcd")
	ContainerdDir    = filepath.Join(StateDir, "containerd")
	PIDDir           = filepath.Join(StateDir, "run")
	ContainerdRunDir = filepath.Join(RunDir, "containerd")
	ContainerdSocket = filepath.Join(ContainerdRunDir, "containerd.sock")
	// RegistryHostsDir says how containerd reaches registries, a folder for each.
	RegistryHostsDir = filepath.Join(ConfigDir, "certs.d")
	PKIDir           = filepath.Join(KubernetesDir, "pki")
	ManifestDir      = filepath.Join(KubernetesDir, "manifests")
	AdminKubeconfig  = filepath.Join(KubernetesDir, "admin.conf")
	// AuditLog holds what accounts of programs asked the API server for, a JSON
	// object in each line.
	AuditLog = filepath.Join(LogDir, "audit.log")
)

// HostPaths are the places outside StateDir and RunDir that the lab, its
// kubelet and what is installed into its cluster write to. The lab comes up
// only where none of them is in use by somebody else, and removes them when it
// goes down.
func HostPaths() []string {
	return []string{
		RunDir,
		DriverDir,
		KubernetesDir,
		KubeletDir,
		"/run/containerd",
		"/run/cdi",
		"/run/divvy",
		"/var/lib/cni",
		"/var/lib/divvy",
		"/var/log/containers",
		"/var/log/pods",
		"/var/log/topscloud",
	}
}

// SharedPaths are places that appear when a Kubernetes runs and that others may
// have made before. They are removed only where they were not there.
func SharedPaths() []string {
	return []string{
		// The mount command's notes, on machines where nobody ran it before.
		"/run/mount",
	}
}

// LabDir returns the folder of the lab's Go module and RepositoryDir the
// folder above it. They are searched for from the working directory upwards,
// and then where this program was compiled.
func LabDir() (string, error) {
	var starts []string
	if dir, err := os.Getwd(); err == nil {
		starts = append(starts, dir)
	}
	if _, file, _, ok := runtime.Caller(0); ok {
		starts = append(starts, filepath.Dir(file))
	}
	for _, start := range starts {
		for dir := start; ; dir = filepath.Dir(dir) {
			for _, candidate := range []string{dir, filepath.Join(dir, "lab")} {
				if isFile(filepath.Join(candidate, "components", "components.go")) && isFile(filepath.Join(candidate, "go.mod")) {
					return candidate, nil
				}
			}
			if dir == filepath.Dir(dir) {
				break
			}
		}
	}
	return "", errors.New("the lab's sources were not found: run this command inside a checkout of Divvy")
}

// RepositoryDir returns the root of the checkout that the lab belongs to.
func RepositoryDir() (string, error) {
	lab, err := LabDir()
	if err != nil {
		return "", err
	}
	return filepath.Dir(lab), nil
}

// CacheDir returns the folder that keeps built programs between runs:
// DIVVY_LAB_CACHE, or divvy-lab in the user's cache folder.
func CacheDir() (string, error) {
	if dir := os.Getenv("DIVVY_LAB_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no cache folder (set DIVVY_LAB_CACHE): %w", err)
	}
	return filepath.Join(base, "divvy-lab"), nil
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}
