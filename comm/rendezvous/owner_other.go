//go:build !unix

package rendezvous

import "io/fs"

// checkOwner looks at nothing here.
func checkOwner(string, fs.FileInfo) error { return nil }
