// Mps-control stands in for NVIDIA's program nvidia-cuda-mps-control on the lab's node.
package main

import (
	"os"

	"github.com/divvy-gpu/divvy/internal/testing/mpssim"
)

func main() { os.Exit(mpssim.Main(os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }
