package cluster

import (
	"fmt"
	"path/filepath"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/pki"
)

// certificate is one certificate of the cluster: a file below the PKI folder,
// or the identity in a kubeconfig file.
type certificate struct {
	name    string
	profile pki.Profile
}

// serverURL is where every client finds the API server.
func serverURL(nodeIP string) string {
	return fmt.Sprintf("https://%s:%d", nodeIP, layout.APIServerPort)
}

// clusterCertificates are signed by the cluster's authority.
func clusterCertificates(nodeIP string) []certificate {
	return []certificate{
		{"apiserver", pki.Profile{CommonName: "kube-apiserver", Server: true, Names: []string{
			layout.NodeName, "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
			"kubernetes.default.svc.cluster.local", "127.0.0.1", layout.APIServerServiceIP, nodeIP,
		}}},
		{"apiserver-kubelet-client", pki.Profile{
			CommonName: "kube-apiserver-kubelet-client", Organizations: []string{"system:masters"}, Client: true,
		}},
		{"kubelet-serving", pki.Profile{
			CommonName: "system:node:" + layout.NodeName, Organizations: []string{"system:nodes"}, Server: true,
			Names: []string{layout.NodeName, nodeIP},
		}},
	}
}

// etcdCertificates are signed by etcd's own authority, so that a certificate
// of the cluster opens no way past the API server.
func etcdCertificates(nodeIP string) []certificate {
	names := []string{layout.NodeName, "localhost", "127.0.0.1", nodeIP}
	return []certificate{
		{"etcd/server", pki.Profile{CommonName: layout.NodeName, Names: names, Server: true, Client: true}},
		{"etcd/peer", pki.Profile{CommonName: layout.NodeName, Names: names, Server: true, Client: true}},
		{"apiserver-etcd-client", pki.Profile{CommonName: "kube-apiserver-etcd-client", Client: true}},
	}
}

// users are the identities that get a kubeconfig file of their name.
func users() []certificate {
	return []certificate{
		{"admin", pki.Profile{CommonName: "kubernetes-admin", Organizations: []string{"system:masters"}, Client: true}},
		{"kubelet", pki.Profile{
			CommonName: "system:node:" + layout.NodeName, Organizations: []string{"system:nodes"}, Client: true,
		}},
		{"controller-manager", pki.Profile{CommonName: "system:kube-controller-manager", Client: true}},
		{"scheduler", pki.Profile{CommonName: "system:kube-scheduler", Client: true}},
		{"kube-proxy", pki.Profile{CommonName: "system:kube-proxy", Client: true}},
	}
}

// ensureCredentials makes the cluster's keys, certificates and kubeconfig files
// as far as they are missing.
func ensureCredentials(nodeIP string) error {
	store := pki.Store{Dir: layout.PKIDir}
	ca, err := store.Authority("ca", "kubernetes")
	if err != nil {
		return err
	}
	etcdCA, err := store.Authority("etcd/ca", "etcd-ca")
	if err != nil {
		return err
	}
	frontProxyCA, err := store.Authority("front-proxy-ca", "front-proxy-ca")
	if err != nil {
		return err
	}
	for _, c := range clusterCertificates(nodeIP) {
		if _, err := store.Certificate(c.name, ca, c.profile); err != nil {
			return err
		}
	}
	for _, c := range etcdCertificates(nodeIP) {
		if _, err := store.Certificate(c.name, etcdCA, c.profile); err != nil {
			return err
		}
	}
	frontProxy := pki.Profile{CommonName: "front-proxy-client", Client: true}
	if _, err := store.Certificate("front-proxy-client", frontProxyCA, frontProxy); err != nil {
		return err
	}
	if err := store.KeyPair("sa"); err != nil {
		return err
	}
	// Users' certificates are stored beside the others, too, so that a second
	// start writes the same kubeconfig files and restarts nobody.
	for _, u := range users() {
		identity, err := store.Certificate("users/"+u.name, ca, u.profile)
		if err != nil {
			return err
		}
		data, err := pki.Kubeconfig(serverURL(nodeIP), layout.ClusterName, u.profile.CommonName, ca, identity)
		if err != nil {
			return err
		}
		if err := writeFile(kubeconfigPath(u.name), data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

func kubeconfigPath(user string) string {
	return filepath.Join(layout.KubernetesDir, user+".conf")
}
