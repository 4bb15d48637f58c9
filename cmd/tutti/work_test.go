//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/tutti-go/tutti"
	"github.com/tutti-go/tutti/cmd/tutti/internal/launch"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// roleVariable gives the test binary a role other than running tests.
const roleVariable = "TUTTI_TEST_ROLE"

// roles are the possible roles.
var roles = map[string]func() error{
	"works": func() error {
		if told("gone", os.Getenv("TUTTI_RANK")) {
			return os.WriteFile("struck", nil, 0o600)
		}
		return tutti.Run(context.Background(), work)
	},
	"trains": func() error { return tutti.Run(context.Background(), train) },
	"rival":  rival,
}

// play runs the test binary's role and returns its exit code.
func play(role func() error) int {
	err := role()
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "tutti:", err)
	return 1
}

// rival is a launcher whose version differs from the command's. It joins the address in its arguments.
func rival() error {
	if err := os.Setenv(roleVariable, "works"); err != nil { // for the ranks that it would start
		return err
	}
	return launch.Run(context.Background(), launch.Config{
		Command:  os.Args[:1],
		Ranks:    1,
		Machines: 1,
		Join:     os.Args[1:],
		Wait:     time.Minute,
		Version:  "0.1.0",
		Out:      os.Stdout,
		Err:      os.Stderr,
	})
}

// told reports whether the working directory has a file that asks all ranks, or one of them, to do something.
func told(what, rank string) bool {
	for _, name := range []string{what, what + "." + rank} {
		if _, err := os.Stat(name); !errors.Is(err, os.ErrNotExist) {
			return true
		}
	}
	return false
}

// work is a rank that reduces with the others until all are asked to end, or until it is asked to do something else.
func work(ctx context.Context, r tutti.Rank) error {
	rank := fmt.Sprint(r.Comm.Rank())
	for step := 0; ; step++ {
		for told("sleep", rank) && !told("end", "") {
			time.Sleep(time.Millisecond)
		}
		over, err := agree(ctx, r, rank)
		if err != nil {
			return errors.Join(err, awaitLeavers())
		}
		if step == 0 { // files say who is who, and that all are connected
			if err := os.WriteFile("rank"+rank, fmt.Append(nil, os.Getpid()), 0o600); err != nil {
				return err
			}
		}
		if told("exit", rank) {
			os.Exit(0) // without Close
		}
		if told("leave", rank) {
			return os.WriteFile("keeper."+rank, fmt.Append(nil, os.Getppid()), 0o600)
		}
		if over {
			return nil
		}
		time.Sleep(time.Millisecond) // leaves the processors to the misfortune
	}
}

// awaitLeavers waits until nothing is left of ranks that were asked to leave, and of their keepers. Launchers then
// hear of their ends before this rank fails without them.
func awaitLeavers() error {
	files, err := filepath.Glob("keeper.*")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		keeper, err := strconv.Atoi(string(text))
		if err != nil {
			return err
		}
		for !errors.Is(syscall.Kill(keeper, 0), syscall.ESRCH) {
			time.Sleep(time.Millisecond)
		}
	}
	return err
}

// agree reports whether any rank was asked to end; all ranks get the same answer.
func agree(ctx context.Context, r tutti.Rank, rank string) (over bool, err error) {
	flags := make([]float32, 4)
	if told("count", rank) {
		flags = make([]float32, 5)
	}
	if told("end", "") {
		flags[0] = 1
	}
	var tensor *runtime.Tensor
	if told("type", rank) {
		tensor, err = runtime.FromSlice(r.Runtime, make([]float64, 4))
	} else {
		tensor, err = runtime.FromSlice(r.Runtime, flags)
	}
	if err != nil {
		return false, err
	}
	defer tensor.Free() //nolint:errcheck // the runtime reports forgotten tensors
	if err := distributed.AllReduce(ctx, r.Comm, tensor, comm.Max); err != nil {
		return false, err
	}
	if flags, err = runtime.ToSlice[float32](tensor); err != nil {
		return false, err
	}
	return flags[0] > 0, nil
}

// train is a rank that makes a training step, and fails if the ranks train different models.
func train(ctx context.Context, r tutti.Rank) error {
	rank := fmt.Sprint(r.Comm.Rank())
	shape := []int{64, 64}
	if told("vector", rank) {
		shape = []int{64 * 64}
	}
	var errs [3]error
	var parameters [3]*runtime.Tensor
	for i := range parameters {
		parameters[i], errs[i] = runtime.New(r.Runtime, dtype.F32, shape...)
	}
	if err := errors.Join(errs[:]...); err != nil {
		return err
	}
	var err error
	model := parameters[:]
	switch {
	case told("shape", rank):
		model[1], err = runtime.New(r.Runtime, dtype.F32, 64, 65)
	case told("type", rank):
		model[1], err = runtime.New(r.Runtime, dtype.F64, shape...)
	case told("count", rank):
		model = model[:2]
	}
	if err != nil {
		return err
	}
	config := ddp.Config{}
	if told("pattern", rank) {
		config.Pattern = sparse.TopkA
		config.Density = 0.1
	}
	gradients, err := ddp.New(ctx, r.Runtime, r.Comm, model, config)
	if err != nil {
		return err
	}
	defer gradients.Close() //nolint:errcheck // the error of the step is what counts
	return gradients.ReduceAll(ctx, model)
}
