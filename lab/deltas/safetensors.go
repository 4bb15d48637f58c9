package deltas

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os/exec"
	"slices"
)

// metadataName is the header's entry that is no tensor.
const metadataName = "__metadata__"

// entry describes a tensor in the header.
type entry struct {
	DType   string `json:"dtype"`
	Shape   []int  `json:"shape"`
	Offsets [2]int `json:"data_offsets"`
}

// checkpoint is a safetensors file.
type checkpoint struct {
	names    []string          // in the order of data
	entries  map[string]entry  // by name of the tensor
	metadata map[string]string // texts in the header; nil for none
	data     []byte            // data of all tensors, after the header
}

// parse parses a file.
func parse(file []byte) (*checkpoint, error) {
	if len(file) < 8 || binary.LittleEndian.Uint64(file) > uint64(len(file)-8) {
		return nil, errors.New("not a safetensors file")
	}
	length := int(binary.LittleEndian.Uint64(file))
	var header map[string]json.RawMessage
	if err := json.Unmarshal(file[8:8+length], &header); err != nil {
		return nil, err
	}
	c := &checkpoint{
		entries:  map[string]entry{},
		metadata: map[string]string{},
		data:     file[8+length:],
	}
	for name, text := range header {
		if name == metadataName {
			if err := json.Unmarshal(text, &c.metadata); err != nil {
				return nil, err
			}
			continue
		}
		var e entry
		if err := json.Unmarshal(text, &e); err != nil {
			return nil, err
		}
		if e.Offsets[0] < 0 || e.Offsets[1] < e.Offsets[0] || e.Offsets[1] > len(c.data) {
			return nil, errors.New("a tensor outside of the file")
		}
		c.names = append(c.names, name)
		c.entries[name] = e
	}
	slices.SortFunc(c.names, func(a, b string) int {
		return cmp.Compare(c.entries[a].Offsets[0], c.entries[b].Offsets[0])
	})
	return c, nil
}

// reversed returns the file with its tensors in reverse order.
func (c *checkpoint) reversed() ([]byte, error) {
	changed := *c
	changed.names = slices.Clone(c.names)
	slices.Reverse(changed.names)
	return changed.file()
}

// annotated returns the file with one more text in its metadata.
func (c *checkpoint) annotated() ([]byte, error) {
	changed := *c
	changed.metadata = map[string]string{"step": "1010"}
	for key, text := range c.metadata {
		changed.metadata[key] = text
	}
	return changed.file()
}

// file returns the bytes of a file with the tensors in the order of names.
func (c *checkpoint) file() ([]byte, error) {
	header := map[string]any{metadataName: c.metadata}
	var data []byte
	for _, name := range c.names {
		e := c.entries[name]
		part := c.data[e.Offsets[0]:e.Offsets[1]]
		e.Offsets = [2]int{len(data), len(data) + len(part)}
		header[name] = e
		data = append(data, part...)
	}
	text, err := json.Marshal(header)
	if err != nil {
		return nil, err
	}
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(file, text...), data...), nil
}

// count sets the number of weights, and of changed weights.
func (r *Result) count(ctx context.Context, tutti, path string) error {
	text, err := exec.CommandContext(ctx, tutti, "delta", "stat", path, "--json").Output()
	if err != nil {
		return err
	}
	var stat struct{ Weights, Changed uint64 }
	err = json.Unmarshal(text, &stat)
	r.Weights = stat.Weights
	r.Changed = stat.Changed
	return err
}
