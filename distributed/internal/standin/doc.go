// Package standin has stand-ins of devices and communicators for the tests of
// distributed and the packages below it: runtimes with streams and side streams on
// the CPU, and kernels, runtimes and communicators that fail when a test says so.
package standin
