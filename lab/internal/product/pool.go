package product

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	_ "embed" // the manifest of the servers
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/image"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/pki"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/remotepool"
)

// Names of the remote pool in the cluster.
const (
	// PoolNamespace is where the chart puts the webhook.
	PoolNamespace = "bwki"
	// PoolWebhook is its Deployment, PoolDaemon the DaemonSet that offers
	// pool.Resource.
	PoolWebhook = "bitfusion-webhook-deployment"
	PoolDaemon  = "bitfusion-device-plugin"
	// PoolServer names the stand-in for the pool's servers, and its namespace:
	// they are no part of the product.
	PoolServer = "remote-pool"
	// PoolLabel marks namespaces whose pods may use the pool.
	PoolLabel = "divvy.dev/pool"
	// TokenNamespace is where the token of the pool is imported to.
	TokenNamespace = "kube-system"
)

// BenchmarkDir is where the pods of the user guide expect TensorFlow's
// benchmarks on the node.
const BenchmarkDir = "/home/benchmarks"

// poolServers are the servers of the lab's pool. Their addresses are of
// services, in the range of the cluster.
var poolServers = remotepool.Inventory{Servers: []remotepool.Server{
	{
		Hostname: "bf-server", Address: "10.96.56.1:56001", Listen: ":56001", CUDA: "11.2", Driver: "460.73.01",
		GPUs: slices.Repeat([]remotepool.GPU{{Name: "Tesla V100-PCIE-16GB", MemoryMB: 16160}}, 4),
	},
	{
		Hostname: "bf-server2", Address: "10.96.56.2:56001", Listen: ":56002", CUDA: "11.2", Driver: "460.73.01", RDMA: true,
		GPUs: slices.Repeat([]remotepool.GPU{{Name: "Tesla T4", MemoryMB: 15109}}, 2),
	},
}}

// PoolServers returns the servers of the lab's pool.
func PoolServers() remotepool.Inventory { return poolServers }

// poolDir keeps the keys and the token of the pool.
var poolDir = filepath.Join(layout.StateDir, "pool")

// TokenFile returns the token of the pool as an administrator downloads it.
func TokenFile() string { return filepath.Join(poolDir, "CA7WPsj.tar") }

// setUpPool loads the images of the user guide and runs the pool's servers.
func setUpPool(ctx context.Context, o Options) error {
	labDir := filepath.Join(o.RepositoryDir, "lab")
	if err := build.RunGo(ctx, labDir, []string{"CGO_ENABLED=0"}, nil,
		"build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", poolDir+"/", "./cmd/bitfusion",
		"./cmd/pool-server"); err != nil {
		return fmt.Errorf("build the pool's programs: %w", err)
	}
	serverImage, err := loadPoolImages(ctx, o.Cluster)
	if err != nil {
		return err
	}
	secret, err := poolSecret()
	if err != nil {
		return err
	}
	if err := o.Cluster.MakeFolder(BenchmarkDir); err != nil {
		return err
	}
	return runPoolServers(ctx, o.Cluster, serverImage, secret)
}

// loadPoolImages makes the images and returns the name of the server's, which
// changes with its content.
func loadPoolImages(ctx context.Context, c *cluster.Cluster) (server string, err error) {
	clients, err := remotepool.ClientSpecs(filepath.Join(poolDir, "bitfusion"))
	if err != nil {
		return "", err
	}
	benchmark, err := remotepool.BenchmarkSpec()
	if err != nil {
		return "", err
	}
	other, err := remotepool.OtherSpec()
	if err != nil {
		return "", err
	}
	for _, spec := range append(clients, benchmark, other, remotepool.ServerSpec(filepath.Join(poolDir, "pool-server"))) {
		img, err := image.Build(spec)
		if err != nil {
			return "", err
		}
		name := spec.Name
		if name == remotepool.ServerImage {
			digest, err := img.Digest()
			if err != nil {
				return "", fmt.Errorf("digest of image %s: %w", name, err)
			}
			name += ":" + digest.Hex[:12]
			server = name
		}
		if _, err := c.Images().Load(ctx, img, name); err != nil {
			return "", err
		}
	}
	return server, nil
}

