package dl

import "golang.org/x/sys/windows"

func open(name string) (uintptr, error) {
	handle, err := windows.LoadLibrary(name)
	return uintptr(handle), err
}

func lookup(handle uintptr, symbol string) (uintptr, error) {
	return windows.GetProcAddress(windows.Handle(handle), symbol)
}
