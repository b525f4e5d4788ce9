// Command v1.37 reads configurations as kube-scheduler 1.29 to 1.37 do.
package main

import (
	"fmt"
	"os"

	"github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode"
	v1of37 "k8s.io/kube-scheduler/config/v1"
	v1of29 "scheduler.example/release-1.29/config/v1"
	v1of30 "scheduler.example/release-1.30/config/v1"
	v1of31 "scheduler.example/release-1.31/config/v1"
	v1of32 "scheduler.example/release-1.32/config/v1"
	v1of33 "scheduler.example/release-1.33/config/v1"
	v1of34 "scheduler.example/release-1.34/config/v1"
	v1of35 "scheduler.example/release-1.35/config/v1"
	v1of36 "scheduler.example/release-1.36/config/v1"
)

// served are the types of each version, by what its kube-scheduler registers.
var served = map[string]decode.Types{
	"1.29": {v1of29.AddToScheme},
	"1.30": {v1of30.AddToScheme},
	"1.31": {v1of31.AddToScheme},
	"1.32": {v1of32.AddToScheme},
	"1.33": {v1of33.AddToScheme},
	"1.34": {v1of34.AddToScheme},
	"1.35": {v1of35.AddToScheme},
	"1.36": {v1of36.AddToScheme},
	"1.37": {v1of37.AddToScheme},
}

func main() {
	if err := decode.Run(served, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
