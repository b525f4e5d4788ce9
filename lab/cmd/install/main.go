// Command install shows an administrator's day on a real Kubernetes: it installs
// Divvy with helm, looks how kube-scheduler was wired, tries a change that is refused,
// breaks something for doctor to find, and uninstalls.
package main

import (
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

const introduction = `An administrator's day, on a real Kubernetes that runs on this machine, whose
kube-scheduler is a static pod as kubeadm makes it: install, look, change, remove.
Stand-ins are the 8 cards and the vendor's library.

`

func main() {
	err := demos.Play("install", introduction, testenv.Options{Bare: true, Namespace: "gcushare"}, (*demos.Demo).Install)
	if err != nil {
		fmt.Fprintln(os.Stderr, "install:", err)
		os.Exit(1)
	}
}
