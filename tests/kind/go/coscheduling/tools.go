//go:build tools

// Package tools keeps the commands that the tests need in go.mod and go.sum.
package tools

import (
	_ "sigs.k8s.io/scheduler-plugins/cmd/controller"
	_ "sigs.k8s.io/scheduler-plugins/cmd/scheduler"
)
