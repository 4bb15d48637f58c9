package checkpoint

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"hash/adler32"

	"github.com/zeebo/blake3"
	"github.com/zeebo/xxh3"

	"github.com/tutti-go/tutti/delta"
)

// Trainers of language models and the engines that serve them share a format of deltas, which differs from this
// module's: a folder of safetensors shards with an index, whose byte tensors hold zstd frames. slime, miles, SGLang,
// vime and modelexpress read and write it. docs/delta-format.md describes it.

// Format is the description of a delta in the index of the shared format.
type Format struct {
	// Version is the delta's version, and Base the version it applies to. They can be any texts; six digits are usual.
	Version, Base string
	// Encoding is "xor", or "overwrite", which can be applied twice. "" means "xor".
	Encoding string
	// Checksum is the hash of each tensor that changes: "xxh3-128", "blake3" or "adler32". "" means "xxh3-128".
	Checksum string
}

// countBytes is the size of numbers in the encoding overwrite: the number of changed bytes, and their positions.
const countBytes = 4

const (
	encodingXor       = "xor"
	encodingOverwrite = "overwrite"
	compressionZstd   = "zstd"
	checksumXXH3      = "xxh3-128"
	checksumBLAKE3    = "blake3"
	checksumAdler     = "adler32"
)

// errFormat means that data is not a delta in the shared format, or does not apply to these tensors.
var errFormat = errors.New("not a delta in the shared format")

// formatIndex is the index of a delta.
type formatIndex struct {
	Metadata  formatMetadata    `json:"metadata"`
	WeightMap map[string]string `json:"weight_map"`
}

// formatMetadata is the part of an index other than the shard of each tensor.
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

// withDefaults returns f with defaults for unset fields.
func (f Format) withDefaults() Format {
	if f.Encoding == "" {
		f.Encoding = encodingXor
	}
	if f.Checksum == "" {
		f.Checksum = checksumXXH3
	}
	return f
}

// index returns the index of a delta, given the shard of each tensor.
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

// hash returns the hash for the checksum of a tensor.
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

// size returns the bytes of a tensor.
func size(t delta.Tensor) (int64, error) {
	n, err := t.Elements()
	return int64(n) * int64(t.DType.Size()), err
}
