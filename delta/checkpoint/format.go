package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/adler32"
	"math"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/blake3"
	"github.com/zeebo/xxh3"

	"github.com/tutti-go/tutti/delta"
)

// Trainers of language models and the engines that serve them share a format of deltas, which is not this module's: a
// folder of safetensors shards with an index, whose tensors of bytes hold frames of zstd. slime, miles, SGLang, vime
// and modelexpress write and read it. docs/delta-format.md describes it.

// Format is what the index of a delta in the shared format says of it.
type Format struct {
	// Version is that of the delta, and Base the one that it is for: any texts. Six digits are usual.
	Version, Base string
	// Encoding is "xor", or "overwrite", which can be applied twice; "" is xor.
	Encoding string
	// Checksum is "xxh3-128", "blake3" or "adler32", of each tensor that changes; "" is xxh3-128.
	Checksum string
}

const (
	encodingXor       = "xor"
	encodingOverwrite = "overwrite"
	compressionZstd   = "zstd"
	checksumXXH3      = "xxh3-128"
	checksumBLAKE3    = "blake3"
	checksumAdler     = "adler32"
)

// errFormat is the error of what is no delta in the shared format, or not for these tensors.
var errFormat = errors.New("not a delta in the shared format")

// formatIndex is the index of a delta.
type formatIndex struct {
	Metadata  formatMetadata    `json:"metadata"`
	WeightMap map[string]string `json:"weight_map"`
}

// formatMetadata is what an index says beside which tensor is in which shard.
type formatMetadata struct {
	Version     string `json:"version"`
	BaseVersion string `json:"base_version"`
	Encoding    string `json:"delta_encoding"`
	Compression string `json:"compression_format"`
	Checksum    string `json:"checksum_format"`
}

// parseFormat reads an index.
func parseFormat(index []byte) (f Format, weights map[string]string, err error) {
	var content formatIndex
	if err := json.Unmarshal(index, &content); err != nil {
		return f, nil, fmt.Errorf("%w: %w", errFormat, err)
	}
	m := content.Metadata
	switch {
	case m.Encoding == "":
		return f, nil, fmt.Errorf("%w: its index has no delta_encoding, as one of a full checkpoint", errFormat)
	case m.Compression != compressionZstd:
		return f, nil, fmt.Errorf("%w: it is compressed by %q, want %q", errFormat, m.Compression, compressionZstd)
	}
	f = Format{
		Version:  m.Version,
		Base:     m.BaseVersion,
		Encoding: m.Encoding,
		Checksum: m.Checksum,
	}
	for _, shard := range content.WeightMap {
		if err := checkName(shard); err != nil {
			return f, nil, fmt.Errorf("%w: %w", errFormat, err)
		}
	}
	return f, content.WeightMap, f.check()
}

// check refuses encodings and checksums that are unknown.
func (f Format) check() error {
	if f.Encoding != encodingXor && f.Encoding != encodingOverwrite {
		return fmt.Errorf("%w: encoding %q, want %q or %q", errFormat, f.Encoding, encodingXor, encodingOverwrite)
	}
	_, err := f.hash()
	return err
}

// withDefaults returns f with what is not set.
func (f Format) withDefaults() Format {
	if f.Encoding == "" {
		f.Encoding = encodingXor
	}
	if f.Checksum == "" {
		f.Checksum = checksumXXH3
	}
	return f
}

// index returns the index of a delta with these shards by tensor.
func (f Format) index(weights map[string]string) ([]byte, error) {
	return json.Marshal(formatIndex{
		Metadata: formatMetadata{
			Version:     f.Version,
			BaseVersion: f.Base,
			Encoding:    f.Encoding,
			Compression: compressionZstd,
			Checksum:    f.Checksum,
		},
		WeightMap: weights,
	})
}

// hash128 is XXH3 with 128 bits.
type hash128 struct{ *xxh3.Hasher }

func (h hash128) Sum(b []byte) []byte {
	sum := h.Sum128().Bytes()
	return append(b, sum[:]...)
}

