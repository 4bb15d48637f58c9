package etcd

import (
	"context"
	"errors"
	"io/fs"
	"testing"

	"github.com/stretchr/testify/assert"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// Each cause has a name of its own.
func TestSentinels(t *testing.T) {
	for _, test := range []struct {
		err, want error
	}{
		{rpctypes.ErrGRPCPermissionDenied, fs.ErrPermission},
		{rpctypes.ErrGRPCInvalidAuthToken, fs.ErrPermission},
		{rpctypes.ErrGRPCNoSpace, store.ErrFull},
		{rpctypes.ErrGRPCRequestTooManyRequests, comm.ErrExhausted},
		{rpctypes.ErrGRPCRequestTooLarge, comm.ErrArgument},
		{rpctypes.ErrGRPCUserEmpty, comm.ErrArgument},
		{rpctypes.ErrGRPCNoLeader, comm.ErrPeerFailed},
		{rpctypes.ErrGRPCTimeout, comm.ErrPeerFailed},
		{errors.New("connection refused"), comm.ErrPeerFailed},
	} {
		err := wrap(t.Context(), test.err)
		for _, sentinel := range []error{fs.ErrPermission, store.ErrFull, comm.ErrExhausted, comm.ErrArgument, comm.ErrPeerFailed} {
			assert.Equal(t, sentinel == test.want, errors.Is(err, sentinel), "%v: %v", err, sentinel)
		}
	}
}

// What the client has met before its context ended is in the error.
func TestCauseStaysWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	met := errors.New("certificate signed by unknown authority")
	err := wrap(ctx, met)
	assert.ErrorIs(t, err, comm.ErrCanceled)
	assert.ErrorIs(t, err, met)
}
