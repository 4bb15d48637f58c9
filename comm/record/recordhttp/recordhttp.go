// Package recordhttp shows a [record.Recorder] live over HTTP. It is apart from package
// record because few programs that communicate import net/http.
//
//	http.Handle("/debug/tutti", recordhttp.Handler(c))
//
// `tutti diagnose` reads the pages of all ranks as it reads their files:
//
//	for rank in 0 1 2 3; do curl -so tutti-record-$rank.json host$rank:6060/debug/tutti; done
//	tutti diagnose tutti-record-*.json
package recordhttp

import (
	"net/http"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/internal/env"
)

// Handler answers GET with the dump ([record.Recorder.WriteJSON]) of the Recorder that c is
// or wraps. If there is none, it answers 404 and says how to get one. A dump has calls with
// their sizes and source lines, but no data. Protect the page as one of net/http/pprof.
func Handler(c comm.Communicator) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method != http.MethodGet && req.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET", http.StatusMethodNotAllowed)
			return
		}
		r, ok := comm.As[*record.Recorder](c)
		if !ok {
			http.Error(w, "nothing is recorded: start the program with "+env.Record+"=1000", http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		_ = r.WriteJSON(w) // an error is the client's, who has left
	})
}
