//go:build tools

// Package lab holds no code. The import keeps what the Makefile builds for
// checking the chart among the module's requirements.
package lab

import _ "helm.sh/helm/v3/cmd/helm"
