// Command v1.22 reads configurations as kube-scheduler 1.19 to 1.22 do.
package main

import (
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode"
	policy22 "k8s.io/kube-scheduler/config/v1"
	beta1of22 "k8s.io/kube-scheduler/config/v1beta1"
	beta2of22 "k8s.io/kube-scheduler/config/v1beta2"
	policy19 "scheduler.example/release-1.19/config/v1"
	beta1of19 "scheduler.example/release-1.19/config/v1beta1"
	policy20 "scheduler.example/release-1.20/config/v1"
	beta1of20 "scheduler.example/release-1.20/config/v1beta1"
	policy21 "scheduler.example/release-1.21/config/v1"
	beta1of21 "scheduler.example/release-1.21/config/v1beta1"
)

// served are the types of each version, by what its kube-scheduler registers.
var served = map[string]decode.Types{
	"1.19": {policy19.AddToScheme, beta1of19.AddToScheme},
	"1.20": {policy20.AddToScheme, beta1of20.AddToScheme},
	"1.21": {policy21.AddToScheme, beta1of21.AddToScheme},
	"1.22": {policy22.AddToScheme, beta1of22.AddToScheme, beta2of22.AddToScheme},
}

func main() {
	if err := decode.Run(served, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
