package controlplane

import "fmt"

// ClaimQPS is how many requests to the API server the controller of claims may send in a second. Its
// own default of 20 would be what is measured.
const ClaimQPS = 5000

// StartClaimController starts a kube-controller-manager with one controller: that which makes
// ResourceClaims of templates, and frees those whose pods are gone. The caller ends it.
func (c *ControlPlane) StartClaimController() (*Process, error) {
	return c.Run("kube-controller-manager",
		"--kubeconfig="+c.Kubeconfig(), "--controllers=resourceclaim-controller", "--leader-elect=false", "--secure-port=0",
		fmt.Sprintf("--kube-api-qps=%d", ClaimQPS), fmt.Sprintf("--kube-api-burst=%d", 2*ClaimQPS))
}
