package etcd

import (
	"context"
	"errors"
	"io/fs"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// kinds are the sentinels. Each error wraps one of them.
var kinds = []error{
	fs.ErrPermission, store.ErrFull, comm.ErrExhausted, comm.ErrArgument, comm.ErrPeerFailed, comm.ErrTimeout,
	comm.ErrUnsupported, comm.ErrUnavailable, comm.ErrMismatch, comm.ErrClosed,
}

// checkKind checks that an error wraps this sentinel and no other.
func checkKind(t *testing.T, err, want error) {
	t.Helper()
	for _, kind := range kinds {
		assert.Equal(t, kind == want, errors.Is(err, kind), "%v: %v", err, kind)
	}
}

// Each etcd error has one kind, and a text with a remedy.
func TestCauses(t *testing.T) {
	for _, test := range []struct {
		err, kind error
		remedy    string
	}{
		{rpctypes.ErrGRPCNoSpace, store.ErrFull, "etcdctl alarm disarm"},
		{rpctypes.ErrGRPCRequestTooManyRequests, comm.ErrExhausted, "overloaded"},
		{rpctypes.ErrGRPCCompacted, comm.ErrExhausted, "--auto-compaction-retention"},
		{rpctypes.ErrGRPCRequestTooLarge, comm.ErrArgument, "--max-request-bytes"},
		{status.Error(codes.ResourceExhausted, "grpc: received message larger than max (9 vs. 8)"), comm.ErrArgument, "--max-request-bytes"},
		{rpctypes.ErrGRPCLeaseTTLTooLarge, comm.ErrArgument, "Silence"},
		{rpctypes.ErrGRPCAuthNotEnabled, comm.ErrArgument, "leave out Username"},
		{rpctypes.ErrGRPCTooManyOps, comm.ErrArgument, ""},
		{rpctypes.ErrGRPCPermissionDenied, fs.ErrPermission, "etcdctl role grant-permission ROLE readwrite /job/ --prefix"},
		{rpctypes.ErrGRPCUserEmpty, fs.ErrPermission, "set Username and Password"},
		{rpctypes.ErrGRPCAuthFailed, fs.ErrPermission, "check Username and Password"},
		{rpctypes.ErrGRPCUserNotFound, fs.ErrPermission, "etcdctl user list"},
		{rpctypes.ErrGRPCInvalidAuthToken, fs.ErrPermission, "try again"},
		{rpctypes.ErrGRPCAuthOldRevision, fs.ErrPermission, "try again"},
		{status.Error(codes.Unauthenticated, "a proxy's own words"), fs.ErrPermission, "a proxy's own words"},
		{rpctypes.ErrGRPCClusterIDMismatch, comm.ErrMismatch, "different clusters"},
		{rpctypes.ErrGRPCNotCapable, comm.ErrUnsupported, "upgrade etcd"},
		{status.Error(codes.Unimplemented, "unknown service etcdserverpb.KV"), comm.ErrUnsupported, "no etcd of version 3"},
		{rpctypes.ErrGRPCNotSupportedForLearner, comm.ErrUnavailable, "voting servers"},
		{rpctypes.ErrGRPCMemberNotFound, comm.ErrUnavailable, ""},
		{rpctypes.ErrGRPCRoleNotFound, comm.ErrUnavailable, ""},
		{rpctypes.ErrGRPCTimeout, comm.ErrTimeout, "endpoint status"},
		{rpctypes.ErrGRPCTimeoutDueToLeaderFail, comm.ErrTimeout, "endpoint status"},
		{rpctypes.ErrGRPCTimeoutDueToConnectionLost, comm.ErrTimeout, "endpoint status"},
		{rpctypes.ErrGRPCTimeoutWaitAppliedIndex, comm.ErrTimeout, "endpoint status"},
		{rpctypes.ErrGRPCDeadlineExceeded, comm.ErrTimeout, "endpoint status"},
		{context.DeadlineExceeded, comm.ErrTimeout, "endpoint status"},
		{rpctypes.ErrGRPCNoLeader, comm.ErrPeerFailed, "most of its servers must run"},
		{rpctypes.ErrGRPCUnhealthy, comm.ErrPeerFailed, "most of its servers must run"},
		{status.Error(codes.Unavailable, "connection refused"), comm.ErrPeerFailed, "most of its servers must run"},
		{rpctypes.ErrGRPCLeaderChanged, comm.ErrPeerFailed, "try again"},
		{rpctypes.ErrGRPCNotLeader, comm.ErrPeerFailed, "try again"},
		{rpctypes.ErrGRPCStopped, comm.ErrPeerFailed, "start the server again"},
		{rpctypes.ErrGRPCCorrupt, comm.ErrPeerFailed, "etcdctl alarm list"},
		{rpctypes.ErrGRPCLeaseNotFound, comm.ErrPeerFailed, "longer than Silence"},
		{rpctypes.ErrGRPCFutureRev, comm.ErrPeerFailed, "start the job again"},
		{rpctypes.ErrGRPCCanceled, comm.ErrPeerFailed, ""},
		{errors.New("anything else"), comm.ErrPeerFailed, "anything else"},
		{status.Error(codes.Canceled, "grpc: the client connection is closing"), comm.ErrClosed, "keep etcd's client open"},
		{errWatchEnded, comm.ErrClosed, "keep etcd's client open"},
		// In the form of a watch that etcd ends.
		{
			status.Error(codes.FailedPrecondition, rpctypes.ErrGRPCPermissionDenied.Error()), fs.ErrPermission,
			"readwrite /job/",
		},
	} {
		cfg := Config{Prefix: "/job/", Silence: time.Second}
		for _, err := range []error{test.err, rpctypes.Error(test.err)} { // from gRPC and from etcd's client
			got := cfg.wrap(t.Context(), err)
			checkKind(t, got, test.kind)
			require.ErrorIs(t, got, err)
			assert.ErrorContains(t, got, test.remedy)
			assert.NotContains(t, got.Error(), "PREFIX")
		}
	}
}

// The error contains the failures that the client met before its context ended.
func TestCauseStaysWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	met := errors.New("certificate signed by unknown authority")
	err := new(Config).wrap(ctx, met)
	assert.ErrorIs(t, err, comm.ErrCanceled)
	assert.ErrorIs(t, err, met)
}
