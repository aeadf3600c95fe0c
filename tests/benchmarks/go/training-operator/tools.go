//go:build tools

// Package tools keeps the operator of PyTorchJob in go.mod and go.sum.
package tools

import _ "github.com/kubeflow/training-operator/cmd/training-operator.v1"
