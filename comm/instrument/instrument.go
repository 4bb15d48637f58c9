// Package instrument puts decorators around a communicator that find out why a program
// hangs, if the environment asks for them.
package instrument

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/checked"
	"github.com/tutti-go/tutti/comm/record"
	"github.com/tutti-go/tutti/internal/dump"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/runtime"
)

// Run runs body with the decorators around c that the environment asks for:
//
//   - TUTTI_CHECK is 1, or how long a rank waits for the others ("10s"; see
//     [checked.New]): a [checked.Communicator], whose memory comes from rt. All ranks
//     need the same environment.
//   - TUTTI_RECORD is a number of calls: a [record.Recorder] of that many. It writes its dump
//     to the directory TUTTI_RECORD_DIR, or the current one. It also does so on SIGUSR1,
//     and on SIGTERM before that ends the process, on systems that have these signals. A
//     program that handles SIGTERM should end ctx when it comes; otherwise it gets it a
//     second time.
//
// Without the variables, or where they are 0, Run is body(ctx, c). Decorators that are
// already on c are not added twice. The decorators and c are closed with the error of
// body, as [comm.Run] does it. Call Run in a body of [comm.Run]:
//
//	err := local.Run(ctx, 4, func(ctx context.Context, c comm.Communicator) error {
//		rt := cpu.New()
//		defer rt.Close()
//		return instrument.Run(ctx, rt, c, train)
//	})
func Run(
	ctx context.Context, rt runtime.Runtime, c comm.Communicator,
	body func(ctx context.Context, c comm.Communicator) error,
) error {
	decorated, err := decorate(ctx, rt, c, recordDir())
	if err != nil {
		return err
	}
	if decorated == c {
		return body(ctx, c)
	}
	return comm.Run(ctx, []comm.Communicator{decorated}, body)
}

// recordDir is where dumps are written.
func recordDir() string {
	return cmp.Or(os.Getenv(env.RecordDir), ".")
}

// epochsKept is of how many epochs dumps are kept.
const epochsKept = 16

// Epoch returns c with the decorators of [Run], for a program whose communicators take each other's place, as those of
// an elastic job, and that closes c itself. Each epoch has a directory for its dumps, and the last 16 directories are
// kept. Dumps have the member's name. A rank that aborts does not wait for the dumps of others.
func Epoch(
	ctx context.Context, rt runtime.Runtime, c comm.Communicator, number uint64, member string,
) (comm.Communicator, error) {
	dir := filepath.Join(recordDir(), dump.EpochDir)
	decorated, err := decorate(ctx, rt, c, dir+strconv.FormatUint(number, 10))
	if r, records := decorated.(*record.Recorder); records {
		r.Member(member)
		if number > epochsKept {
			_ = os.RemoveAll(dir + strconv.FormatUint(number-epochsKept, 10))
		}
	}
	return decorated, err
}

// decorate returns c with the decorators that the environment asks for, or c itself.
func decorate(
	ctx context.Context, rt runtime.Runtime, c comm.Communicator, dir string,
) (comm.Communicator, error) {
	calls, err := callsToRecord(c)
	if err != nil {
		return nil, err
	}
	k, err := checkFromEnv(ctx, c, rt)
	if err != nil {
		return nil, err
	}
	if k != nil {
		c = k
	}
	if calls > 0 {
		r := record.New(c, calls, dir)
		r.NotifyOn(dumpSignals...)
		r.SaveBefore(ctx, endSignals...)
		c = r
	}
	return c, nil
}

// checkFromEnv returns a [checked.Communicator] around c, or nil if TUTTI_CHECK asks for
// none or c has one already.
func checkFromEnv(ctx context.Context, c comm.Communicator, rt runtime.Runtime) (*checked.Communicator, error) {
	var timeout time.Duration
	switch text := os.Getenv(env.Check); text {
	case "", "0":
		return nil, nil
	case "1":
	default:
		var err error
		timeout, err = time.ParseDuration(text)
		if err != nil || timeout <= 0 {
			return nil, fmt.Errorf("%w: %s is %q, want 1 or a time to wait, such as 10s",
				comm.ErrArgument, env.Check, text)
		}
	}
	if _, checks := comm.As[*checked.Communicator](c); checks {
		return nil, nil
	}
	return checked.New(ctx, c, rt, timeout)
}

// callsToRecord returns how many calls TUTTI_RECORD asks to record, 0 if c records
// already.
func callsToRecord(c comm.Communicator) (int, error) {
	text := os.Getenv(env.Record)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 || n > 1<<24 {
		return 0, fmt.Errorf("%w: %s is %q, want a number of calls, such as 1000",
			comm.ErrArgument, env.Record, text)
	}
	if _, records := comm.As[*record.Recorder](c); records {
		return 0, nil
	}
	return n, nil
}
