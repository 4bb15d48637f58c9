// Package base is what the packages of distributed share: the order between a
// communicator and a runtime, checks of tensors, device memory that grows, and the
// comparison of what ranks reduce.
package base
