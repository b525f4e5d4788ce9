// Command divvy-scheduler is kube-scheduler with the plugin Divvy, which places pods on shared devices.
package main

import (
	"os"

	"github.com/divvy-gpu/divvy/scheduler/internal/program"
)

func main() { os.Exit(program.Main()) }
