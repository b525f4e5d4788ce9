package cluster

import (
	"fmt"
	"path/filepath"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/proc"
)

// Component names one part of the cluster that can be stopped and started.
type Component string

// The components of the lab's cluster.
const (
	Containerd        Component = "containerd"
	Etcd              Component = "etcd"
	APIServer         Component = "apiserver"
	ControllerManager Component = "controller-manager"
	Kubelet           Component = "kubelet"
	Proxy             Component = "proxy"
	// Scheduler runs as a static pod of kubelet, the others as processes.
	Scheduler Component = "scheduler"
)

// Components returns all components in the order in which they start.
func Components() []Component {
	return []Component{Containerd, Etcd, APIServer, ControllerManager, Kubelet, Proxy, Scheduler}
}

// ParseComponent returns the component of a name; the names of the programs
// are accepted too.
func ParseComponent(name string) (Component, error) {
	for _, c := range Components() {
		if name == string(c) || name == "kube-"+string(c) {
			return c, nil
		}
	}
	return "", fmt.Errorf("unknown component %q: known are %v", name, Components())
}

// Addresses on which components answer about their health. All but the API
// server's are on the loopback interface.
const (
	etcdClientAddress  = "127.0.0.1:2379"
	etcdPeerAddress    = "127.0.0.1:2380"
	etcdMetricsAddress = "127.0.0.1:2381"

	controllerManagerAddress = "127.0.0.1:10257"
	schedulerAddress         = "127.0.0.1:10259"
	kubeletHealthAddress     = "127.0.0.1:10248"
	proxyHealthAddress       = "127.0.0.1:10256"
)

// listenAddresses returns where a component will listen, to tell early when
// another program has the port.
func listenAddresses(c Component, nodeIP string) []string {
	switch c {
	case Etcd:
		return []string{etcdClientAddress, etcdPeerAddress, etcdMetricsAddress}
	case APIServer:
		return []string{fmt.Sprintf("%s:%d", nodeIP, layout.APIServerPort)}
	case ControllerManager:
		return []string{controllerManagerAddress}
	case Scheduler:
		return []string{schedulerAddress}
	case Kubelet:
		return []string{nodeIP + ":10250", kubeletHealthAddress}
	case Proxy:
		return []string{proxyHealthAddress, "127.0.0.1:10249"}
	default:
		return nil
	}
}

