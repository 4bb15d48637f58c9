package comm_test

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
)

// More reports than a job has are not kept, and those of groups that are forgotten make
// room.
func TestLocalReportsAreBounded(t *testing.T) {
	l := new(comm.LocalReports)
	has := func(group string) bool {
		last, err := l.Last(t.Context(), group)
		require.NoError(t, err)
		return len(last) > 0
	}
	const most = 1 << 16
	for i := range most {
		l.Report(strconv.Itoa(i), 3, "waits")
	}
	l.Report("one more", 3, "waits")
	assert.True(t, has(strconv.Itoa(most-1)))
	assert.False(t, has("one more"))
	l.Leave("0", 3, "closed")
	assert.False(t, has("0"))
	l.Report("one more", 3, "waits")
	assert.True(t, has("one more"))
}
