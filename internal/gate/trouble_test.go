package gate

import (
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
)

// scarce is a listener that fails as often as it is told to, and then has nobody to accept.
type scarce struct {
	failures chan error
}

func (s *scarce) Accept() (net.Conn, error) {
	err, open := <-s.failures
	if !open {
		return nil, net.ErrClosed
	}
	return nil, err
}

func (s *scarce) Close() error   { return nil }
func (s *scarce) Addr() net.Addr { return nil }

// Trouble that does not come again is over, although nobody has connected since, and trouble that lasts is told all
// the while.
func TestTroubleEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &scarce{make(chan error)}
		g := &Gate{Name: "test", Places: 4}
		served := make(chan struct{})
		go func() {
			defer close(served)
			g.Serve(l, nil, nil)
		}()
		for end := time.Now().Add(time.Minute); time.Now().Before(end); {
			l.failures <- syscall.EMFILE
			synctest.Wait()
			assert.ErrorIs(t, g.Trouble(), syscall.EMFILE)
			time.Sleep(longestAcceptPause - time.Millisecond)
			assert.ErrorIs(t, g.Trouble(), syscall.EMFILE)
		}
		time.Sleep(2*longestAcceptPause + time.Millisecond)
		assert.NoError(t, g.Trouble())
		close(l.failures)
		<-served
	})
}
