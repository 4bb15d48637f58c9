package distributed

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math"

	"github.com/tutti-go/tutti/comm"
)

// gradientsMagic is the beginning of what [GradientSync.State] returns; its last
// byte is the version. Behind it come gradientsHeader and the state of each bucket's
// Sparse with its length (U32) in front, 0 for a plain bucket, and a CRC-32C.
const gradientsMagic = "tutti-gradients\x01"

type gradientsHeader struct {
	Layout  uint64 // fingerprint of buckets and their gradients
	Steps   uint64
	Buckets uint32
}

// layout is a hash of which gradients the buckets have.
func (g *GradientSync) layout() uint64 {
	h := fnv.New64a()
	for _, b := range g.buckets {
		fmt.Fprintf(h, "%v %v %v\n", b.dt, b.params, b.bytes)
	}
	return h.Sum64()
}

// between checks that no step is under way.
func (g *GradientSync) between(op string) error {
	if err := g.usable(op); err != nil {
		return err
	}
	for _, t := range g.given {
		if t != nil {
			return opError(op, fmt.Errorf("%w: in the middle of a step, want after Wait", comm.ErrArgument))
		}
	}
	return nil
}

// State returns what a [GradientSync] of the same gradients and configuration needs
// to go on from here, bit for bit: what [Sparse.State] returns for each bucket. It
// is for between two steps, does not communicate, and waits for the device until ctx
// is done. Every rank saves its own.
func (g *GradientSync) State(ctx context.Context) ([]byte, error) {
	const op = "gradient state"
	if err := g.between(op); err != nil {
		return nil, err
	}
	state := []byte(gradientsMagic)
	header := gradientsHeader{Layout: g.layout(), Steps: uint64(g.steps), Buckets: uint32(len(g.buckets))}
	state, err := binary.Append(state, binary.LittleEndian, header)
	for i, b := range g.buckets {
		var part []byte
		if b.sparse != nil && err == nil {
			part, err = b.sparse.State(ctx)
		}
		if int64(len(part)) > math.MaxUint32 {
			err = fmt.Errorf("%w: bucket %d has a state of %d bytes", comm.ErrUnsupported, i, len(part))
		}
		state = binary.LittleEndian.AppendUint32(state, uint32(len(part)))
		state = append(state, part...)
	}
	if err != nil {
		return nil, opError(op, err)
	}
	return seal(state), nil
}

// Restore makes g what it was when [GradientSync.State] returned its state. What
// [Sparse.Restore] says of other world sizes and of errors holds here too, for all
// buckets: a wrong state is found before anything has changed.
func (g *GradientSync) Restore(ctx context.Context, states ...[]byte) error {
	const op = "gradient restore"
	if err := g.between(op); err != nil {
		return err
	}
	steps, err := g.restore(ctx, states)
	if err != nil {
		return opError(op, err)
	}
	g.steps, g.stats, g.open = steps, GradientStats{}, false
	return nil
}

func (g *GradientSync) restore(ctx context.Context, states [][]byte) (steps int, err error) {
	if len(states) == 0 {
		return 0, fmt.Errorf("%w: no state", comm.ErrArgument)
	}
	perBucket := make([][][]byte, len(g.buckets))
	for i, state := range states {
		header, parts, err := g.parse(state)
		if err != nil {
			return 0, fmt.Errorf("state %d: %w", i, err)
		}
		steps = int(header.Steps)
		for j, part := range parts {
			perBucket[j] = append(perBucket[j], part)
		}
	}
	parsed := make([][]savedState, len(g.buckets))
	for i, b := range g.buckets {
		if b.sparse == nil {
			continue
		}
		if parsed[i], err = b.sparse.parseAll(perBucket[i]); err == nil {
			err = b.sparse.settled(ctx)
		}
		if err != nil {
			return 0, fmt.Errorf("bucket %d: %w", i, err)
		}
	}
	for i, b := range g.buckets {
		if b.sparse == nil {
			continue
		}
		if g.err = b.sparse.restore(ctx, parsed[i]); g.err != nil {
			return 0, fmt.Errorf("bucket %d: %w", i, g.err)
		}
	}
	return steps, nil
}

