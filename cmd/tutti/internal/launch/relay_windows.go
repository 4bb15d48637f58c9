package launch

import (
	"context"
	"syscall"

	"github.com/tutti-go/tutti/comm/store"
)

// signalNames are the names of signals between launchers.
var signalNames = map[syscall.Signal]string{
	syscall.SIGHUP:  "HUP",
	syscall.SIGINT:  "INT",
	syscall.SIGTERM: "TERM",
}

// relay does nothing: there are no signals here.
func (a *agent) relay(context.Context) (stop func()) { return func() {} }

// exchangeSignals does nothing: other launchers' signals have no meaning here.
func (a *agent) exchangeSignals(context.Context, *store.Client) error { return nil }

// relay does nothing: there are no signals here.
func (s *spread) relay() (stop func()) { return func() {} }

// raise does nothing: there are no user signals here.
func raise(syscall.Signal) bool { return false }
