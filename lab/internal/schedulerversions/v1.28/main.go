// Command v1.28 reads configurations as kube-scheduler 1.23 to 1.28 do.
package main

import (
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode"
	v1of28 "k8s.io/kube-scheduler/config/v1"
	v1beta3of28 "k8s.io/kube-scheduler/config/v1beta3"
	v1beta2of23 "scheduler.example/release-1.23/config/v1beta2"
	v1beta3of23 "scheduler.example/release-1.23/config/v1beta3"
	v1beta2of24 "scheduler.example/release-1.24/config/v1beta2"
	v1beta3of24 "scheduler.example/release-1.24/config/v1beta3"
	v1of25 "scheduler.example/release-1.25/config/v1"
	v1beta2of25 "scheduler.example/release-1.25/config/v1beta2"
	v1beta3of25 "scheduler.example/release-1.25/config/v1beta3"
	v1of26 "scheduler.example/release-1.26/config/v1"
	v1beta2of26 "scheduler.example/release-1.26/config/v1beta2"
	v1beta3of26 "scheduler.example/release-1.26/config/v1beta3"
	v1of27 "scheduler.example/release-1.27/config/v1"
	v1beta2of27 "scheduler.example/release-1.27/config/v1beta2"
	v1beta3of27 "scheduler.example/release-1.27/config/v1beta3"
)

// served are the types of each version, by what its kube-scheduler registers.
var served = map[string]decode.Types{
	"1.23": {v1beta2of23.AddToScheme, v1beta3of23.AddToScheme},
	"1.24": {v1beta2of24.AddToScheme, v1beta3of24.AddToScheme},
	"1.25": {v1of25.AddToScheme, v1beta2of25.AddToScheme, v1beta3of25.AddToScheme},
	"1.26": {v1of26.AddToScheme, v1beta2of26.AddToScheme, v1beta3of26.AddToScheme},
	"1.27": {v1of27.AddToScheme, v1beta2of27.AddToScheme, v1beta3of27.AddToScheme},
	"1.28": {v1of28.AddToScheme, v1beta3of28.AddToScheme},
}

func main() {
	if err := decode.Run(served, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
