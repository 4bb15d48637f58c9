package diagnose

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
)

// pickle encodes what encoding/json makes of v as Python's pickle does (protocol 2,
// PEP 307): dicts with text as keys, lists, text, numbers, booleans and None.
func pickle(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var tree any
	if err := decoder.Decode(&tree); err != nil {
		return nil, err
	}
	out, err := appendPickle([]byte{0x80, 2}, tree)
	return append(out, '.'), err
}

// appendPickle appends the operations that push a value of a JSON tree.
func appendPickle(out []byte, v any) ([]byte, error) {
	var err error
	switch v := v.(type) {
	case nil:
		return append(out, 'N'), nil
	case bool:
		if v {
			return append(out, 0x88), nil
		}
		return append(out, 0x89), nil
	case string:
		return append(binary.LittleEndian.AppendUint32(append(out, 'X'), uint32(len(v))), v...), nil
	case json.Number:
		if n, err := v.Int64(); err == nil { // LONG1: how many bytes, then these
			return binary.LittleEndian.AppendUint64(append(out, 0x8a, 8), uint64(n)), nil
		}
		f, err := v.Float64()
		return binary.BigEndian.AppendUint64(append(out, 'G'), math.Float64bits(f)), err
	case []any:
		out = append(out, ']', '(')
		for _, item := range v {
			if out, err = appendPickle(out, item); err != nil {
				return nil, err
			}
		}
		return append(out, 'e'), nil
	case map[string]any:
		out = append(out, '}', '(')
		for key, item := range v {
			if out, err = appendPickle(out, key); err == nil {
				out, err = appendPickle(out, item)
			}
			if err != nil {
				return nil, err
			}
		}
		return append(out, 'u'), nil
	}
	return nil, fmt.Errorf("%T is not in JSON", v)
}
