package checkpoint_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/tutti-go/tutti/delta"
	"github.com/tutti-go/tutti/delta/checkpoint"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime/cpu"
)

// writeCheckpoint writes a safetensors file with one tensor.
func writeCheckpoint(path string, values []byte) {
	header := fmt.Sprintf(`{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%[1]d]}}`, len(values))
	file := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	file = append(file, header...)
	if err := os.WriteFile(path, append(file, values...), 0o600); err != nil {
		log.Fatal(err)
	}
}

// temporary returns a new folder.
func temporary() string {
	dir, err := os.MkdirTemp("", "checkpoint")
	if err != nil {
		log.Fatal(err)
	}
	return dir
}

// The second of two checkpoints is kept as its difference from the first.
func ExampleDiff() {
	ctx := context.Background()
	dir := temporary()
	defer os.RemoveAll(dir)
	base := filepath.Join(dir, "base.safetensors")
	target := filepath.Join(dir, "target.safetensors")
	patch := filepath.Join(dir, "patch")
	writeCheckpoint(base, []byte{1, 2, 3, 4})
	writeCheckpoint(target, []byte{1, 2, 3, 5})

	if _, err := checkpoint.Diff(ctx, base, target, patch, nil); err != nil {
		fmt.Println(err)
	}
	d, err := checkpoint.Read(patch)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(d.Stat().Changed, "of", d.Stat().Weights, "weights changed")

	made := filepath.Join(dir, "made.safetensors")
	progress := func(done, total int) {} // a bar, for a large one
	if _, err := checkpoint.Apply(ctx, base, patch, made, progress); err != nil {
		fmt.Println(err)
	}
	want, err := os.ReadFile(target)
	if err != nil {
		fmt.Println(err)
	}
	got, err := os.ReadFile(made)
	fmt.Println(bytes.Equal(got, want), err)
	// Output:
	// 1 of 4 weights changed
	// true <nil>
}

// A change goes to SGLang, and one from slime comes, in the format that they share.
func ExampleExport() {
	ctx := context.Background()
	dir := temporary()
	defer os.RemoveAll(dir)
	base := filepath.Join(dir, "base.safetensors")
	target := filepath.Join(dir, "target.safetensors")
	shared := filepath.Join(dir, "weight_v000001")
	made := filepath.Join(dir, "made.safetensors")
	writeCheckpoint(base, []byte{1, 2, 3, 4})
	writeCheckpoint(target, []byte{1, 2, 3, 5})

	if _, err := checkpoint.Export(ctx, base, target, shared, checkpoint.Format{Checksum: "adler32"}, nil); err != nil {
		fmt.Println(err)
	}
	s, err := checkpoint.Import(ctx, base, shared, made, nil)
	fmt.Println(s.Changed, err)
	// Output: 1 <nil>
}

// A trainer writes how its weights change into a folder, and a server pulls the latest version.
func ExamplePublish() {
	ctx := context.Background()
	dir := temporary()
	defer os.RemoveAll(dir)
	weights := func(values ...byte) []delta.Tensor {
		return []delta.Tensor{{Name: "w", DType: dtype.U8, Shape: []int{len(values)}, Memory: delta.Host(values)}}
	}
	folder := filepath.Join(dir, "weight_v000001")
	f := checkpoint.Format{Version: "000001", Base: "000000"}
	if err := checkpoint.Publish(ctx, folder, weights(1, 2, 3), weights(1, 2, 4), f); err != nil {
		fmt.Println(err)
	}

	rt := cpu.New()
	defer rt.Close()
	subscriber, err := delta.NewSubscriber(ctx, rt, nil, delta.Config{Tensors: weights(1, 2, 3), Version: 1})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer subscriber.Close()
	version, err := checkpoint.Pull(ctx, subscriber, dir)
	fmt.Println(version, err)
	// Output: 2 <nil>
}
