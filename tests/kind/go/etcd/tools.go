//go:build tools

// Package tools keeps etcd in go.mod and go.sum.
package tools

import _ "go.etcd.io/etcd/server/v3"
