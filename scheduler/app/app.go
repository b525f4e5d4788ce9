// Package app is the program divvy-scheduler for mains that compile further plugins into it.
package app

import (
	"k8s.io/kubernetes/cmd/kube-scheduler/app"

	"github.com/divvy-gpu/divvy/scheduler/internal/program"
)

// Main runs the program with the arguments of the process, and returns its exit status. Plugins
// are added with WithPlugin of k8s.io/kubernetes/cmd/kube-scheduler/app, and enabled in the
// configuration of kube-scheduler.
func Main(plugins ...app.Option) int { return program.Main(plugins...) }
