// Package schedulerversions checks what internal/schedconf writes for each
// version of kube-scheduler with the types and the strict decoder of that
// version.
//
// The folders below it are modules of their own, one for each generation of
// Kubernetes' libraries, for their releases cannot be in one program. In each,
// the config types are those of every version; what decodes is the library of
// the generation's last version. The test builds and runs them.
package schedulerversions
