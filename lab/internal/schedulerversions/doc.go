// Package schedulerversions checks what internal/install/schedconf writes with the
// configuration types of every version of kube-scheduler that it is written for, and
// with a strict decoder.
package schedulerversions
