package launch

import (
	"context"
	"syscall"

	"github.com/tutti-go/tutti/comm/store"
)

// signalNames are the names by which launchers tell each other of signals.
var signalNames = map[syscall.Signal]string{
	syscall.SIGHUP:  "HUP",
	syscall.SIGINT:  "INT",
	syscall.SIGTERM: "TERM",
}

// relay does nothing: there are no signals here.
func (a *agent) relay(context.Context) (stop func()) { return func() {} }

// exchangeSignals does nothing: no other launcher's signal means anything here.
func (a *agent) exchangeSignals(context.Context, *store.Client) error { return nil }

// relay does nothing: there are no signals here.
func (s *spread) relay() (stop func()) { return func() {} }

// raise does nothing: there are no signals here.
func raise(syscall.Signal) bool { return false }
