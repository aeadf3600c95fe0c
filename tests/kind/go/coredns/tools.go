//go:build tools

// Package tools keeps coredns in go.mod and go.sum.
package tools

import _ "github.com/coredns/coredns"
