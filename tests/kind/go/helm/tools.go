//go:build tools

// Package tools keeps helm in go.mod and go.sum.
package tools

import _ "helm.sh/helm/v3/cmd/helm"
