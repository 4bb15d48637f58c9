//go:build !linux

package mpi

// handlers are not asked for: what takes them, UCX, is for Linux.
type handlers struct{}

func signalHandlers() handlers { return handlers{} }
func (handlers) restore()      {}
