package recordhttp_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/comm/record/recordhttp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// A program that records shows what it did last.
func ExampleHandler() {
	rt := cpu.New()
	defer rt.Close()
	c := record.New(noop.New(rt), 1000, "")
	defer c.Close()
	if err := c.AllReduce(0, 0, 0, dtype.F32, comm.Max); err != nil {
		fmt.Println(err)
	}
	if err := c.Sync(context.Background()); err != nil {
		fmt.Println(err)
	}

	answer := httptest.NewRecorder() // a browser, or curl
	recordhttp.Handler(c).ServeHTTP(answer, httptest.NewRequest("GET", "/debug/tutti", nil))
	var dump dump.File
	if err := json.NewDecoder(answer.Body).Decode(&dump); err != nil {
		fmt.Println(err)
	}
	for _, e := range dump.Entries {
		fmt.Println(e.Tutti.Call)
	}
	// Output: allreduce of 0 f32, max
}
