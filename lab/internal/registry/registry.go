// Package registry serves a container registry as an administrator has one: over
// TLS with a CA of its own, with a login or without. Programs trust the CA by
// SSL_CERT_DIR, containerd by a hosts.toml. Images are kept in memory.
package registry

import (
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/divvy-gpu/divvy/lab/internal/pki"
)

// Options say what to serve.
type Options struct {
	// Address is the IP address and the port, such as 127.0.0.1:5443.
	Address string
	// User and Password are asked for unless both are empty.
	User, Password string
	// Mirrors are registries whose images containerd is to take from this one, such
	// as ghcr.io.
	Mirrors []string
	// Dir is a folder for keys; HostsDir is containerd's config_path.
	Dir, HostsDir string
}

// Registry is a registry that serves.
type Registry struct {
	options Options
	server  *http.Server
	ended   chan error
	images  http.Handler

	mu     sync.Mutex
	pulled map[string]bool
}

// Start starts a registry and has containerd trust it.
func Start(o Options) (*Registry, error) {
	host, _, err := net.SplitHostPort(o.Address)
	if err != nil {
		return nil, fmt.Errorf("start a registry: %w", err)
	}
	certificate, err := o.certificate(host)
	if err != nil {
		return nil, fmt.Errorf("start a registry: %w", err)
	}
	if err := o.trust(); err != nil {
		return nil, fmt.Errorf("have containerd trust a registry: %w", err)
	}
	listener, err := net.Listen("tcp", o.Address)
	if err != nil {
		return nil, fmt.Errorf("start a registry: %w", err)
	}
	quiet := log.New(io.Discard, "", 0)
	r := &Registry{
		options: o, ended: make(chan error, 1), pulled: map[string]bool{},
		images: registry.New(registry.WithReferrersSupport(true), registry.Logger(quiet)),
	}
	r.server = &http.Server{
		Handler: r, ErrorLog: quiet, ReadHeaderTimeout: 10 * time.Second,
		// HTTP/1: the library reads one upload after the other, for which those that
		// wait in the same connection of HTTP/2 would leave no window.
		Protocols: new(http.Protocols),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12},
	}
	r.server.Protocols.SetHTTP1(true)
	go func() { r.ended <- r.server.ServeTLS(listener, "", "") }()
	return r, nil
}

// Close ends the registry; its images are gone. containerd trusts it no more.
func (r *Registry) Close() error {
	err := r.server.Close()
	if end := <-r.ended; !errors.Is(end, http.ErrServerClosed) {
		err = errors.Join(err, end)
	}
	for _, dir := range r.options.hosts() {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	return err
}

// Environment has programs trust the registry beside all that they trust anyway.
func (r *Registry) Environment() []string { return []string{"SSL_CERT_DIR=" + r.options.caDir()} }

// Pulled returns the repositories that containerd has asked for images.
func (r *Registry) Pulled() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for name := range r.pulled {
		all = append(all, name)
	}
	slices.Sort(all)
	return all
}

// ServeHTTP implements http.Handler.
func (r *Registry) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	if o := r.options; o.User != "" || o.Password != "" {
		user, password, _ := request.BasicAuth()
		if subtle.ConstantTimeCompare([]byte(user+":"+password), []byte(o.User+":"+o.Password)) != 1 {
			w.Header().Set("WWW-Authenticate", `Basic realm="lab"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}`, http.StatusUnauthorized)
			return
		}
	}
	name, _, manifest := strings.Cut(strings.TrimPrefix(request.URL.Path, "/v2/"), "/manifests/")
	if manifest && strings.HasPrefix(request.UserAgent(), "containerd/") {
		r.mu.Lock()
		r.pulled[name] = true
		r.mu.Unlock()
	}
	r.images.ServeHTTP(w, request)
}

// caDir has the CA and nothing else: programs read every file of it.
func (o Options) caDir() string { return filepath.Join(o.Dir, "ca") }

func (o Options) certificate(host string) (tls.Certificate, error) {
	authority, err := pki.Store{Dir: o.Dir}.Authority("ca", "divvy-lab-registry")
	if err != nil {
		return tls.Certificate{}, err
	}
	if err := os.MkdirAll(o.caDir(), 0o755); err != nil {
		return tls.Certificate{}, err
	}
	if err := os.WriteFile(filepath.Join(o.caDir(), "ca.crt"), authority.CertificatePEM(), 0o644); err != nil {
		return tls.Certificate{}, err
	}
	server, err := authority.Issue(pki.Profile{CommonName: "registry", Names: []string{host}, Server: true})
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := server.KeyPEM()
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(server.CertificatePEM(), key)
}

// hosts are containerd's folders for the registry and for what it mirrors.
func (o Options) hosts() []string {
	var dirs []string
	for _, host := range append([]string{o.Address}, o.Mirrors...) {
		dirs = append(dirs, filepath.Join(o.HostsDir, host))
	}
	return dirs
}

// trust writes containerd's hosts.toml, which it reads at each pull.
func (o Options) trust() error {
	for _, dir := range o.hosts() {
		text := fmt.Sprintf("server = \"https://%s\"\n\n[host.\"https://%s\"]\n  capabilities = [\"pull\", \"resolve\"]\n  ca = %q\n",
			filepath.Base(dir), o.Address, filepath.Join(o.caDir(), "ca.crt"))
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}