// hash returns what makes the checksum of a tensor.
func (f Format) hash() (hash.Hash, error) {
	switch f.Checksum {
	case checksumXXH3:
		return hash128{xxh3.New()}, nil
	case checksumBLAKE3:
		return blake3.New(), nil
	case checksumAdler:
		return adler32.New(), nil
	}
	return nil, fmt.Errorf("%w: checksum %q, want %q, %q or %q",
		errFormat, f.Checksum, checksumXXH3, checksumBLAKE3, checksumAdler)
}

// sum returns the checksum of a tensor.
func (f Format) sum(data []byte) (string, error) {
	h, err := f.hash()
	if err != nil {
		return "", err
	}
	_, _ = h.Write(data) // which does not fail
	return hex.EncodeToString(h.Sum(nil)), nil
}

// countBytes is the length of numbers of the encoding overwrite: how many bytes change, and where.
const countBytes = 4

// encode returns how a tensor changes, without compression, and nil if it does not. old becomes the difference.
func (f Format) encode(old, now []byte) ([]byte, error) {
	if bytes.Equal(old, now) {
		return nil, nil
	}
	if f.Encoding == encodingXor {
		for i, b := range now {
			old[i] ^= b
		}
		return old, nil
	}
	if len(now) > math.MaxUint32 {
		return nil, fmt.Errorf("%w: a tensor of %d bytes, which positions of 32 bits do not reach: use %s",
			errFormat, len(now), encodingXor)
	}
	diff := make([]byte, countBytes)
	var values []byte
	for i, b := range now {
		if b != old[i] {
			diff = binary.LittleEndian.AppendUint32(diff, uint32(i))
			values = append(values, b)
		}
	}
	binary.LittleEndian.PutUint32(diff, uint32(len(values)))
	return append(diff, values...), nil
}

// longest returns the length of what encode returns of a tensor of that many bytes, at most.
func (f Format) longest(size int64) int64 {
	if f.Encoding == encodingXor {
		return size
	}
	return countBytes + size*(countBytes+1)
}

// decode changes a tensor by what encode has made.
func (f Format) decode(diff, data []byte) error {
	if f.Encoding == encodingXor {
		if len(diff) != len(data) {
			return fmt.Errorf("%w: %d bytes for a tensor of %d", errFormat, len(diff), len(data))
		}
		for i, b := range diff {
			data[i] ^= b
		}
		return nil
	}
	if len(diff) < countBytes {
		return fmt.Errorf("%w: no count of bytes", errFormat)
	}
	n := uint64(binary.LittleEndian.Uint32(diff))
	diff = diff[countBytes:]
	if uint64(len(diff)) != n*(countBytes+1) {
		return fmt.Errorf("%w: %d bytes for %d that change", errFormat, len(diff), n)
	}
	values := diff[n*countBytes:]
	for i, value := range values {
		position := binary.LittleEndian.Uint32(diff[countBytes*i:])
		if uint64(position) >= uint64(len(data)) {
			return fmt.Errorf("%w: byte %d of a tensor of %d", errFormat, position, len(data))
		}
		data[position] = value
	}
	return nil
}

// singleSegment is up to which length frames are a segment, as otherwise short ones do not say how long data is.
const singleSegment = 1 << 20

// compress returns a frame, which says how long data is: engines ask for that.
func compress(data []byte) ([]byte, error) {
	encoder, err := zstd.NewWriter(nil,
		zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithEncoderConcurrency(1),
		zstd.WithSingleSegment(len(data) <= singleSegment),
	)
	if err != nil {
		return nil, err
	}
	return encoder.EncodeAll(data, nil), nil
}

// usualWindow is what encoders that do not know the length take for their window, at most.
const usualWindow = 8 << 20

// decompress returns what is in a frame, at most limit bytes or that of a usual window.
func decompress(frame []byte, limit int64) ([]byte, error) {
	decoder, err := zstd.NewReader(nil,
		zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxMemory(uint64(max(limit, usualWindow))),
	)
	if err != nil {
		return nil, err
	}
	defer decoder.Close()
	data, err := decoder.DecodeAll(frame, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errFormat, err)
	}
	return data, nil
}

// size returns the bytes of a tensor.
func size(t delta.Tensor) (int64, error) {
	n, err := t.Elements()
	return int64(n) * int64(t.DType.Size()), err
}
