// Command v1.18 reads configurations as kube-scheduler 1.18 does.
package main

import (
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode"
	policyv1 "k8s.io/kube-scheduler/config/v1"
	"k8s.io/kube-scheduler/config/v1alpha1"
	"k8s.io/kube-scheduler/config/v1alpha2"
)

// served are the types of each version, by what its kube-scheduler registers.
var served = map[string]decode.Types{
	"1.18": {policyv1.AddToScheme, v1alpha1.AddToScheme, v1alpha2.AddToScheme},
}

func main() {
	if err := decode.Run(served, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
