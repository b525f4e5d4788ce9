package pki

import (
	"fmt"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Kubeconfig returns a kubeconfig file with everything embedded: where the API
// server of the cluster is, the authority that signed its certificate, and who its
// user is.
func Kubeconfig(server, cluster, user string, ca, identity *Authority) ([]byte, error) {
	key, err := identity.KeyPEM()
	if err != nil {
		return nil, err
	}
	context := user + "@" + cluster
	config := clientcmdapi.NewConfig()
	config.Clusters[cluster] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca.CertificatePEM()}
	config.AuthInfos[user] = &clientcmdapi.AuthInfo{ClientCertificateData: identity.CertificatePEM(), ClientKeyData: key}
	config.Contexts[context] = &clientcmdapi.Context{Cluster: cluster, AuthInfo: user}
	config.CurrentContext = context
	data, err := clientcmd.Write(*config)
	if err != nil {
		return nil, fmt.Errorf("encode the kubeconfig of %s: %w", user, err)
	}
	return data, nil
}