// parse checks a state, and returns those of its buckets.
func (g *GradientSync) parse(state []byte) (header gradientsHeader, parts [][]byte, err error) {
	rest, err := unseal(state, gradientsMagic, "a GradientSync")
	if err != nil {
		return header, nil, err
	}
	damaged := fmt.Errorf("%w: the state is damaged", comm.ErrArgument)
	size := binary.Size(header)
	if len(rest) < size {
		return header, nil, damaged
	}
	if err := binary.Read(bytes.NewReader(rest), binary.LittleEndian, &header); err != nil {
		return header, nil, fmt.Errorf("%w: %w", damaged, err)
	}
	if header.Layout != g.layout() || int(header.Buckets) != len(g.buckets) {
		return header, nil, fmt.Errorf("%w: the state is of other gradients or buckets", comm.ErrMismatch)
	}
	if header.Steps > math.MaxInt64 {
		return header, nil, damaged
	}
	rest = rest[size:]
	for i, b := range g.buckets {
		if len(rest) < wordSize {
			return header, nil, damaged
		}
		n := int(binary.LittleEndian.Uint32(rest))
		if rest = rest[wordSize:]; n > len(rest) {
			return header, nil, damaged
		}
		if (n > 0) != (b.sparse != nil) {
			return header, nil, fmt.Errorf("%w: bucket %d is configured otherwise", comm.ErrMismatch, i)
		}
		parts, rest = append(parts, rest[:n]), rest[n:]
	}
	if len(rest) > 0 {
		return header, nil, damaged
	}
	return header, parts, nil
}

// ScaleResidual is [Sparse.ScaleResidual] for all buckets, between two steps.
func (g *GradientSync) ScaleResidual(factor float64) error {
	if err := g.between("scale residual"); err != nil {
		return err
	}
	for i, b := range g.buckets {
		if b.sparse == nil {
			continue
		}
		if err := b.sparse.ScaleResidual(factor); err != nil {
			return fmt.Errorf("bucket %d: %w", i, err)
		}
	}
	return nil
}

// Rebind moves g to another communicator, as [Sparse.Rebind] does: all ranks of c do
// it together, between two steps, for it allocates symmetric memory where there is
// such. Where a step is no transaction and has failed, gradients and residuals are
// what they are; g can be used again only if no bucket has a residual.
func (g *GradientSync) Rebind(ctx context.Context, c comm.Communicator) error {
	const op = "gradient rebind"
	if err := checkComm(c); err != nil {
		return opError(op, err)
	}
	if err := comm.CheckDevice(c, g.rt.Device()); err != nil {
		return opError(op, err)
	}
	if g.joint == nil && !g.closed {
		g.err = nil // a plain allreduce keeps nothing that its error could spoil
		g.reset()
	}
	if err := g.between(op); err != nil {
		return err
	}
	if err := g.rebind(ctx, c); err != nil {
		g.err = err
		return opError(op, err)
	}
	return nil
}

func (g *GradientSync) rebind(ctx context.Context, c comm.Communicator) error {
	if err := g.order.settle(); err != nil {
		return err
	}
	_, symmetric := comm.As[comm.SymmetricAllocator](g.meter)
	for _, b := range g.buckets {
		b.joined, b.apart, b.flat = nil, nil, nil
		if b.memory == nil {
			continue
		}
		if !symmetric { // otherwise the communicator's Close does it, as its peers may be gone
			if err := b.memory.Free(ctx); err != nil && !errors.Is(err, comm.ErrClosed) {
				return err
			}
		}
		b.memory = nil
	}
	g.meter = comm.NewMeter(c)
	g.order = newOrder(g.rt, g.meter)
	for _, b := range g.buckets {
		if b.sparse != nil {
			if err := b.sparse.Rebind(g.meter); err != nil {
				return err
			}
		}
	}
	if g.open { // the buckets have found out
		g.stats.Skipped, g.open = g.buckets[0].sparse.stats.Skipped, false
	}
	if g.joint != nil {
		g.joint.bind(g.meter)
		if err := g.joint.place(g); err != nil {
			return err
		}
	}
	g.reset()
	return g.allocate(ctx)
}
