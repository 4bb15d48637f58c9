// Package base has the common parts of the packages of distributed: the order between a communicator and a runtime,
// checks of tensors, device memory that grows, and the comparison of the ranks' terms.
package base
