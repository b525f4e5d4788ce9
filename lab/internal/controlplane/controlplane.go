// Package controlplane runs the lab's etcd, kube-apiserver and kube-scheduler as
// children of the calling program, without kubelet and without a node: in a folder
// of its own, on ports of the loopback interface that were free, and without root.
// It has nothing in common with the lab's cluster but the programs, and may run
// beside it.
//
// No controllers run, but for those of claims where they are started. Nothing evicts
// pods from nodes that send no heartbeat, nothing runs Deployments, and pods need no
// service account.
//
// What is measured here stays in memory: etcd does not wait for the disk.
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/divvy-gpu/divvy/lab/internal/pki"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

const (
	// clusterName is what kubeconfig files call it.
	clusterName = "divvy-control-plane"
	// readyTimeout is how long a program may take to be ready.
	readyTimeout = 3 * time.Minute
	// stopGrace is how long a program may take to end after SIGTERM.
	stopGrace = 5 * time.Second
	loopback  = "127.0.0.1"
)

// ControlPlane is etcd and an API server, and what was started beside them. It is
// safe for concurrent use, but for Stop.
type ControlPlane struct {
	binDir, dir string
	server      string // URL of the API server
	ca          *pki.Authority

	// Etcd and APIServer are their processes.
	Etcd, APIServer *Process
}

// Start starts etcd and the API server from binDir and waits until it is ready.
// dir is an existing folder for all that they write, logs included, best an empty
// one. apiServer are further flags of the API server. After an error nothing runs.
func Start(ctx context.Context, binDir, dir string, apiServer ...string) (_ *ControlPlane, err error) {
	c := &ControlPlane{binDir: binDir, dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Stop())
		}
	}()
	ports, err := FreePorts(3)
	if err != nil {
		return nil, err
	}
	etcd := fmt.Sprintf("http://%s:%d", loopback, ports[0])
	peers := fmt.Sprintf("http://%s:%d", loopback, ports[1])
	c.server = fmt.Sprintf("https://%s:%d", loopback, ports[2])
	if err := c.credentials(); err != nil {
		return nil, err
	}
	if c.Etcd, err = c.Run("etcd",
		"--data-dir="+c.path("etcd-data"),
		"--listen-client-urls="+etcd, "--advertise-client-urls="+etcd,
		"--listen-peer-urls="+peers, "--initial-advertise-peer-urls="+peers, "--initial-cluster=default="+peers,
		"--unsafe-no-fsync", "--log-level=warn",
	); err != nil {
		return nil, err
	}
	if c.APIServer, err = c.Run("kube-apiserver", append([]string{
		// Nobody looks for the API server by the Service "kubernetes", whose address may
		// not be of the loopback interface: this is one that nobody has.
		"--advertise-address=192.0.2.1", "--endpoint-reconciler-type=none",
		"--bind-address=" + loopback,
		fmt.Sprintf("--secure-port=%d", ports[2]),
		"--etcd-servers=" + etcd,
		"--authorization-mode=RBAC",
		"--client-ca-file=" + c.path("ca.crt"),
		"--tls-cert-file=" + c.path("apiserver.crt"),
		"--tls-private-key-file=" + c.path("apiserver.key"),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + c.path("sa.pub"),
		"--service-account-signing-key-file=" + c.path("sa.key"),
		"--service-cluster-ip-range=10.0.0.0/24",
		// No controller makes service accounts, and none takes the mark away that
		// new nodes are not ready.
		"--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
		"--delete-collection-workers=8",
	}, apiServer...)...); err != nil {
		return nil, err
	}
	err = c.ready(ctx)
	return c, err
}

// credentials makes keys, certificates and the administrator's kubeconfig file.
func (c *ControlPlane) credentials() error {
	store := pki.Store{Dir: c.dir}
	var err error
	if c.ca, err = store.Authority("ca", "kubernetes"); err != nil {
		return err
	}
	server := pki.Profile{CommonName: "kube-apiserver", Server: true, Names: []string{loopback, "localhost", "10.0.0.1"}}
	if _, err := store.Certificate("apiserver", c.ca, server); err != nil {
		return err
	}
	if err := store.KeyPair("sa"); err != nil {
		return err
	}
	_, err = c.KubeconfigFor("admin", "kubernetes-admin", "system:masters")
	return err
}

func (c *ControlPlane) ready(ctx context.Context) error {
	client, err := c.Client()
	if err != nil {
		return err
	}
	return c.await(ctx, c.APIServer, func(ctx context.Context) error {
		_, err := client.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		return err
	})
}