// poolSecret makes the servers' keys and token where they are missing, writes
// TokenFile and returns what the servers read.
func poolSecret() (map[string][]byte, error) {
	store := pki.Store{Dir: filepath.Join(poolDir, "pki")}
	authority, err := store.Authority("ca", "divvy-lab-pool")
	if err != nil {
		return nil, err
	}
	names := []string{"localhost"}
	for _, s := range poolServers.Servers {
		host, _, _ := strings.Cut(s.Address, ":")
		names = append(names, host, s.Hostname)
	}
	certificate, err := store.Certificate("server", authority, pki.Profile{CommonName: PoolServer, Names: names, Server: true})
	if err != nil {
		return nil, err
	}
	key, err := certificate.KeyPEM()
	if err != nil {
		return nil, err
	}
	token, err := poolToken()
	if err != nil {
		return nil, err
	}
	if err := writeToken(TokenFile(), authority.CertificatePEM(), token); err != nil {
		return nil, err
	}
	servers, err := yaml.Marshal(poolServers)
	if err != nil {
		return nil, fmt.Errorf("the pool's servers: %w", err)
	}
	return map[string][]byte{"tls.crt": certificate.CertificatePEM(), "tls.key": key, "token": []byte(token), "servers.yaml": servers}, nil
}

func poolToken() (string, error) {
	path := filepath.Join(poolDir, "token")
	data, err := os.ReadFile(path)
	if err == nil && len(data) > 0 {
		return string(data), nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("the pool's token: %w", err)
	}
	var random [24]byte
	if _, err := rand.Read(random[:]); err != nil {
		return "", fmt.Errorf("the pool's token: %w", err)
	}
	token := hex.EncodeToString(random[:])
	if err := os.WriteFile(path, []byte(token), 0o600); err != nil {
		return "", fmt.Errorf("the pool's token: %w", err)
	}
	return token, nil
}

// writeToken writes a token in the form in which it is downloaded: a tar of
// ca.crt, client.yaml and servers.conf.
func writeToken(path string, ca []byte, token string) error {
	client := fmt.Sprintf("cacertpath: /etc/bitfusion/tls/ca.crt\ntoken: %s\ntimeout: 5s\n", token)
	var servers strings.Builder
	servers.WriteString("servers:\n")
	for _, s := range poolServers.Servers {
		fmt.Fprintf(&servers, "- addresses:\n  - %s\n", s.Address)
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	for _, f := range []struct {
		name    string
		content []byte
	}{{pool.CAKey, ca}, {pool.ClientKey, []byte(client)}, {pool.ServersKey, []byte(servers.String())}} {
		header := &tar.Header{Name: f.name, Mode: 0o600, Size: int64(len(f.content)), ModTime: time.Unix(0, 0), Typeflag: tar.TypeReg}
		if err := w.WriteHeader(header); err != nil {
			return fmt.Errorf("write a token: %w", err)
		}
		if _, err := w.Write(f.content); err != nil {
			return fmt.Errorf("write a token: %w", err)
		}
	}
	if err := w.Close(); err != nil {
		return fmt.Errorf("write a token: %w", err)
	}
	if err := os.WriteFile(path, archive.Bytes(), 0o600); err != nil {
		return fmt.Errorf("write a token: %w", err)
	}
	return nil
}

// poolServerTimeout is how long the servers may take to be ready.
const poolServerTimeout = time.Minute

// runPoolServers puts the servers into the cluster and waits until they answer.
func runPoolServers(ctx context.Context, c *cluster.Cluster, serverImage string, secret map[string][]byte) error {
	client, err := cluster.Client()
	if err != nil {
		return err
	}
	manifest, err := poolManifest(serverImage, secret)
	if err != nil {
		return err
	}
	if _, err := command(ctx, manifest, c.Program("kubectl"), "apply", "--server-side", "--force-conflicts",
		"--field-manager=divvy-lab", "--filename=-"); err != nil {
		return fmt.Errorf("run the pool's servers: %w", err)
	}
	return poll.Until(ctx, poolServerTimeout, "the servers of the pool", func(ctx context.Context) error {
		deployment, err := client.AppsV1().Deployments(PoolServer).Get(ctx, PoolServer, metav1.GetOptions{})
		if err != nil {
			return err
		}
		return deploymentReady(deployment)
	})
}

//go:embed pool-servers.yaml
var poolTemplate string

func poolManifest(serverImage string, secret map[string][]byte) ([]byte, error) {
	data, err := json.Marshal(secret) // sorted by keys
	if err != nil {
		return nil, fmt.Errorf("the pool's servers: %w", err)
	}
	type server struct{ Name, IP, Port, Listen string }
	var servers []server
	for _, s := range poolServers.Servers {
		ip, port, _ := strings.Cut(s.Address, ":")
		servers = append(servers, server{s.Hostname, ip, port, strings.TrimPrefix(s.Listen, ":")})
	}
	var out bytes.Buffer
	err = template.Must(template.New("").Parse(poolTemplate)).Execute(&out, map[string]any{
		"Image": serverImage, "Secret": string(data), "Hash": fmt.Sprintf("h%x", sha256.Sum256(data)), "Servers": servers,
	})
	if err != nil {
		return nil, fmt.Errorf("the pool's servers: %w", err)
	}
	return out.Bytes(), nil
}

// ImportToken gives the pool's token to the cluster as an administrator does, and
// returns what kubectl-divvy said.
func ImportToken(ctx context.Context) (string, error) {
	return command(ctx, nil, filepath.Join(programDir, "kubectl-divvy"), "pool", "import", TokenFile(), "--namespace", TokenNamespace)
}

// TokenSecrets are the secrets that ImportToken makes in TokenNamespace.
func TokenSecrets() []string {
	return []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret}
}

