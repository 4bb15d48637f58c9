package atomicfile

import (
	"errors"
	"os"
)

// descriptor reports false: no path means a descriptor.
func descriptor(dir, name string) (fd int, ok bool) {
	return 0, false
}

func duplicate(fd int, path string) (*os.File, error) {
	return nil, errors.ErrUnsupported
}
