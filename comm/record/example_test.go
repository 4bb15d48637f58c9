package record_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/noop"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// The last calls of a program, with the names it gives to parts of its time. `tutti diagnose` compares the files of
// all ranks.
func ExampleRecorder() {
	rt := cpu.New()
	defer rt.Close()
	dir, err := os.MkdirTemp("", "record")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	c := record.New(noop.New(rt), 1000, dir)
	defer c.Close()
	loaded := time.Now()
	c.Span("load", loaded)
	if err := c.AllReduce(0, 0, 0, dtype.F32, comm.Max); err != nil {
		fmt.Println(err)
	}

	var dump bytes.Buffer
	if err := c.WriteJSON(&dump); err != nil {
		fmt.Println(err)
	}
	fmt.Println(strings.Contains(dump.String(), "allreduce of 0 f32, max"))
	c.Member("") // no other process waits for the dump
	c.Abort(comm.ErrCanceled)
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	fmt.Println(filepath.Base(files[0]), err)
	// Output:
	// true
	// tutti-record-0.json <nil>
}

// A program that hangs writes its dump when it is asked to, and before it is ended.
func ExampleRecorder_NotifyOn() {
	rt := cpu.New()
	defer rt.Close()
	c := record.New(noop.New(rt), 1000, "")
	defer c.Close()
	c.NotifyOn(syscall.SIGHUP) // kill -HUP
	c.SaveBefore(context.Background(), syscall.SIGTERM)
	c.Save("the loss is not finite") // or when the program finds something
	fmt.Println(c.Err())
	// Output: <nil>
}
