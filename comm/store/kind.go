package store

import (
	"errors"
	"fmt"
	"io/fs"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/printable"
)

// kind is what went wrong with a request, as an answer says it: the error of the client wraps the sentinel of its kind.
type kind string

const (
	kindArgument    kind = "" // of every store's own refusals, unless they say otherwise
	kindFull        kind = "full"
	kindExhausted   kind = "exhausted"
	kindPermission  kind = "permission"
	kindUnsupported kind = "unsupported"
	kindUnavailable kind = "unavailable"
	kindFailed      kind = "failed" // the store behind a [Proxy] did not do it, for another reason
)

// sentinels are what errors of a kind wrap; those of other kinds, which are failures of the store, have none here. The
// ends of contexts are no kinds: a context of the proxy is not the process's.
var sentinels = []struct {
	kind     kind
	sentinel error
}{
	{kindFull, ErrFull}, // before the exhausted, as it says more
	{kindExhausted, comm.ErrExhausted},
	{kindPermission, fs.ErrPermission},
	{kindUnsupported, comm.ErrUnsupported},
	{kindUnavailable, comm.ErrUnavailable},
	{kindArgument, comm.ErrArgument},
}

// kindOf returns the kind of an error of the store behind a proxy.
func kindOf(err error) kind {
	for _, s := range sentinels {
		if errors.Is(err, s.sentinel) {
			return s.kind
		}
	}
	return kindFailed
}

// errUndone is a request that the store behind a proxy has not done.
var errUndone = fmt.Errorf("%w: the store did not do it", comm.ErrPeerFailed)

// failure is the error that an answer tells; one of an unknown kind wraps fallback, unless that is nil. Kind and text
// come from the other side, so that the text is cut and made printable.
func failure(k kind, text string, fallback error) error {
	text = printable.Text(text[:min(len(text), longestReason)])
	for _, s := range sentinels {
		if s.kind == k {
			fallback = s.sentinel
		}
	}
	if fallback == nil {
		return errors.New(text)
	}
	return fmt.Errorf("%w: %s", fallback, text)
}
