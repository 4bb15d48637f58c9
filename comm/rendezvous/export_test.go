package rendezvous

import (
	"errors"
	"net"
	"time"
)

// SetTellTime changes how long a keeper waits for ranks to hear what it tells.
func SetTellTime(k *ReportKeeper, d time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.tellTime = d
}

// Pending is how many messages have not been sent yet.
func Pending(r *RemoteReports) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.pending)
}

// Ended is closed when there is no connection any more.
func Ended(r *RemoteReports) <-chan struct{} {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			r.mu.Lock()
			state := r.state
			r.mu.Unlock()
			if state != nil && !errors.Is(state, errNotConnected) {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	return ended
}

// KeepReportsOn is KeepReports on a listener of this host.
func KeepReportsOn(listener net.Listener) (*ReportKeeper, Invitation) {
	in := Invitation{Addresses: []string{listener.Addr().String()}, Secret: newSecret()}
	return keepReports(listener, in.Secret), in
}

// MostStrangers is how many connections may be open at a keeper that have not said who they are.
const MostStrangers = mostStrangers

// Logged collects what the package logs.
var Logged = logged
