package etcd

import (
	"context"
	"errors"
	"io/fs"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/store"
)

// cause is the meaning of an etcd error for the user.
type cause struct {
	sentinel error  // what errors.Is finds
	remedy   string // follows etcd's text; PREFIX stands for Config.Prefix; "" if the text is enough
}

// Remedies for several causes.
const (
	needsMajority = "most of its servers must run and reach each other (etcdctl endpoint status --cluster)"
	tooSlow       = "its servers are overloaded, have slow disks, or do not reach each other " +
		"(etcdctl endpoint status --cluster)"
	tooLarge = "etcd's --max-request-bytes and the client's MaxCallSendMsgSize bound a value"
	noUser   = "etcd asks for a user: set Username and Password of its client, " +
		"or give it a certificate whose common name is a user"
	otherPassword = "check Username and Password of etcd's client"
	deletedUser   = "the user of etcd's client was deleted (etcdctl user list)"
	noPermission  = "grant a role of the user the keys: etcdctl role grant-permission ROLE readwrite PREFIX --prefix"
	freeSpace     = "compact and defragment etcd and disarm its alarm (etcdctl alarm disarm), " +
		"or start it with a larger --quota-backend-bytes"
	silentTooLong = "etcd heard nothing of this process for longer than Silence, or somebody revoked the lease"
	noAnswer      = "etcd does not answer, or has no leader"
	otherData     = "etcd lost its data, or was restored from an older copy: start the job again"
	noEtcd        = "no etcd of version 3 listens there"
)

// causes maps etcd's own errors that a session's calls may return.
var causes = map[error]cause{
	rpctypes.ErrGRPCNoSpace:                {store.ErrFull, freeSpace},
	rpctypes.ErrGRPCRequestTooManyRequests: {comm.ErrExhausted, tooSlow},
	rpctypes.ErrGRPCCompacted: {comm.ErrExhausted, "etcd no longer has the changes that this process has not read: " +
		"compact less often (--auto-compaction-retention)"},
	rpctypes.ErrGRPCRequestTooLarge:  {comm.ErrArgument, tooLarge},
	rpctypes.ErrGRPCLeaseTTLTooLarge: {comm.ErrArgument, "shorten Silence"},
	rpctypes.ErrGRPCAuthNotEnabled:   {comm.ErrArgument, "this etcd has no users: leave out Username of its client"},

	rpctypes.ErrGRPCPermissionDenied: {fs.ErrPermission, noPermission},
	rpctypes.ErrGRPCUserEmpty:        {fs.ErrPermission, noUser},
	rpctypes.ErrGRPCAuthFailed:       {fs.ErrPermission, otherPassword},
	rpctypes.ErrGRPCUserNotFound:     {fs.ErrPermission, deletedUser},
	rpctypes.ErrGRPCInvalidAuthToken: {fs.ErrPermission, "the token expired, or etcd was started again: try again"},
	rpctypes.ErrGRPCAuthOldRevision:  {fs.ErrPermission, "users or roles changed meanwhile: try again"},

	rpctypes.ErrGRPCClusterIDMismatch:       {comm.ErrMismatch, "the endpoints belong to different clusters"},
	rpctypes.ErrGRPCNotCapable:              {comm.ErrUnsupported, "upgrade etcd"},
	rpctypes.ErrGRPCNotSupportedForLearner:  {comm.ErrUnavailable, "the endpoint is a learner: name voting servers"},
	rpctypes.ErrGRPCTimeout:                 {comm.ErrTimeout, tooSlow},
	rpctypes.ErrGRPCTimeoutDueToLeaderFail:  {comm.ErrTimeout, tooSlow},
	rpctypes.ErrGRPCTimeoutWaitAppliedIndex: {comm.ErrTimeout, tooSlow},

	rpctypes.ErrGRPCTimeoutDueToConnectionLost: {comm.ErrTimeout, tooSlow},

	rpctypes.ErrGRPCNoLeader:      {comm.ErrPeerFailed, needsMajority},
	rpctypes.ErrGRPCUnhealthy:     {comm.ErrPeerFailed, needsMajority},
	rpctypes.ErrGRPCLeaderChanged: {comm.ErrPeerFailed, "try again"},
	rpctypes.ErrGRPCNotLeader:     {comm.ErrPeerFailed, "try again"},
	rpctypes.ErrGRPCStopped:       {comm.ErrPeerFailed, "start the server again, or name others as endpoints as well"},
	rpctypes.ErrGRPCCorrupt: {comm.ErrPeerFailed,
		"the data of a server differs from the others: replace it (etcdctl alarm list)"},
	rpctypes.ErrGRPCLeaseNotFound: {comm.ErrPeerFailed, silentTooLong},
	rpctypes.ErrGRPCFutureRev:     {comm.ErrPeerFailed, otherData},
}

// codeCauses maps the gRPC codes of other errors. A missing code means that the store has failed.
var codeCauses = map[codes.Code]cause{
	codes.PermissionDenied:   {sentinel: fs.ErrPermission},
	codes.Unauthenticated:    {sentinel: fs.ErrPermission},
	codes.ResourceExhausted:  {sentinel: comm.ErrExhausted},
	codes.InvalidArgument:    {sentinel: comm.ErrArgument},
	codes.OutOfRange:         {sentinel: comm.ErrArgument},
	codes.FailedPrecondition: {sentinel: comm.ErrUnavailable},
	codes.NotFound:           {sentinel: comm.ErrUnavailable},
	codes.DeadlineExceeded:   {comm.ErrTimeout, tooSlow},
	codes.Unimplemented:      {comm.ErrUnsupported, noEtcd},
	codes.Unavailable:        {comm.ErrPeerFailed, needsMajority},
}

// causeOf returns the meaning of an error from etcd's client.
func causeOf(err error) cause {
	text := err.Error()
	for known, c := range causes {
		// A watch that etcd ends has the error only at the end of a text. No error text ends with another.
		if strings.HasSuffix(text, rpctypes.ErrorDesc(known)) {
			return c
		}
	}
	code := codeOf(err)
	switch {
	case code == codes.ResourceExhausted && strings.Contains(text, "message larger than max"):
		return cause{comm.ErrArgument, tooLarge} // from gRPC; client and server both limit the size
	case code == codes.Canceled && strings.Contains(text, "client connection is closing"),
		errors.Is(err, errWatchEnded):
		return cause{comm.ErrClosed, "keep etcd's client open for as long as the session"}
	case errors.Is(err, context.DeadlineExceeded):
		return codeCauses[codes.DeadlineExceeded]
	}
	if c, ok := codeCauses[code]; ok {
		return c
	}
	return cause{sentinel: comm.ErrPeerFailed}
}

// codeOf returns the gRPC code of an error, codes.Unknown if it has none.
func codeOf(err error) codes.Code {
	var known rpctypes.EtcdError
	if errors.As(err, &known) {
		return known.Code()
	}
	return status.Code(err)
}

// fromEtcd reports whether etcd itself, not gRPC, made the error.
func fromEtcd(err error) bool { return strings.Contains(err.Error(), "etcdserver: ") }
