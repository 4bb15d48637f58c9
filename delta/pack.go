package delta

import (
	"bytes"
	"fmt"
	"math/bits"

	"github.com/klauspost/compress/zstd"
)

// dictionaryID is the dictionary's number in frames of zstd.
const dictionaryID = 1

// Windows extend from the end of the data to the beginning of the dictionary.
const (
	smallestWindow = 1 << 10
	largestWindow  = 1 << 29
)

// windowSize returns the size of the window for this many bytes, a power of two.
func windowSize(bytes int) int {
	return min(max(1<<bits.Len(uint(bytes)), smallestWindow), largestWindow)
}

// pack compresses data with a similar text as a dictionary. Data equal to it has no bytes.
func pack(like, data []byte) ([]byte, error) {
	if bytes.Equal(like, data) {
		return nil, nil
	}
	options := []zstd.EOption{
		zstd.WithEncoderLevel(zstd.SpeedBestCompression),
		zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(windowSize(len(like) + len(data))),
		zstd.WithEncoderCRC(false),
	}
	if len(like) > 0 {
		options = append(options, zstd.WithEncoderDictRaw(dictionaryID, like))
	}
	encoder, err := zstd.NewWriter(nil, options...)
	if err != nil {
		return nil, fmt.Errorf("delta: %w", err)
	}
	return encoder.EncodeAll(data, nil), nil
}

// unpack returns the data with the given length from which pack made frame.
func unpack(like, frame []byte, length uint64) ([]byte, error) {
	// No message makes a receiver allocate more than 1024 times its length and twice the dictionary.
	if length > 1024*uint64(len(frame))+2*uint64(len(like)) {
		return nil, errDamaged
	}
	if len(frame) == 0 {
		if length != 0 && length != uint64(len(like)) {
			return nil, errDamaged
		}
		return like[:length], nil
	}
	options := []zstd.DOption{
		zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxMemory(max(length, uint64(windowSize(len(like)+int(length))))),
		zstd.WithDecoderMaxWindow(largestWindow),
		zstd.WithDecoderLowmem(true),
	}
	if len(like) > 0 {
		options = append(options, zstd.WithDecoderDictRaw(dictionaryID, like))
	}
	decoder, err := zstd.NewReader(nil, options...)
	if err != nil {
		return nil, fmt.Errorf("delta: %w", err)
	}
	defer decoder.Close()
	data, err := decoder.DecodeAll(frame, make([]byte, 0, length))
	if err != nil || uint64(len(data)) != length {
		return nil, errDamaged
	}
	return data, nil
}
