package schedconf

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"k8s.io/client-go/rest"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// kubeconfigs are what kubeadm leaves on a control-plane node, the one that may
// do more first.
var kubeconfigs = []string{"/etc/kubernetes/admin.conf", "/etc/kubernetes/scheduler.conf"}

func connect(kubeconfig string) (kube.Clients, error) {
	if kubeconfig == "" {
		if _, err := rest.InClusterConfig(); errors.Is(err, rest.ErrNotInCluster) {
			for _, file := range kubeconfigs {
				if _, err := os.Stat(file); err == nil {
					kubeconfig = file
					break
				}
			}
			if kubeconfig == "" {
				return kube.Clients{}, fmt.Errorf("not running in a pod, and %s does not exist; set --kubeconfig",
					strings.Join(kubeconfigs, " or "))
			}
		}
	}
	return kube.Connect(kubeconfig, "divvy-schedconf/"+version.Version)
}