// daemon returns how a component runs as a process; nil for the static pod.
func daemon(c Component, binDir, nodeIP string) *proc.Daemon {
	d := &proc.Daemon{Name: programName(c), LogDir: layout.LogDir, PIDDir: layout.PIDDir}
	d.Path = filepath.Join(binDir, d.Name)
	cert := func(name string) string { return filepath.Join(layout.PKIDir, name) }
	switch c {
	case Containerd:
		// containerd looks its shim up in PATH, the shim finds runc by its path.
		d.Env = []string{"PATH=" + binDir + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
		d.Args = []string{"--config=" + configPath("containerd.toml")}
		d.ConfigFiles = []string{configPath("containerd.toml")}
	case Etcd:
		d.Args = []string{
			"--name=" + layout.NodeName,
			"--data-dir=" + layout.EtcdDir,
			"--listen-client-urls=https://" + etcdClientAddress,
			"--advertise-client-urls=https://" + etcdClientAddress,
			"--listen-peer-urls=https://" + etcdPeerAddress,
			"--initial-advertise-peer-urls=https://" + etcdPeerAddress,
			"--initial-cluster=" + layout.NodeName + "=https://" + etcdPeerAddress,
			"--listen-metrics-urls=http://" + etcdMetricsAddress,
			"--client-cert-auth=true",
			"--trusted-ca-file=" + cert("etcd/ca.crt"),
			"--cert-file=" + cert("etcd/server.crt"),
			"--key-file=" + cert("etcd/server.key"),
			"--peer-client-cert-auth=true",
			"--peer-trusted-ca-file=" + cert("etcd/ca.crt"),
			"--peer-cert-file=" + cert("etcd/peer.crt"),
			"--peer-key-file=" + cert("etcd/peer.key"),
			// What a lab holds may be lost with the machine's power; writing
			// it to the disk each time would slow everything down.
			"--unsafe-no-fsync",
		}
	case APIServer:
		d.ConfigFiles = []string{cert("apiserver.crt"), configPath("audit-policy.yaml")}
		d.Args = []string{
			"--advertise-address=" + nodeIP,
			"--bind-address=" + nodeIP,
			fmt.Sprintf("--secure-port=%d", layout.APIServerPort),
			"--allow-privileged=true",
			"--authorization-mode=Node,RBAC",
			"--enable-admission-plugins=NodeRestriction",
			"--client-ca-file=" + cert("ca.crt"),
			"--tls-cert-file=" + cert("apiserver.crt"),
			"--tls-private-key-file=" + cert("apiserver.key"),
			"--etcd-servers=https://" + etcdClientAddress,
			"--etcd-cafile=" + cert("etcd/ca.crt"),
			"--etcd-certfile=" + cert("apiserver-etcd-client.crt"),
			"--etcd-keyfile=" + cert("apiserver-etcd-client.key"),
			"--kubelet-certificate-authority=" + cert("ca.crt"),
			"--kubelet-client-certificate=" + cert("apiserver-kubelet-client.crt"),
			"--kubelet-client-key=" + cert("apiserver-kubelet-client.key"),
			// The node's name is in no DNS.
			"--kubelet-preferred-address-types=InternalIP",
			"--proxy-client-cert-file=" + cert("front-proxy-client.crt"),
			"--proxy-client-key-file=" + cert("front-proxy-client.key"),
			"--requestheader-client-ca-file=" + cert("front-proxy-ca.crt"),
			"--requestheader-allowed-names=front-proxy-client",
			"--requestheader-extra-headers-prefix=X-Remote-Extra-",
			"--requestheader-group-headers=X-Remote-Group",
			"--requestheader-username-headers=X-Remote-User",
			"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
			"--service-account-key-file=" + cert("sa.pub"),
			"--service-account-signing-key-file=" + cert("sa.key"),
			"--service-cluster-ip-range=" + layout.ServiceCIDR,
			"--audit-policy-file=" + configPath("audit-policy.yaml"),
			"--audit-log-path=" + layout.AuditLog,
			// In MB. Nothing is thrown away before it was looked at.
			"--audit-log-maxsize=500",
		}
	case ControllerManager:
		kubeconfig := kubeconfigPath("controller-manager")
		d.ConfigFiles = []string{kubeconfig}
		d.Args = []string{
			"--bind-address=127.0.0.1",
			"--kubeconfig=" + kubeconfig,
			"--authentication-kubeconfig=" + kubeconfig,
			"--authorization-kubeconfig=" + kubeconfig,
			"--client-ca-file=" + cert("ca.crt"),
			"--requestheader-client-ca-file=" + cert("front-proxy-ca.crt"),
			"--cluster-name=" + layout.ClusterName,
			"--cluster-signing-cert-file=" + cert("ca.crt"),
			"--cluster-signing-key-file=" + cert("ca.key"),
			"--root-ca-file=" + cert("ca.crt"),
			"--service-account-private-key-file=" + cert("sa.key"),
			"--use-service-account-credentials=true",
			"--controllers=*,bootstrapsigner,tokencleaner",
			"--flex-volume-plugin-dir=" + filepath.Join(layout.StateDir, "volume-plugins"),
			// There is one, ever: after a kill it need not wait for its own lease.
			"--leader-elect=false",
		}
	case Kubelet:
		d.ConfigFiles = []string{configPath("kubelet.yaml"), kubeconfigPath("kubelet")}
		d.Args = []string{
			"--config=" + configPath("kubelet.yaml"),
			"--kubeconfig=" + kubeconfigPath("kubelet"),
			"--hostname-override=" + layout.NodeName,
			"--node-ip=" + nodeIP,
		}
	case Proxy:
		d.ConfigFiles = []string{configPath("kube-proxy.yaml"), kubeconfigPath("kube-proxy")}
		d.Args = []string{"--config=" + configPath("kube-proxy.yaml")}
	case Scheduler:
		return nil
	}
	return d
}

// programName is the file name of a component's program.
func programName(c Component) string {
	switch c {
	case Containerd, Etcd, Kubelet:
		return string(c)
	default:
		return "kube-" + string(c)
	}
}
