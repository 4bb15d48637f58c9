package distributed

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"hash/fnv"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/internal/hostmem"
)

// stateMagic is the beginning of what State returns; its last byte is the
// version.
const stateMagic = "tutti-sparse\x01"

// stateHeader is what follows it, little-endian. Behind it come words numbers
// (I32), elements of the residual (F32), and the CRC-32C of everything before.
type stateHeader struct {
	Config          uint64 // fingerprint
	Rank, Size      uint32
	Steps, K        uint64
	Age, Rounds     uint64 // of oktopk: past.age, past.steps
	GlobalThreshold float32
	Words, Elements uint32
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// fingerprint is a hash of the tensor's length and the configuration.
func (e *engine) fingerprint() uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%d %+v", e.n, e.cfg)
	return h.Sum64()
}

// State returns what a [Sparse] with the same configuration needs to go on from
// here, bit for bit: residual, number of the step, thresholds and regions. It
// does not communicate, and waits for the device until ctx is done. Every rank
// saves its own, between the same two steps.
func (s *Sparse) State(ctx context.Context) ([]byte, error) {
	const op = "state"
	if s.closed {
		return nil, opError(op, comm.ErrClosed)
	}
	if s.err != nil {
		return nil, opError(op, s.err)
	}
	s.read(ctx)
	if err := s.failure(); err != nil {
		return nil, opError(op, err)
	}
	header := stateHeader{
		Config: s.fingerprint(), Rank: uint32(s.rank), Size: uint32(s.size), Steps: uint64(s.steps), K: uint64(s.k),
		Age: uint64(s.past.age), Rounds: uint64(s.past.steps), GlobalThreshold: s.past.globalThreshold,
		Words: uint32(s.overflows),
	}
	if s.residual != 0 {
		header.Elements = uint32(s.n)
	}
	size := len(stateMagic) + binary.Size(header) + wordSize*(int(header.Words)+int(header.Elements)+1)
	state := append(make([]byte, 0, size), stateMagic...)
	state, err := binary.Append(state, binary.LittleEndian, header)
	if err == nil {
		state, err = binary.Append(state, binary.LittleEndian, s.host[:s.overflows])
	}
	if residual := state[len(state) : size-wordSize]; err == nil && len(residual) > 0 {
		err = s.rt.CopyOut(residual, s.residual)
		state = state[:size-wordSize]
	}
	if err != nil {
		return nil, opError(op, err)
	}
	return binary.LittleEndian.AppendUint32(state, crc32.Checksum(state, castagnoli)), nil
}

// Restore makes s what it was when [Sparse.State] returned state: the next step
// is the one that followed, with the same bits. It does not communicate; all
// ranks restore. What was chosen for [Auto] stays.
//
// What is no such state, is damaged or of another version is [comm.ErrArgument];
// one of another configuration, tensor length, rank or world size is
// [comm.ErrMismatch]. s is as it was then.
func (s *Sparse) Restore(state []byte) error {
	const op = "restore"
	if s.closed {
		return opError(op, comm.ErrClosed)
	}
	if s.err != nil {
		return opError(op, s.err)
	}
	wrong := func(format string, args ...any) error {
		return opError(op, fmt.Errorf("%w: %s", comm.ErrArgument, fmt.Sprintf(format, args...)))
	}
	version := len(stateMagic) - 1
	if len(state) <= version || string(state[:version]) != stateMagic[:version] {
		return wrong("%d bytes that are no state of a Sparse", len(state))
	}
	if state[version] != stateMagic[version] {
		return wrong("the state has version %d, want %d", state[version], stateMagic[version])
	}
	end := len(state) - wordSize
	var header stateHeader
	first := len(stateMagic) + binary.Size(header)
	if end < first || crc32.Checksum(state[:end], castagnoli) != binary.LittleEndian.Uint32(state[end:]) {
		return wrong("the state is damaged")
	}
	if err := binary.Read(bytes.NewReader(state[len(stateMagic):]), binary.LittleEndian, &header); err != nil {
		return wrong("the state is damaged: %v", err)
	}
	if s.cfg.Pattern == Auto && int(header.Rank) == s.rank && int(header.Size) == s.size {
		s.adopt(header.Config)
	}
	elements := 0
	if s.residual != 0 {
		elements = s.n
	}
	if header.Config != s.fingerprint() || int(header.Rank) != s.rank || int(header.Size) != s.size {
		return opError(op, fmt.Errorf("%w: the state is of rank %d of %d, this is rank %d of %d; configuration or length of the tensor differ: %v",
			comm.ErrMismatch, header.Rank, header.Size, s.rank, s.size, header.Config != s.fingerprint()))
	}
	if int(header.Words) != int(s.overflows) || int(header.Elements) != elements || end-first != wordSize*(int(s.overflows)+elements) ||
		header.K > uint64(s.n) {
		return wrong("the state has %d numbers and %d elements in %d bytes", header.Words, header.Elements, len(state))
	}
	if err := s.order.settle(); err != nil {
		return opError(op, err)
	}
	s.plan(int(header.K))
	numbers, residual := state[first:][:wordSize*int(s.overflows)], state[first+wordSize*int(s.overflows):end]
	copy(hostmem.Bytes(s.host), numbers)
	if s.err == nil {
		s.check(s.rt.CopyIn(s.words.ptr, numbers))
	}
	if s.err == nil && len(residual) > 0 {
		s.check(s.rt.CopyIn(s.residual, residual))
	}
	s.steps = int(header.Steps)
	s.past = past{age: int(header.Age), steps: int(header.Rounds), globalThreshold: header.GlobalThreshold}
	s.stats, s.counted = StepStats{}, true
	if s.err != nil {
		return opError(op, s.err)
	}
	return nil
}
