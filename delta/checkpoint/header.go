package checkpoint

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"

	"github.com/tutti-go/tutti/delta"
	"github.com/tutti-go/tutti/dtype"
)

// maxHeader bounds the length of a header, as the format's own reader does.
const maxHeader = 100_000_000

// headerLength is the size of the number with the header's length.
const headerLength = 8

// types are the element types by their names in the format. Elements of other types are treated as bytes.
var types = map[string]dtype.DType{
	"F64":     dtype.F64,
	"F32":     dtype.F32,
	"F16":     dtype.F16,
	"BF16":    dtype.BF16,
	"F8_E4M3": dtype.FP8E4M3,
	"F8_E5M2": dtype.FP8E5M2,
	"I64":     dtype.I64,
	"I32":     dtype.I32,
	"I16":     dtype.I16,
	"I8":      dtype.I8,
	"U64":     dtype.U64,
	"U32":     dtype.U32,
	"U16":     dtype.U16,
	"U8":      dtype.U8,
	"BOOL":    dtype.Bool,
}

// section is a part of a file.
type section struct {
	*os.File
	offset, bytes int64 // of its first byte, and their number
}

func (s section) ReadAt(p []byte, offset int64) (int, error) {
	return s.File.ReadAt(p, s.offset+offset)
}
func (s section) WriteAt(p []byte, offset int64) (int, error) {
	return s.File.WriteAt(p, s.offset+offset)
}

// tensors returns the tensors that a header describes, in the file after it, which has the given size.
func tensors(header []byte, f *os.File, size int64) ([]delta.Tensor, error) {
	var entries map[string]json.RawMessage
	if err := json.Unmarshal(header[headerLength:], &entries); err != nil {
		return nil, fmt.Errorf("the header: %w", err)
	}
	var all []delta.Tensor
	for name, raw := range entries {
		if name == "__metadata__" {
			continue
		}
		var e struct {
			DType       string   `json:"dtype"`
			Shape       []int    `json:"shape"`
			DataOffsets [2]int64 `json:"data_offsets"`
		}
		if err := json.Unmarshal(raw, &e); err != nil {
			return nil, fmt.Errorf("the header, tensor %q: %w", name, err)
		}
		bytes := e.DataOffsets[1] - e.DataOffsets[0]
		t := delta.Tensor{
			Name:  name,
			DType: types[e.DType],
			Shape: e.Shape,
		}
		t.Memory = section{f, int64(len(header)) + e.DataOffsets[0], bytes}
		if t.DType == dtype.Invalid {
			t.DType = dtype.U8
			t.Shape = []int{int(bytes)}
		}
		if n, err := t.Elements(); err != nil || int64(n)*int64(t.DType.Size()) != bytes {
			return nil, fmt.Errorf("tensor %q of %q and shape %v has %d bytes", name, e.DType, e.Shape, bytes)
		}
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b delta.Tensor) int {
		x := a.Memory.(section)
		y := b.Memory.(section)
		return cmp.Or(
			cmp.Compare(x.offset, y.offset),
			cmp.Compare(x.bytes, y.bytes),
		)
	})
	end := int64(len(header))
	for _, t := range all {
		s := t.Memory.(section)
		if s.offset != end {
			return nil, fmt.Errorf("tensor %q begins at byte %d, the one before it ends at %d", t.Name, s.offset, end)
		}
		end += s.bytes
	}
	if size >= 0 && end != size {
		return nil, fmt.Errorf("the tensors end at byte %d, the file at %d", end, size)
	}
	return all, nil
}

// file is a file of weights.
type file struct {
	*os.File
	name    string         // in its folder
	header  []byte         // with its length
	tensors []delta.Tensor // as the header has them
}

// errJSON is the error of a file with JSON instead of a header.
var errJSON = errors.New("not a safetensors file but JSON")

// readHeader reads the header of a file, and the tensors that it describes.
func readHeader(f *os.File) (header []byte, all []delta.Tensor, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if info.Size() < headerLength {
		return nil, nil, fmt.Errorf("no header of safetensors: the file has %d bytes", info.Size())
	}
	header = make([]byte, headerLength)
	if _, err := f.ReadAt(header, 0); err != nil {
		return nil, nil, err
	}
	n := binary.LittleEndian.Uint64(header)
	if n > maxHeader || int64(n) > info.Size()-headerLength {
		if header[0] == '{' {
			return nil, nil, errJSON
		}
		return nil, nil, fmt.Errorf("not a safetensors file: its first 8 bytes mean a header of %d bytes, the file has %d",
			n, info.Size())
	}
	header = make([]byte, headerLength+n)
	if _, err := f.ReadAt(header, 0); err != nil {
		return nil, nil, err
	}
	all, err = tensors(header, f, info.Size())
	return header, all, err
}

// withLength returns a header with its length before it.
func withLength(text []byte) []byte {
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)
}

// Offsets in a header are the positions of tensors, and so change for all tensors after one that is added, removed or
// moved. In the text of a delta, the offset of a tensor that begins at the end of the previous one is relative: it is
// this mark, which no header has, and the tensor's length.
const relativeMark = '\x01'

var (
	offsets   = regexp.MustCompile(`"data_offsets":\s*\[(\d{1,18}),\s*(\d{1,18})\]`)
	relatives = regexp.MustCompile(`"data_offsets":\s*\[(?:(\d{1,18}),\s*(\d{1,18})|\x01(\d{1,18})(,\s*))\]`)
)

// relative returns a header with relative offsets, or unchanged if absolute would not restore it.
func relative(header []byte) []byte {
	var text []byte
	end := int64(0)
	copied := 0
	for _, m := range offsets.FindAllSubmatchIndex(header, -1) {
		from := parseOffset(header[m[2]:m[3]])
		to := parseOffset(header[m[4]:m[5]])
		if from == end && to >= from {
			text = append(append(text, header[copied:m[2]]...), relativeMark)
			text = strconv.AppendInt(text, to-from, 10)
			text = append(text, header[m[3]:m[4]]...)
			copied = m[5]
		}
		end = to
	}
	text = append(text, header[copied:]...)
	if !bytes.Equal(absolute(text), header) {
		return header
	}
	return text
}

// absolute restores the header from which relative made text.
func absolute(text []byte) []byte {
	var header []byte
	end := int64(0)
	copied := 0
	for _, m := range relatives.FindAllSubmatchIndex(text, -1) {
		if m[2] >= 0 {
			end = parseOffset(text[m[4]:m[5]])
			continue
		}
		header = append(header, text[copied:m[6]-1]...)
		header = strconv.AppendInt(header, end, 10)
		header = append(header, text[m[8]:m[9]]...)
		end += parseOffset(text[m[6]:m[7]])
		header = strconv.AppendInt(header, end, 10)
		copied = m[9]
	}
	return append(header, text[copied:]...)
}

// parseOffset returns the number of at most 18 digits.
func parseOffset(digits []byte) (n int64) {
	for _, digit := range digits {
		n = 10*n + int64(digit-'0')
	}
	return n
}