// ForgetToken removes what ImportToken made.
func ForgetToken(ctx context.Context) error {
	client, err := cluster.Client()
	if err != nil {
		return err
	}
	for _, name := range TokenSecrets() {
		err := client.CoreV1().Secrets(TokenNamespace).Delete(ctx, name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("remove the pool's token: %w", err)
		}
	}
	return nil
}

// RemovePool takes the pool's servers and its token out of the cluster. What the
// chart installed is helm's to remove.
func RemovePool(ctx context.Context) error {
	client, err := cluster.Client()
	if err != nil {
		return err
	}
	err = client.CoreV1().Namespaces().Delete(ctx, PoolServer, metav1.DeleteOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("remove the pool's servers: %w", err)
	}
	return ForgetToken(ctx)
}

// HasPool reports whether the pool's servers run in the cluster.
func HasPool(ctx context.Context, client kubernetes.Interface) (bool, error) {
	_, err := client.CoreV1().Namespaces().Get(ctx, PoolServer, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for the pool's servers: %w", err)
	}
	return true, nil
}

// PoolBooks asks the pool's servers what they have granted.
func PoolBooks(ctx context.Context) (remotepool.Books, error) {
	authority, err := os.ReadFile(filepath.Join(poolDir, "pki", "ca.crt"))
	if err != nil {
		return remotepool.Books{}, fmt.Errorf("ask the pool's servers: %w", err)
	}
	token, err := os.ReadFile(filepath.Join(poolDir, "token"))
	if err != nil {
		return remotepool.Books{}, fmt.Errorf("ask the pool's servers: %w", err)
	}
	return remotepool.AskBooks(ctx, poolServers.Servers[0].Address, string(token), authority)
}

// SetToken changes the token that the pool's servers accept; the servers start
// anew. The next ImportToken gives it to the cluster.
func SetToken(ctx context.Context, c *cluster.Cluster, token string) error {
	if err := os.WriteFile(filepath.Join(poolDir, "token"), []byte(token), 0o600); err != nil {
		return fmt.Errorf("the pool's token: %w", err)
	}
	secret, err := poolSecret()
	if err != nil {
		return err
	}
	client, err := cluster.Client()
	if err != nil {
		return err
	}
	deployment, err := client.AppsV1().Deployments(PoolServer).Get(ctx, PoolServer, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("look at the pool's servers: %w", err)
	}
	return runPoolServers(ctx, c, deployment.Spec.Template.Spec.Containers[0].Image, secret)
}
