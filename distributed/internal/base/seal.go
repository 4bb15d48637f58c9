package base

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/tutti-go/tutti/comm"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Seal ends a state: with the CRC-32C of everything before.
func Seal(state []byte) []byte {
	return binary.LittleEndian.AppendUint32(state, crc32.Checksum(state, castagnoli))
}

// Unseal returns what is between a state's magic and its end, if it is whole.
func Unseal(state []byte, magic, of string) ([]byte, error) {
	version, end := len(magic)-1, len(state)-WordSize
	switch {
	case len(state) <= version || string(state[:version]) != magic[:version]:
		return nil, fmt.Errorf("%w: %d bytes that are no state of %s", comm.ErrArgument, len(state), of)
	case state[version] != magic[version]:
		return nil, fmt.Errorf("%w: the state has version %d, want %d", comm.ErrArgument, state[version], magic[version])
	case end < len(magic) || crc32.Checksum(state[:end], castagnoli) != binary.LittleEndian.Uint32(state[end:]):
		return nil, fmt.Errorf("%w: the state is damaged", comm.ErrArgument)
	}
	return state[len(magic):end], nil
}
