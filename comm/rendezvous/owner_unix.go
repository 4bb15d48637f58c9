//go:build unix

package rendezvous

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// checkOwner returns an error if a file with a secret is another user's, who knows it.
func checkOwner(path string, info fs.FileInfo) error {
	status, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	if owner := int(status.Uid); owner != 0 && owner != os.Geteuid() {
		return fmt.Errorf("the secret in %s belongs to the user with number %d: chown it, or copy it", path, owner)
	}
	return nil
}
