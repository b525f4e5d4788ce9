package registry_test

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/random"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/pelletier/go-toml/v2"

	"github.com/divvy-gpu/divvy/lab/internal/registry"
)

// freeAddress is one that no program listens at.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // it only held the port
	return l.Addr().String()
}

// transportOf trusts what the environment names.
func transportOf(t *testing.T, environment []string) http.RoundTripper {
	t.Helper()
	dir, found := strings.CutPrefix(environment[0], "SSL_CERT_DIR=")
	if !found {
		t.Fatalf("environment %v", environment)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	for _, entry := range entries {
		data, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil || !pool.AppendCertsFromPEM(data) {
			t.Errorf("%s holds no certificate: %v", entry.Name(), err)
		}
	}
	return &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}
}

func TestRegistry(t *testing.T) {
	dir := t.TempDir()
	o := registry.Options{
		Address: freeAddress(t), User: "me", Password: "secret", Mirrors: []string{"ghcr.io"},
		Dir: filepath.Join(dir, "keys"), HostsDir: filepath.Join(dir, "certs.d"),
	}
	r, err := registry.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{o.Address, "ghcr.io"} {
		data, err := os.ReadFile(filepath.Join(o.HostsDir, host, "hosts.toml"))
		if err != nil {
			t.Fatal(err)
		}
		var hosts struct {
			Server string
			Host   map[string]struct {
				Capabilities []string
				CA           string
			}
		}
		if err := toml.Unmarshal(data, &hosts); err != nil {
			t.Fatal(err)
		}
		from := hosts.Host["https://"+o.Address]
		if hosts.Server != "https://"+host || !slices.Contains(from.Capabilities, "pull") {
			t.Errorf("%s: %+v", host, hosts)
		}
		if _, err := os.Stat(from.CA); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}

	// Layers larger than a window, several at once.
	image, err := random.Image(8<<20, 4)
	if err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag(o.Address + "/team/program:1")
	if err != nil {
		t.Fatal(err)
	}
	trusted := transportOf(t, r.Environment())
	if err := remote.Write(tag, image, remote.WithTransport(trusted)); !status(err, http.StatusUnauthorized) {
		t.Errorf("without a login: %v", err)
	}
	login := remote.WithAuth(&authn.Basic{Username: o.User, Password: o.Password})
	if err := remote.Write(tag, image, remote.WithTransport(trusted), login); err != nil {
		t.Fatal(err)
	}
	if pulled := r.Pulled(); len(pulled) > 0 {
		t.Errorf("containerd has pulled %v", pulled)
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+o.Address+"/v2/team/program/manifests/1",
		http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("User-Agent", "containerd/v2.2.0")
	request.SetBasicAuth(o.User, o.Password)
	response, err := (&http.Client{Transport: trusted}).Do(request)
	if err != nil {
		t.Fatal(err)
	}
	if err := response.Body.Close(); err != nil || response.StatusCode != http.StatusOK {
		t.Errorf("%s, %v", response.Status, err)
	}
	if got, want := r.Pulled(), []string{"team/program"}; !slices.Equal(got, want) {
		t.Errorf("containerd has pulled %v, want %v", got, want)
	}

	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(o.HostsDir); err != nil || len(left) > 0 {
		t.Errorf("containerd's folder still has %v, %v", left, err)
	}
}

func status(err error, code int) bool {
	var answer *transport.Error
	return errors.As(err, &answer) && answer.StatusCode == code
}
