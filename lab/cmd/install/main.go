// Command install shows an administrator's day on a real Kubernetes: it installs
// Divvy with helm, looks how kube-scheduler was wired, tries a change that is refused,
// breaks something for doctor to find, and uninstalls.
package main

import (
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/show"
	"github.com/divvy-gpu/divvy/lab/internal/stage"
)

const introduction = `An administrator's day, on a real Kubernetes that runs on this machine, whose
kube-scheduler is a static pod as kubeadm makes it: install, look, change, remove.
Stand-ins are the 8 cards and the vendor's library.

`

func main() {
	err := show.Play("install", introduction, stage.Options{Bare: true, Namespace: "gcushare"}, (*show.Show).Install)
	if err != nil {
		fmt.Fprintln(os.Stderr, "install:", err)
		os.Exit(1)
	}
}
