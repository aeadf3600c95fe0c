//go:build tools

// Package tools keeps kind in go.mod and go.sum.
package tools

import _ "sigs.k8s.io/kind"
