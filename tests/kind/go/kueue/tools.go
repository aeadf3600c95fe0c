//go:build tools

// Package tools keeps kueue in go.mod and go.sum.
package tools

import _ "sigs.k8s.io/kueue/cmd/kueue"
