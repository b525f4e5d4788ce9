// Command divvy-scheduler is kube-scheduler that knows devices.
package main

import (
	"os"

	"github.com/divvy-gpu/divvy/scheduler/internal/program"
)

func main() { os.Exit(program.Main()) }
