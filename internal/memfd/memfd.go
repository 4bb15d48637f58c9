// Package memfd makes memory that the processes of a machine share by a file descriptor. It
// has no name in any file system, so that nothing is left when they end, however.
package memfd
