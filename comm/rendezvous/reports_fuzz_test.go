package rendezvous

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// FuzzReports has a rank that knows the secret send anything: it hurts nobody else.
func FuzzReports(f *testing.F) {
	f.Add([]byte("{\"group\":\"0\",\"rank\":1,\"text\":\"waits\"}\n{\"ask\":1,\"group\":\"0\"}\n"))
	f.Add([]byte("{\"rank\":-1,\"left\":true}\n{}\n\n{\"ask\":18446744073709551615}\n"))
	f.Add([]byte("{\"last\":{\"x\":1}}\n[]"))
	keeper, invitation, err := KeepReports(true)
	require.NoError(f, err)
	f.Cleanup(func() { _ = keeper.Close() })
	f.Fuzz(func(t *testing.T, data []byte) {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		conn, err := invitation.connect(ctx, newHello(1, 3))
		require.NoError(t, err)
		_, err = conn.Write(data)
		require.NoError(t, err)
		require.NoError(t, conn.Close())
		friend := FollowReports(invitation, 2, 3)
		defer friend.Close() //nolint:errcheck // nothing is lost
		friend.Report("of friends", 2, t.Name())
		for ctx.Err() == nil {
			if last, err := friend.Last(ctx, "of friends"); err == nil && last[2].Text == t.Name() {
				return
			}
			time.Sleep(time.Millisecond)
		}
		t.Fatal("no answer")
	})
}
