// Package cluster runs a one-node Kubernetes on this machine: etcd, the control
// plane, containerd and kubelet as background processes, kube-scheduler as a
// static pod. Up and Down bring it up and take it away without a trace; a
// Cluster opened on a running lab stops and starts its parts, for tests.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/divvy-gpu/divvy/lab/internal/host"
	"github.com/divvy-gpu/divvy/lab/internal/image"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
)

// recordPath is the file that says that the lab has been here.
var recordPath = filepath.Join(layout.StateDir, "record.json")

// lockPath is held by commands that change the lab. It lies outside of what
// they create and remove.
const lockPath = "/run/divvy-lab.lock"

// ErrDown is returned where a lab is needed and none was brought up.
var ErrDown = errors.New("the lab is not up: run `lab up` first")

// Cluster is a lab that was brought up. Its methods may be called from several
// goroutines, but two calls that act on one component must not overlap.
type Cluster struct {
	// BinDir is the folder of the cluster's programs, kubectl, helm and ctr among
	// them.
	BinDir string

	nodeIP string
	record *host.Record
}

// Open returns the lab on this machine, or ErrDown. Parts of it may be stopped.
func Open() (*Cluster, error) {
	record, err := host.LoadRecord(recordPath)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrDown
	}
	if err != nil {
		return nil, err
	}
	if len(record.BinDirs) == 0 || record.NodeIP == "" {
		return nil, fmt.Errorf("the lab's record %s is incomplete: run `lab down`", recordPath)
	}
	return &Cluster{BinDir: record.BinDirs[len(record.BinDirs)-1], nodeIP: record.NodeIP, record: record}, nil
}

// Lock keeps other commands from changing the lab until the returned function
// is called.
func Lock(ctx context.Context, out io.Writer) (func() error, error) {
	lock := flock.New(lockPath)
	locked, err := lock.TryLock()
	if err == nil && !locked {
		fmt.Fprintln(out, "Another lab command is running; waiting for it.")
		_, err = lock.TryLockContext(ctx, 200*time.Millisecond)
	}
	if err != nil {
		return nil, fmt.Errorf("lock the lab: %w", err)
	}
	return lock.Unlock, nil
}

// Program returns the path of a program of the cluster.
func (c *Cluster) Program(name string) string { return filepath.Join(c.BinDir, name) }

// RESTConfig returns the configuration of an administrator's client without
// limits of its own.
func RESTConfig() (*rest.Config, error) {
	config, err := clientcmd.BuildConfigFromFlags("", layout.AdminKubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read the lab's kubeconfig: %w", err)
	}
	config.QPS, config.Burst = -1, -1
	return config, nil
}

// Client returns an administrator's client.
func Client() (kubernetes.Interface, error) {
	config, err := RESTConfig()
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("make a client of the lab: %w", err)
	}
	return client, nil
}

// Images returns the image store of the node.
func (c *Cluster) Images() image.Store {
	return image.Store{CTR: c.Program("ctr"), Address: layout.ContainerdSocket, TempDir: layout.ImageDir}
}
