// Package node is the program divvy-node: its flags, and how its parts are put
// together.
package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/backend"
	"github.com/divvy-gpu/divvy/internal/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/kube"
	"github.com/divvy-gpu/divvy/internal/logging"
	"github.com/divvy-gpu/divvy/internal/nodeagent"
	"github.com/divvy-gpu/divvy/internal/version"
)

// Options are the flags of divvy-node. Everything else is in the configuration
// file.
type Options struct {
	// ConfigFile is the configuration, see api/config/v1alpha1; "" for the
	// defaults.
	ConfigFile string
	// NodeName is the name of this node's object.
	NodeName string
	// Kubeconfig says how to reach the API server, "" for the way that a pod
	// has.
	Kubeconfig string
}

// Command returns the command line of divvy-node.
func Command(name string) *cobra.Command {
	var o Options
	cmd := &cobra.Command{
		Use:           name,
		Short:         "Offers the accelerators of this node to its pods",
		Args:          cobra.NoArgs,
		Version:       version.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return Run(cmd.Context(), o)
		},
	}
	cmd.SetVersionTemplate(version.String(name) + "\n")
	cmd.Flags().StringVar(&o.ConfigFile, "config", os.Getenv("DIVVY_CONFIG"), "configuration file; without it the defaults hold (environment DIVVY_CONFIG)")
	cmd.Flags().StringVar(&o.NodeName, "node-name", os.Getenv("NODE_NAME"), "name of this node in the cluster (environment NODE_NAME)")
	cmd.Flags().StringVar(&o.Kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"), "how to reach the API server; without it, as a pod does (environment KUBECONFIG)")
	return cmd
}

// Run runs the node daemon until ctx ends.
func Run(ctx context.Context, o Options) error {
	if o.NodeName == "" {
		return errors.New("the node's name is missing; give --node-name or set NODE_NAME")
	}
	cfg := config.Default()
	if o.ConfigFile != "" {
		var err error
		if cfg, err = config.Load(o.ConfigFile, vendors.Names()); err != nil {
			return err
		}
	}
	level, err := logging.ParseLevel(cfg.LogLevel)
	if err != nil {
		return err
	}
	log, closeLog := logging.Setup(logging.Options{File: cfg.LogFile, Level: level})
	defer closeLog() //nolint:errcheck // the last line is written; nobody is left to tell
	ctx = klog.NewContext(ctx, log)
	log.Info("Starting", "version", version.Version, "commit", version.Commit, "node", o.NodeName)

	unlock, err := claim(ctx, cfg.StateDir)
	if err != nil {
		return err
	}
	defer unlock()
	clients, err := kube.Connect(o.Kubeconfig, "divvy-node/"+version.Version)
	if err != nil {
		return err
	}
	backends, err := open(cfg)
	if err != nil {
		return err
	}
	defer func() {
		for _, b := range backends {
			if err := b.Close(); err != nil {
				log.Error(err, "Closing a vendor's library", "vendor", b.Vendor())
			}
		}
	}()
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	agent, err := nodeagent.New(ctx, nodeagent.Options{
		Config:   cfg,
		Node:     o.NodeName,
		Client:   clients.Kubernetes,
		Keys:     kube.NewKeyring(cfg.GrantKeyFile),
		Backends: backends,
		Registry: registry,
	})
	if err != nil {
		return err
	}
	return serve(ctx, cfg.Listen, agent, registry)
}

// open makes the backends that the resources name.
func open(cfg config.NodeConfig) (map[string]backend.Backend, error) {
	out := map[string]backend.Backend{}
	for _, r := range cfg.Resources {
		if _, ok := out[r.Vendor]; ok {
			continue
		}
		b, err := vendors.New(r.Vendor, backend.Options{DriverRoot: cfg.DriverRoot, LibraryPath: cfg.Libraries[r.Vendor]})
		if err != nil {
			return nil, err
		}
		out[r.Vendor] = b
	}
	return out, nil
}

// claim makes sure that one divvy-node runs on the node: a second one would
// take the sockets of the first. It waits until the first has gone.
func claim(ctx context.Context, stateDir string) (release func(), err error) {
	if err := os.MkdirAll(stateDir, 0o750); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	path := filepath.Join(stateDir, "divvy-node.lock")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	for told := false; ; told = true {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		if !told {
			klog.FromContext(ctx).Info("Another divvy-node runs on this node; waiting until it ends", "lock", path)
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(errors.New("another divvy-node runs on this node"), f.Close())
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// serve runs the agent beside the HTTP server of probes and metrics; when one
// ends, the other is stopped.
func serve(ctx context.Context, listen string, agent *nodeagent.Agent, registry *prometheus.Registry) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	server := &http.Server{
		Addr:              listen,
		Handler:           handler(agent, registry),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
	}
	var work sync.WaitGroup
	work.Go(func() {
		if err := server.ListenAndServe(); err != nil && !errors.Is(err, http.ErrServerClosed) {
			cancel(fmt.Errorf("serve probes and metrics: %w", err))
		}
	})
	work.Go(func() {
		if err := agent.Run(ctx); err != nil {
			cancel(err)
		}
	})
	<-ctx.Done()
	_ = server.Close() // a probe that is cut off is asked again
	work.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func handler(agent *nodeagent.Agent, registry *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, err error) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = io.WriteString(w, err.Error()+"\n")
			return
		}
		_, _ = io.WriteString(w, "ok\n")
	}
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) { answer(w, agent.Alive(r.Context())) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { answer(w, agent.Ready()) })
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return mux
}
