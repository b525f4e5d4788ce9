package product

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/pool/token"
	"github.com/divvy-gpu/divvy/lab/internal/pki"
	"github.com/divvy-gpu/divvy/lab/internal/remotepool"
)

func TestUsesPool(t *testing.T) {
	dir := t.TempDir()
	file := func(name, content string) string {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	file("lab/values/lab.yaml", "node: {}\n")
	on, off, other := file("on.yaml", "pool: {enabled: true}\n"), file("off.yaml", "pool: {enabled: false}\n"),
		file("other.yaml", "pool: {totalGPUMemory: 1}\n")
	tests := map[string]struct {
		values, set []string
		want        bool
	}{
		"nothing said":     {},
		"said":             {values: []string{on}, want: true},
		"later files win":  {values: []string{on, off}},
		"others say none":  {values: []string{on, other}, want: true},
		"set wins":         {values: []string{off}, set: []string{"pool.enabled=true"}, want: true},
		"set off":          {values: []string{on}, set: []string{"pool.enabled=false"}},
		"another key set":  {values: []string{on}, set: []string{"node.injection=cdi"}, want: true},
		"the last set one": {set: []string{"pool.enabled=true", "pool.enabled=false"}},
	}
	for name, test := range tests {
		got, err := usesPool(Options{RepositoryDir: dir, Values: test.values, Set: test.set})
		if err != nil || got != test.want {
			t.Errorf("%s: %t, %v; want %t", name, got, err, test.want)
		}
	}
	if _, err := usesPool(Options{RepositoryDir: dir, Values: []string{file("broken.yaml", "pool: [")}}); err == nil {
		t.Error("no error for values that are no YAML")
	}
}

// TestTokenIsAsDownloaded: what the lab hands to kubectl divvy pool import is a
// token without a fault, and names the lab's servers.
func TestTokenIsAsDownloaded(t *testing.T) {
	authority, err := pki.NewAuthority("pool")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "token.tar")
	if err := writeToken(path, authority.CertificatePEM(), "5ecre7"); err != nil {
		t.Fatal(err)
	}
	read, err := token.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	warnings, err := read.Check(time.Now())
	if err != nil || len(warnings) > 0 {
		t.Errorf("the token has faults: %v, %v", warnings, err)
	}
	servers, err := token.ParseServers(read.Servers)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := servers.Addresses(), []string{"10.96.56.1:56001", "10.96.56.2:56001"}; !slices.Equal(got, want) {
		t.Errorf("the token names %v, want %v", got, want)
	}
}

// What the lab configures its servers with, they read.
func TestServersReadTheirList(t *testing.T) {
	data, err := yaml.Marshal(PoolServers())
	if err != nil {
		t.Fatal(err)
	}
	read, err := remotepool.DecodeInventory(data)
	if err != nil || len(read.Servers) != 2 || len(read.Servers[0].GPUs) != 4 {
		t.Errorf("read %+v, %v", read, err)
	}
}
