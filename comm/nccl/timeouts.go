package nccl

import (
	"time"

	"github.com/tutti-go/tutti/comm/backend"
)

// All times of the package, and why they are what they are. Those of package backend bound the drain and the release in
// Close ([backend.DeviceTimeout]) and an abort ([backend.AbortTimeout]).

// Aborts.
const (
	// tellTimeout bounds how long a rank that aborts waits until its peers know and have answered, which takes some ten
	// round trips to the store. It is a third of [backend.AbortTimeout], so that a lost peer leaves the kernels their
	// time.
	tellTimeout = time.Second

	// The kernel of an aborted call ends when it comes to look at the abort flag, and the next call in flight begins
	// then. That takes some 10 ms a call, and up to 140 ms where three processes take turns on a GPU.
	endingCall = 200 * time.Millisecond
	endingMost = 30 * time.Second
)

// Teardown.
const (
	// callTimeout bounds how long an orderly end waits for calls in flight. They return within milliseconds unless they
	// wait for a rank, and then only an abort ends them.
	callTimeout = time.Second

	// allTimeout bounds the wait for all native communicators that are being freed, which may take forever while a
	// graph is open. It is shorter than [cuda.Runtime.Close] waits for that.
	allTimeout = 20 * time.Second

	// trimEvery is how often freed memory goes back to the system while more is being freed: it takes some hundred ms.
	trimEvery = time.Second

	// serviceEvery is how often a rank looks whether NCCL's service threads have ended. A look reads a file for each of
	// them, and a teardown lasts longer by one pause at most.
	serviceEvery = 5 * time.Millisecond
)

// unmapTime is how long a rank waits for NCCL's service threads where it cannot see that they have ended: on a busy
// machine they take some hundred ms, and one that is aborted may be in a poll of half a second before. Those of a
// communicator that is freed in the middle of a call may not end before it is. Tests change it.
var unmapTime = 1500 * time.Millisecond

// storeTimeout bounds how long a rank tries to reach the store when it makes a communicator. The store is there before,
// or its host is lost: then the rank goes on without, as the survivors that call Shrink do.
const storeTimeout = backend.HostTimeout