// await calls ask until it returns nil, the process ends, or the time is up.
func (c *ControlPlane) await(ctx context.Context, p *Process, ask func(context.Context) error) error {
	return poll.Until(ctx, readyTimeout, p.Name()+", whose log is "+p.LogPath(), func(ctx context.Context) error {
		for _, needed := range []*Process{c.Etcd, c.APIServer, p} {
			if !needed.Running() {
				return fmt.Errorf("%s ended (%w): %w; its log %s ends with:\n%s", needed.Name(), poll.ErrHopeless, needed.Err(),
					needed.LogPath(), needed.LogTail(3))
			}
		}
		attempt, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		return ask(attempt)
	})
}

// Stop kills all processes, the API server before etcd: after SIGTERM the API server would
// wait for watches to end, and what the processes have in memory is not needed again. What
// they wrote stays in the folder. It may be called again.
func (c *ControlPlane) Stop() error {
	var errs []error
	for _, p := range []*Process{c.APIServer, c.Etcd} {
		if p != nil {
			errs = append(errs, p.Kill())
		}
	}
	return errors.Join(errs...)
}

// Dir is the folder that Start was given.
func (c *ControlPlane) Dir() string { return c.dir }

func (c *ControlPlane) path(name string) string { return filepath.Join(c.dir, name) }

// Kubeconfig is the path of the administrator's kubeconfig file.
func (c *ControlPlane) Kubeconfig() string { return c.path("admin.conf") }

// KubeconfigFor makes a kubeconfig file for a user and returns its path.
func (c *ControlPlane) KubeconfigFor(file, user string, groups ...string) (string, error) {
	identity, err := c.ca.Issue(pki.Profile{CommonName: user, Organizations: groups, Client: true})
	if err != nil {
		return "", err
	}
	data, err := pki.Kubeconfig(c.server, clusterName, user, c.ca, identity)
	if err != nil {
		return "", err
	}
	path := c.path(file + ".conf")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		return "", fmt.Errorf("write the kubeconfig of %s: %w", user, err)
	}
	return path, nil
}

// RESTConfig is that of an administrator's client without limits of its own.
func (c *ControlPlane) RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig())
	if err != nil {
		return nil, fmt.Errorf("read the administrator's kubeconfig: %w", err)
	}
	config.QPS, config.Burst = -1, -1
	return config, nil
}

// Client is an administrator's client, which speaks protobuf.
func (c *ControlPlane) Client() (kubernetes.Interface, error) {
	config, err := c.RESTConfig()
	if err != nil {
		return nil, err
	}
	config.ContentType = "application/vnd.kubernetes.protobuf"
	config.AcceptContentTypes = config.ContentType + ",application/json"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client of the control plane: %w", err)
	}
	return client, nil
}

// Run starts one of the lab's programs.
func (c *ControlPlane) Run(program string, args ...string) (*Process, error) {
	path, err := c.own(program)
	if err != nil {
		return nil, err
	}
	return StartProcess(program, path, c.path(program+".log"), nil, args...)
}

// own returns a name of the program that is in this folder. The lab's cluster knows
// its processes by the path of their program, and would take ours for its own.
func (c *ControlPlane) own(program string) (string, error) {
	from, to := filepath.Join(c.binDir, program), filepath.Join(c.dir, "bin", program)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return "", fmt.Errorf("make a folder for programs: %w", err)
	}
	err := os.Link(from, to)
	switch {
	case err == nil, errors.Is(err, fs.ErrExist):
		return to, nil
	case errors.Is(err, fs.ErrNotExist):
		return "", fmt.Errorf("there is no program %s: %w", from, err)
	}
	data, err := os.ReadFile(from) // a link cannot lead to another file system
	if err != nil {
		return "", fmt.Errorf("copy a program: %w", err)
	}
	if err := os.WriteFile(to, data, 0o755); err != nil {
		return "", fmt.Errorf("copy a program: %w", err)
	}
	return to, nil
}

// FreePorts returns ports of the loopback interface on which nobody listens. That
// nobody takes one before the caller does is likely, not certain.
func FreePorts(n int) ([]int, error) {
	ports := make([]int, 0, n)
	for range n {
		listener, err := net.Listen("tcp", loopback+":0")
		if err != nil {
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		defer listener.Close() //nolint:errcheck,gocritic // held until all are known, so that they differ
		address, ok := listener.Addr().(*net.TCPAddr)
		if !ok {
			return nil, fmt.Errorf("find a free port: %s is none", listener.Addr())
		}
		ports = append(ports, address.Port)
	}
	return ports, nil
}
