package record

import (
	"context"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"time"
	"weak"
)

// NotifyOn writes the dump to the file whenever the process gets one of the signals, until
// the Recorder is closed. The signals then do nothing else.
func (r *Recorder) NotifyOn(signals ...os.Signal) {
	r.onSignal(signals, nil)
}

// SaveBefore writes the dump to the file before one of the signals, such as SIGTERM, does
// what it would without the Recorder: it sends the signal to the process again. If ctx
// ends, or the Recorder is closed, within half a second, the program handles the signal
// itself, and gets it only once.
func (r *Recorder) SaveBefore(ctx context.Context, signals ...os.Signal) {
	r.onSignal(signals, ctx)
}

// onSignal writes the dump on signals until the Recorder is closed. With a context, it
// passes a signal on and ends, unless the context ends first.
func (r *Recorder) onSignal(signals []os.Signal, handled context.Context) {
	if len(signals) == 0 {
		return // Notify would take all
	}
	got := make(chan os.Signal, 1)
	stop := make(chan struct{})
	stopOnce := sync.OnceFunc(func() { close(stop) })
	signal.Notify(got, signals...)
	ended := make(chan struct{})
	recorder := weak.Make(r)
	go func() {
		defer close(ended)
		saveOn(recorder, got, stop, handled)
	}()
	runtime.AddCleanup(r, func(stop func()) { stop() }, stopOnce)
	r.flight.mu.Lock()
	defer r.flight.mu.Unlock()
	r.stops = append(r.stops, func() {
		stopOnce()
		<-ended // a process that ends meanwhile would leave half a file
	})
}

// saveOn is onSignal's goroutine. It does not keep a Recorder that the program has forgotten: the communicator below
// says that it was never closed when it is garbage.
func saveOn(recorder weak.Pointer[Recorder], got chan os.Signal, stop <-chan struct{}, handled context.Context) {
	defer signal.Stop(got)
	for {
		var s os.Signal
		select {
		case s = <-got:
		case <-stop:
			return
		}
		if r := recorder.Value(); r != nil {
			r.Save(s.String())
		}
		if handled == nil {
			continue
		}
		select {
		case <-handled.Done():
		case <-stop:
		case <-time.After(handling):
			signal.Stop(got)
			if self, err := os.FindProcess(os.Getpid()); err == nil {
				_ = self.Signal(s)
			}
		}
		return
	}
}
