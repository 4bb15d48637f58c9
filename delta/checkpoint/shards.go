package checkpoint

import (
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/delta"
)

// File names of a checkpoint in a folder.
const (
	indexName  = "model.safetensors.index.json"
	singleName = "model.safetensors"
)

// maxShards is the maximum number of shards. All of them are open at once.
const maxShards = 4096

// checkpoint is a file of weights, or several with an index.
type checkpoint struct {
	files []*file // the shards
	// index is the content of the file that maps tensors to shards, and indexName its name. nil: there is one file,
	// and no index.
	index     []byte
	indexName string
	path      string         // as given by the caller
	tensors   []delta.Tensor // of all files
}

// open opens a checkpoint, which is read more than once and in any order.
func open(path string) (*checkpoint, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return openFolder(path)
	}
	single, err := openFile(path)
	if errors.Is(err, errJSON) {
		return openIndex(path)
	}
	if err != nil {
		return nil, err
	}
	return &checkpoint{
		files:   []*file{single},
		path:    path,
		tensors: single.tensors,
	}, nil
}

// openFolder opens the checkpoint in a folder.
func openFolder(path string) (*checkpoint, error) {
	for _, name := range []string{indexName, singleName} {
		file := filepath.Join(path, name)
		if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
			return open(file)
		}
	}
	return nil, fmt.Errorf("%s has neither %s nor %s", path, indexName, singleName)
}

// openFile opens one file of weights.
func openFile(path string) (*file, error) {
	f, err := openRegular(path)
	if err != nil {
		return nil, err
	}
	header, all, err := readHeader(f)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
	}
	return &file{
		File:    f,
		name:    filepath.Base(path),
		header:  header,
		tensors: all,
	}, nil
}

// openRegular opens a file to be read more than once.
func openRegular(path string) (*os.File, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() { // checked before opening: a pipe would wait for a writer
		return nil, fmt.Errorf("%s is not a regular file, which a checkpoint has to be: it is read twice", path)
	}
	return os.Open(path)
}

// openIndex opens the shards in an index, which are in the same folder.
func openIndex(path string) (*checkpoint, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Size() > maxHeader {
		return nil, fmt.Errorf("%s: an index of %d bytes, at most %d are read", path, info.Size(), maxHeader)
	}
	index, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	shards, err := parseIndex(index)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	c := &checkpoint{
		index:     index,
		indexName: filepath.Base(path),
		path:      path,
	}
	for _, name := range slices.Sorted(maps.Keys(shards)) {
		shard, err := openFile(filepath.Join(filepath.Dir(path), name))
		if err == nil {
			c.files = append(c.files, shard)
			err = shard.checkTensors(shards[name])
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("%s: %w", path, err), c.Close())
		}
	}
	c.tensors = merge(c.files)
	return c, nil
}

// parseIndex returns the tensors of each shard in an index.
func parseIndex(index []byte) (shards map[string][]string, err error) {
	var content struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(index, &content); err != nil {
		return nil, fmt.Errorf("neither a safetensors file nor an index of shards: %w", err)
	}
	if len(content.WeightMap) == 0 {
		return nil, errors.New("not a safetensors file but JSON, whose weight_map names no shards")
	}
	shards = map[string][]string{}
	for tensor, shard := range content.WeightMap {
		if err := checkName(shard); err != nil {
			return nil, err
		}
		shards[shard] = append(shards[shard], tensor)
	}
	if len(shards) > maxShards {
		return nil, fmt.Errorf("an index of %d shards, at most %d are opened", len(shards), maxShards)
	}
	return shards, nil
}

// checkName returns an error unless a file is directly in its folder.
func checkName(name string) error {
	if !filepath.IsLocal(name) || name == "." || filepath.Base(name) != name || strings.ContainsAny(name, `/\:`) {
		return fmt.Errorf("%q is no name of a shard: shards lie beside their index", name)
	}
	return nil
}

// checkTensors returns an error if a shard lacks a tensor that the index has there.
func (f *file) checkTensors(names []string) error {
	has := map[string]bool{}
	for _, t := range f.tensors {
		has[t.Name] = true
	}
	for _, name := range names {
		if !has[name] {
			return fmt.Errorf("the index has tensor %q in shard %s, which does not have it", name, f.name)
		}
	}
	return nil
}

// merge returns the tensors of all files. If an earlier file has a tensor with the same name, the file's name is
// added.
func merge(files []*file) (all []delta.Tensor) {
	seen := map[string]bool{}
	for _, f := range files {
		for _, t := range f.tensors {
			if seen[t.Name] {
				t.Name += "\x00" + f.name
			}
			seen[t.Name] = true
			all = append(all, t)
		}
	}
	return all
}

// Close closes all files.
func (c *checkpoint) Close() (err error) {
	for _, f := range c.files {
		err = cmp.Or(err, f.Close())
	}
	return err
}

// paths returns the paths of all files.
func (c *checkpoint) paths() (paths []string) {
	for _, f := range c.files {
		paths = append(paths, f.Name())
	}
	if c.index != nil {
		paths = append(paths, c.path)
	}
	return paths
}

// sharded begins the text of a checkpoint with an index. No header begins with it.
const sharded = 0

// text returns the information that restores the files, together with the tensors. For a single file it is the header.
// Otherwise it is sharded, the number of shards, the name and header of each, and the name and content of the index.
// Headers have relative offsets.
func (c *checkpoint) text() []byte {
	if c.index == nil {
		return relative(c.files[0].header[headerLength:])
	}
	b := binary.AppendUvarint([]byte{sharded}, uint64(len(c.files)))
	for _, f := range c.files {
		b = appendBytes(b, []byte(f.name))
		b = appendBytes(b, relative(f.header[headerLength:]))
	}
	b = appendBytes(b, []byte(c.indexName))
	return append(b, c.index...)
}

func appendBytes(b, part []byte) []byte {
	return append(binary.AppendUvarint(b, uint64(len(part))), part...)
}

// parseText returns the checkpoint that a text describes, without creating its files.
func parseText(text []byte) (*checkpoint, error) {
	if len(text) == 0 || text[0] != sharded {
		return &checkpoint{files: []*file{{header: withLength(absolute(text))}}}, nil
	}
	src := text[1:]
	bad := false
	number := func() uint64 {
		n, length := binary.Uvarint(src)
		if length <= 0 {
			bad = true
			return 0
		}
		src = src[length:]
		return n
	}
	part := func() []byte {
		n := number()
		if bad || n > uint64(len(src)) {
			bad = true
			return nil
		}
		b := src[:n]
		src = src[n:]
		return b
	}
	c := &checkpoint{}
	names := map[string]bool{}
	for n := number(); n > 0 && !bad; n-- {
		name := string(part())
		names[name] = true
		bad = bad || checkName(name) != nil || len(c.files) == maxShards
		c.files = append(c.files, &file{
			name:   name,
			header: withLength(absolute(part())),
		})
	}
	c.indexName = string(part())
	names[c.indexName] = true
	if bad || checkName(c.indexName) != nil || len(names) != len(c.files)+1 {
		return nil, fmt.Errorf("%w: its text is of no checkpoint", delta.ErrDelta)
	}
	c.index = src
	return c, nil
}
