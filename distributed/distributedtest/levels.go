package distributedtest

import (
	"context"
	"errors"
	"fmt"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed"
	"github.com/tutti-go/tutti/distributed/sparse"
	"github.com/tutti-go/tutti/dtype"
	"github.com/tutti-go/tutti/runtime"
)

// reducer is what [sparse.Reducer] and [sparse.Hierarchical] have in common.
type reducer interface {
	AllReduce(ctx context.Context, t *runtime.Tensor) error
	Stats(ctx context.Context) (sparse.Stats, error)
	Residual() (*runtime.Tensor, error)
	Close() error
}

// testLevels runs some families of gradients through meshes of all shapes.
func testLevels(r *rank) error {
	for perHost := 1; perHost <= r.size; perHost++ {
		if r.size%perHost != 0 {
			continue
		}
		meter := comm.NewMeter(r.c)
		mesh, err := distributed.NewMesh(r.ctx, meter,
			distributed.Dim{Name: "host", Size: -1}, distributed.Dim{Name: "rank", Size: perHost})
		if err != nil {
			return err
		}
		for _, pattern := range sparse.Patterns() {
			for i, k := range families[:3] {
				for _, n := range []int{1000, 3, 0} {
					if i > 0 && n < 1000 && !r.extended {
						continue
					}
					if err := r.levelsSequence(k, mesh, perHost, meter, n, often(pattern, 0.05)); err != nil {
						return errors.Join(err, mesh.Close())
					}
				}
			}
		}
		if err := mesh.Close(); err != nil {
			return err
		}
	}
	return nil
}

// levelsSequence is sequence for a mesh, whose traffic meter counts.
func (r *rank) levelsSequence(k family, mesh *distributed.Mesh, perHost int, meter *comm.Meter, n int, cfg sparse.Config) error {
	label := fmt.Sprintf("%s, %s, %d ranks per host, n=%d", cfg.Pattern, k.name, perHost, n)
	t, err := r.tensor(dtype.F32, make([]float32, n))
	if err != nil {
		return err
	}
	levels, err := sparse.NewHierarchical(r.rt, mesh, n, cfg)
	if err != nil {
		return fmt.Errorf("%s: %w", label, err)
	}
	u := &run{rank: r, label: label, cfg: cfg, sparse: levels, meter: meter, t: t, weight: float32(perHost)}
	u.from, _ = levels.Share()
	for step := range 5 {
		if err := u.step(r.gradient(k, n, r.rank, r.size, step)); err != nil {
			return u.close(err)
		}
	}
	return errors.Join(u.close(nil), r.free())
}
