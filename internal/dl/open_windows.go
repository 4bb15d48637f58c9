package dl

import (
	"path/filepath"

	"golang.org/x/sys/windows"
)

// open loads a library from the system's directory, where drivers and MPI put theirs. Otherwise Windows would search
// the program's directory, the current one and those of PATH, where anybody may have put a file with that name. A path
// is used unchanged, and libraries that it needs may be in the same directory.
func open(name string) (uintptr, error) {
	flags := uintptr(windows.LOAD_LIBRARY_SEARCH_SYSTEM32)
	if filepath.Base(name) != name {
		path, err := filepath.Abs(name)
		if err != nil {
			return 0, err
		}
		name = path
		flags = flags | windows.LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR
	}
	handle, err := windows.LoadLibraryEx(name, 0, flags)
	return uintptr(handle), err
}

func lookup(handle uintptr, symbol string) (uintptr, error) {
	return windows.GetProcAddress(windows.Handle(handle), symbol)
}
