package product

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/pool/token"
	"github.com/divvy-gpu/divvy/lab/internal/pki"
	"github.com/divvy-gpu/divvy/lab/internal/remotepool"
)

func TestValuesThatMatter(t *testing.T) {
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
	own := file("own.yaml", "scheduler: {mode: dedicated}\n")
	on, off, other := file("on.yaml", "pool: {enabled: true}\n"), file("off.yaml", "pool: {enabled: false}\n"),
		file("other.yaml", "pool: {totalGPUMemory: 1}\n")
	tests := map[string]struct {
		values, set []string
		want        chartValues
	}{
		"nothing said":     {},
		"said":             {values: []string{on}, want: chartValues{pool: true}},
		"later files win":  {values: []string{on, off}},
		"others say none":  {values: []string{on, other}, want: chartValues{pool: true}},
		"set wins":         {values: []string{off}, set: []string{"pool.enabled=true"}, want: chartValues{pool: true}},
		"set off":          {values: []string{on}, set: []string{"pool.enabled=false"}},
		"another key set":  {values: []string{on}, set: []string{"node.injection=cdi"}, want: chartValues{pool: true}},
		"the last set one": {set: []string{"pool.enabled=true", "pool.enabled=false"}},

		"a dedicated scheduler":      {values: []string{own, other}, want: chartValues{scheduler: true}},
		"divvy-scheduler":            {values: []string{on}, set: []string{"scheduler.mode=replace"}, want: chartValues{true, true}},
		"a dedicated scheduler, set": {values: []string{on}, set: []string{"scheduler.mode=dedicated"}, want: chartValues{true, true}},
		"another mode, set":          {values: []string{own}, set: []string{"scheduler.mode=none"}},
	}
	for name, test := range tests {
		got, err := readValues(Options{RepositoryDir: dir, Values: test.values, Set: test.set})
		if err != nil || got != test.want {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, test.want)
		}
	}
	if _, err := readValues(Options{RepositoryDir: dir, Values: []string{file("broken.yaml", "pool: [")}}); err == nil {
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

func TestPoolManifest(t *testing.T) {
	text, err := poolManifest("docker.io/divvy-gpu/lab-pool-server:1", map[string][]byte{"token": []byte("5ecre7"), "tls.key": {0, 255}})
	if err != nil {
		t.Fatal(err)
	}
	var secret corev1.Secret
	var deployment appsv1.Deployment
	var services [2]corev1.Service
	for i, document := range strings.Split(string(text), "\n---\n") {
		into := []any{&corev1.Namespace{}, &secret, &deployment, &services[0], &services[1]}[i]
		if err := yaml.UnmarshalStrict([]byte(document), into); err != nil {
			t.Errorf("%v:\n%s", err, document)
		}
	}
	if string(secret.Data["token"]) != "5ecre7" || string(secret.Data["tls.key"]) != "\x00\xff" {
		t.Errorf("Secret %+v", secret)
	}
	pod := deployment.Spec.Template
	if len(pod.Annotations["divvy-lab/servers"]) != 65 || pod.Spec.Containers[0].Image != "docker.io/divvy-gpu/lab-pool-server:1" ||
		*pod.Spec.Volumes[0].Secret.DefaultMode != 0o444 || pod.Spec.Containers[0].ReadinessProbe.TCPSocket.Port.IntVal != 56001 {
		t.Errorf("Deployment %+v", deployment)
	}
	for i, s := range poolServers.Servers {
		spec := services[i].Spec
		if services[i].Name != s.Hostname || fmt.Sprintf("%s:%d", spec.ClusterIP, spec.Ports[0].Port) != s.Address ||
			":"+spec.Ports[0].TargetPort.String() != s.Listen || !spec.PublishNotReadyAddresses {
			t.Errorf("Service %+v of %+v", services[i], s)
		}
	}
}
