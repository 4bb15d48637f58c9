package recordhttp_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/metered"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/comm/record/recordhttp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/runtime/cpu"
)

func TestHandler(t *testing.T) {
	rt := cpu.New()
	buf, err := rt.Allocate(64)
	require.NoError(t, err)
	bare := noop.New(rt)
	r := record.New(bare, 4, "")
	server := httptest.NewServer(recordhttp.Handler(metered.New(r)))
	defer server.Close()
	for calls := range 3 { // it shows what is there now
		answer, err := http.Get(server.URL)
		require.NoError(t, err)
		assert.Equal(t, http.StatusOK, answer.StatusCode)
		assert.Equal(t, "application/json", answer.Header.Get("Content-Type"))
		var got dump.File
		require.NoError(t, json.NewDecoder(answer.Body).Decode(&got))
		require.NoError(t, answer.Body.Close())
		var text bytes.Buffer
		require.NoError(t, r.WriteJSON(&text))
		var want dump.File
		require.NoError(t, json.Unmarshal(text.Bytes(), &want))
		assert.Equal(t, timeless(want), timeless(got))
		require.Len(t, got.Entries, calls)
		require.NoError(t, r.AllReduce(buf, buf, 4, dtype.F32, comm.Sum))
	}
	for method, want := range map[string]int{http.MethodPost: http.StatusMethodNotAllowed, http.MethodHead: http.StatusOK} {
		answer := httptest.NewRecorder()
		recordhttp.Handler(r).ServeHTTP(answer, httptest.NewRequest(method, "/", nil))
		assert.Equal(t, want, answer.Code, method)
	}
	answer := httptest.NewRecorder()
	recordhttp.Handler(bare).ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/", nil))
	assert.Equal(t, http.StatusNotFound, answer.Code)
	assert.Contains(t, answer.Body.String(), "TUTTI_RECORD=1000")
	require.NoError(t, r.Close())
	require.NoError(t, rt.Deallocate(buf))
	require.NoError(t, rt.Close())
}

// timeless is a dump without times, which two dumps tell to a microsecond or so.
func timeless(d dump.File) dump.File {
	d.Tutti.Time = 0
	for i := range d.Entries {
		d.Entries[i].Created, d.Entries[i].Completed = 0, 0
	}
	for _, member := range d.Tutti.Comms {
		if member.Sync != nil {
			member.Sync.Created, member.Sync.Completed = 0, 0
		}
	}
	return d
}
