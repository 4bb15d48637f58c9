package fault

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

// A key of a rank that has ended names the rank, and nothing else is taken for one.
func TestEndedRanks(t *testing.T) {
	for rank := range 3 {
		got, ok := EndedRank(EndedKey(rank), 3)
		assert.True(t, ok)
		assert.Equal(t, rank, got)
	}
	for _, key := range []string{"", "ended/", "ended/3", "ended/-1", "ended/x", "fault/1", "1"} {
		_, ok := EndedRank(key, 3)
		assert.False(t, ok, key)
	}
}

// A report is what was reported, and nothing else is taken for one.
func TestReports(t *testing.T) {
	r := Report{By: 2, About: 1, Reason: "nothing has come from it for 10s"}
	assert.Equal(t, "fault/2/1", r.Key())
	got, ok := Read(r.Value(), 3)
	assert.True(t, ok)
	assert.Equal(t, r, got)
	for _, text := range []string{
		"", "null", "{}", `{"by":0,"about":3,"reason":"x"}`, `{"by":-1,"about":1,"reason":"x"}`,
		`{"by":1,"about":1,"reason":"x"}`, `{"by":0,"about":1,"reason":""}`,
	} {
		_, ok := Read([]byte(text), 3)
		assert.False(t, ok, text)
	}
	r.Reason = strings.Repeat("x", 10_000)
	assert.Less(t, len(r.Value()), 600)
	got, ok = Read([]byte(`{"by":0,"about":1,"reason":"\u001b[2J`+strings.Repeat("x", 10_000)+`"}`), 3)
	assert.True(t, ok)
	assert.NotContains(t, got.Reason, "\x1b")
	assert.Less(t, len(got.Reason), 600)
}
