//go:build !linux

package keeper

// Follow does nothing here.
func Follow(string) {}
