//go:build unix

package inquiry

import (
	"os"
	"os/signal"
	"syscall"
)

// listen answers the signal for the rest of the process. Once it has a communicator that records calls, this goroutine
// has no waits to report, and the recorder answers.
func listen() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	go func() {
		for s := range signals {
			answer(s.String())
		}
	}()
}
