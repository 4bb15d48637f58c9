// Package base is what the packages of distributed share: the order between a
// communicator and a runtime, checks of tensors, device memory that grows, the comparison
// of what ranks reduce, and the envelope of saved states.
package base
