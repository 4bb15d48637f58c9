// Command gradients has gorgonia.org/cu launch kernels that compute gradients on all GPUs of this machine, and tutti
// average them over NCCL, in memory of cu and on its streams. The host waits only to check the result. The program
// needs GPUs and NCCL.
//
// It makes its communicators itself because the runtimes of tutti.Run open GPUs with contexts and streams of tutti;
// here contexts and streams belong to cu.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"math"
	goruntime "runtime"
	"unsafe"

	"gorgonia.org/cu"

	tutti "github.com/tutti-go/tutti/adapters/cu"
	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/nccl"
	"github.com/tutti-go/tutti/distributed/ddp"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cuda"
)

const (
	elements = 1 << 20
	steps    = 100
	block    = 256
)

// kernel stores value in the first n elements of p:
//
//	unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
//	if (i < n) p[i] = value;
const kernel = `
.version 7.5
.target sm_80
.address_size 64

.visible .entry gradient(
	.param .u64 param_p,
	.param .u64 param_n,
	.param .u64 param_value
)
{
	.reg .pred %p<2>;
	.reg .b32 %r<6>;
	.reg .b64 %rd<7>;

	ld.param.u64 %rd4, [param_n];
	mov.u32 %r2, %ctaid.x;
	mov.u32 %r3, %ntid.x;
	mov.u32 %r4, %tid.x;
	mad.lo.s32 %r5, %r2, %r3, %r4;
	cvt.u64.u32 %rd5, %r5;
	setp.ge.u64 %p1, %rd5, %rd4;
	@%p1 bra $DONE;
	ld.param.u64 %rd2, [param_p];
	cvta.to.global.u64 %rd3, %rd2;
	ld.param.u32 %r1, [param_value];
	mul.wide.u32 %rd6, %r5, 4;
	add.s64 %rd1, %rd3, %rd6;
	st.global.u32 [%rd1], %r1;
$DONE:
	ret;
}
`

func main() {
	made := flag.Bool("made", false,
		"make contexts with cuCtxCreate instead of retaining the primary ones, which is what NCCL uses")
	flag.Parse()
	if flag.NArg() > 0 {
		log.Fatalf("unknown arguments: %q", flag.Args())
	}
	if err := run(*made); err != nil {
		log.Fatal(err)
	}
}

// gpu holds the objects that cu has made on a GPU.
type gpu struct {
	device  cu.Device    // the GPU
	context cu.CUContext // of CUDA, current on the thread that uses it
	stream  cu.Stream    // gradients are computed on it
	fill    cu.Function  // kernel that computes a gradient
	memory  cu.DevicePtr // of the gradients
}

func run(made bool) error {
	n, err := cu.NumDevices()
	if err != nil {
		return err
	}
	goruntime.LockOSThread() // a context of cu is current on one thread
	gpus := make([]*gpu, n)
	runtimes := make([]*cuda.Runtime, n)
	for i := range gpus {
		if gpus[i], err = prepare(i, made); err != nil {
			return fmt.Errorf("GPU %d: %w", i, err)
		}
		if runtimes[i], err = tutti.Open(i, gpus[i].context, tutti.WithStream(gpus[i].stream)); err != nil {
			return err
		}
	}
	goruntime.UnlockOSThread()
	ctx := context.Background()
	world, err := nccl.InProcess(ctx, runtimes)
	if err != nil {
		return err
	}
	ranks := make([]comm.Communicator, n)
	for i, c := range world {
		ranks[i] = c
	}
	err = comm.Run(ctx, ranks, func(ctx context.Context, c comm.Communicator) error {
		return gpus[c.Rank()].train(ctx, c, runtimes[c.Rank()])
	})
	for i, rt := range runtimes {
		err = errors.Join(err, rt.Close(), gpus[i].release(made))
	}
	if err == nil {
		fmt.Printf("%d GPUs, %d steps: every average of %d elements is right (contexts made by cuCtxCreate: %v)\n",
			n, steps, elements, made)
	}
	return err
}

// prepare makes the objects for the kernels with cu alone.
func prepare(i int, made bool) (*gpu, error) {
	g := &gpu{}
	var err error
	if g.device, err = cu.GetDevice(i); err != nil {
		return nil, err
	}
	if made {
		g.context, err = g.device.MakeContext(cu.SchedAuto)
	} else {
		g.context, err = g.device.RetainPrimaryCtx()
	}
	if err == nil {
		err = cu.SetCurrentContext(g.context)
	}
	if err != nil {
		return nil, err
	}
	if g.stream, err = cu.MakeStream(cu.NonBlocking); err != nil {
		return nil, err
	}
	module, err := cu.LoadData(kernel)
	if err != nil {
		return nil, err
	}
	if g.fill, err = module.Function("gradient"); err != nil {
		return nil, err
	}
	g.memory, err = cu.MemAlloc(4 * elements)
	return g, err
}

// train makes steps on one GPU. The gradient of rank r in step s is r + s.
func (g *gpu) train(ctx context.Context, c comm.Communicator, rt *cuda.Runtime) error {
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	if err := cu.SetCurrentContext(g.context); err != nil {
		return err
	}
	gradient, err := tutti.Wrap(rt, g.memory, dtype.F32, elements)
	if err != nil {
		return err
	}
	all := []*runtime.Tensor{gradient}
	sync, err := ddp.New(ctx, rt, c, all, ddp.Config{})
	if err != nil {
		return err
	}
	defer sync.Close()
	for step := range steps {
		p := g.memory
		n := uint64(elements)
		value := uint64(math.Float32bits(float32(c.Rank() + step)))
		err := g.fill.Launch(elements/block, 1, 1, block, 1, 1, 0, g.stream,
			[]unsafe.Pointer{
				unsafe.Pointer(&p),
				unsafe.Pointer(&n),
				unsafe.Pointer(&value),
			})
		if err != nil {
			return err
		}
		if err := sync.ReduceAll(ctx, all); err != nil {
			return err
		}
		if err := c.Sync(ctx); err != nil {
			return err
		}
		values, err := runtime.ToSlice[float32](gradient)
		if err != nil {
			return err
		}
		want := float32(c.WorldSize()-1)/2 + float32(step)
		for i, x := range values {
			if x != want {
				return fmt.Errorf("rank %d, step %d: element %d is %v, want %v", c.Rank(), step, i, x, want)
			}
		}
	}
	return gradient.Free()
}

// release frees the objects of prepare.
func (g *gpu) release(made bool) error {
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	err := cu.SetCurrentContext(g.context)
	err = errors.Join(err, cu.MemFree(g.memory), g.stream.Destroy())
	if made {
		return errors.Join(err, g.context.Destroy())
	}
	return errors.Join(err, g.device.ReleasePrimaryCtx())
}
