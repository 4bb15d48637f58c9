package nccl

import (
	"time"

	"github.com/tutti-go/tutti/comm/backend"
)

// All timeouts of the package and their reasons. Package backend has the timeouts of the drain and the release in
// Close ([backend.DeviceTimeout]) and of an abort ([backend.AbortTimeout]).

// Aborts.
const (
	// tellTimeout bounds how long a rank that aborts waits until its peers know and have answered, which takes some
	// ten round trips to the store. It is a third of [backend.AbortTimeout], so that a lost peer leaves the kernels
	// their time.
	tellTimeout = time.Second

	// The kernel of an aborted call ends when it next reads the abort flag, and then the next call in flight begins.
	// That takes some 10 ms for each call, and up to 140 ms if three processes share a GPU.
	endingCall = 200 * time.Millisecond
	endingMost = 30 * time.Second
)

// Teardown.
const (
	// callTimeout bounds how long an orderly release waits for calls in flight. They return within milliseconds unless
	// they wait for a rank, and then only an abort ends them.
	callTimeout = time.Second

	// allTimeout bounds the wait for all native communicators that are being freed, which may last forever while a
	// graph is open. It is shorter than the corresponding wait of [cuda.Runtime.Close].
	allTimeout = 20 * time.Second

	// trimEvery is the interval at which freed memory returns to the system while more is being freed: a trim takes
	// some hundred ms.
	trimEvery = time.Second

	// serviceEvery is the interval at which a rank checks whether NCCL's service threads have ended. A check reads a file
	// for each of them, and a release lasts longer by one interval at most.
	serviceEvery = 5 * time.Millisecond
)

// unmapTime is how long a rank waits for NCCL's service threads if it cannot observe them: on a busy machine they take
// some hundred ms, and an aborted one may first have to finish a poll of half a second. The thread of a communicator
// that is freed in the middle of a call may outlive the wait. Tests change it.
var unmapTime = 1500 * time.Millisecond

// storeTimeout bounds how long a rank tries to reach the store when it makes a communicator. The store is already
// running, or its host is lost: then the rank continues without it, like survivors that call Shrink.
const storeTimeout = backend.HostTimeout
