package remotepool

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"sigs.k8s.io/yaml"
)

// ClientConfig is the content of client.yaml.
type ClientConfig struct {
	// CACertPath is the file with the certificate that servers are checked by.
	CACertPath string `json:"cacertpath"`
	// Token is what the client shows to servers.
	Token string `json:"token"`
	// Timeout bounds every request but that for GPUs, such as 5s.
	Timeout string `json:"timeout,omitempty"`
}

// DefaultTimeout is used where client.yaml has none.
const DefaultTimeout = 5 * time.Second

// ServersConfig is the content of servers.conf.
type ServersConfig struct {
	Servers []ServerEntry `json:"servers"`
}

// ServerEntry is a server with its addresses. Reachable is the one that the
// client reached last; older clients want it.
type ServerEntry struct {
	Reachable string   `json:"reachable,omitempty"`
	Addresses []string `json:"addresses"`
}

// Files are where a client reads.
type Files struct {
	// Home is the folder whose .bitfusion has client.yaml.
	Home string
	// Servers is servers.conf, and where it does not exist the one in
	// Home/.bitfusion is read.
	Servers string
	// Libraries is the folder of the client's own files, and LibraryPath a list
	// of folders of which one has LibraryName.
	Libraries   string
	LibraryPath string
}

// LibraryName is the library that a client needs to intercept calls.
const LibraryName = "libbitfusion.so"

// readClientConfig reads client.yaml and the certificates that it names.
func (f Files) readClientConfig() (ClientConfig, *x509.CertPool, time.Duration, error) {
	path := filepath.Join(f.Home, ".bitfusion", "client.yaml")
	data, err := os.ReadFile(path)
	if err != nil {
		return ClientConfig{}, nil, 0, err
	}
	var c ClientConfig
	if err := yaml.Unmarshal(data, &c); err != nil {
		return ClientConfig{}, nil, 0, fmt.Errorf("failed to parse %s: %w", path, err)
	}
	if c.Token == "" {
		return ClientConfig{}, nil, 0, fmt.Errorf("failed to parse %s: there is no token", path)
	}
	timeout := DefaultTimeout
	if c.Timeout != "" {
		if timeout, err = time.ParseDuration(c.Timeout); err != nil || timeout <= 0 {
			return ClientConfig{}, nil, 0, fmt.Errorf("failed to parse %s: the timeout %q is no duration such as 5s", path, c.Timeout)
		}
	}
	pem, err := os.ReadFile(c.CACertPath)
	if err != nil {
		return ClientConfig{}, nil, 0, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return ClientConfig{}, nil, 0, fmt.Errorf("failed to parse %s: there is no certificate in it", c.CACertPath)
	}
	return c, pool, timeout, nil
}

// serversPath returns the file of the servers that exists.
func (f Files) serversPath() string {
	own := filepath.Join(f.Home, ".bitfusion", "servers.conf")
	if _, err := os.Stat(f.Servers); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(own); err == nil {
			return own
		}
	}
	return f.Servers
}

// readServers reads servers.conf, and opens it for writing: the client means to
// note which server it reached.
func (f Files) readServers() (path string, c ServersConfig, err error) {
	path = f.serversPath()
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return path, c, err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	var data bytes.Buffer
	if _, err := data.ReadFrom(file); err != nil {
		return path, c, err
	}
	if err := yaml.Unmarshal(data.Bytes(), &c); err != nil {
		return path, c, err
	}
	for i, s := range c.Servers {
		if len(s.Addresses) == 0 {
			return path, c, fmt.Errorf("server %d has no addresses", i)
		}
	}
	if len(c.Servers) == 0 {
		return path, c, errors.New("it has no servers")
	}
	return path, c, nil
}

func noteReachable(path string, c ServersConfig, server int, address string) error {
	if c.Servers[server].Reachable == address {
		return nil
	}
	c.Servers[server].Reachable = address
	data, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	// In place: the file is mounted by itself and cannot be replaced.
	return os.WriteFile(path, data, 0o644)
}

// checkLibraries says what is missing of the client's own files.
func (f Files) checkLibraries() error {
	entries, err := os.ReadDir(f.Libraries)
	if err != nil {
		return err
	}
	if len(entries) == 0 {
		return fmt.Errorf("%s is empty", f.Libraries)
	}
	for _, dir := range filepath.SplitList(f.LibraryPath) {
		if _, err := os.Stat(filepath.Join(dir, LibraryName)); err == nil && dir != "" {
			return nil
		}
	}
	return fmt.Errorf("error while loading shared libraries: %s: no folder of LD_LIBRARY_PATH=%s has it", LibraryName, f.LibraryPath)
}
