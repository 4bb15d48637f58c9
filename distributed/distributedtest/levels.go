package distributedtest

import (
	"context"
	"fmt"

	"github.com/tutti-go/tutti/comm/metered"
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
}

// testLevels runs some families of gradients through meshes of all shapes.
func testLevels(r *rank) {
	for perHost := 1; perHost <= r.size; perHost++ {
		if r.size%perHost != 0 {
			continue
		}
		r.part(fmt.Sprintf("%d ranks per host", perHost), func() {
			meter := metered.New(r.c)
			mesh := got(distributed.NewMesh(r.ctx, meter,
				distributed.Dim{Name: "host", Size: -1}, distributed.Dim{Name: "rank", Size: perHost}))
			r.after(mesh.Close)
			for _, pattern := range sparse.Patterns() {
				for i, k := range families[:3] {
					for _, n := range []int{1000, 3, 0} {
						if i == 0 || n == 1000 || r.extended {
							r.levelsSequence(k, mesh, perHost, meter, n, often(pattern, 0.05))
						}
					}
				}
			}
		})
	}
}

// levelsSequence is sequence for a mesh, whose traffic meter counts.
func (r *rank) levelsSequence(k family, mesh *distributed.Mesh, perHost int, meter *metered.Communicator, n int, cfg sparse.Config) {
	r.part(fmt.Sprintf("%s, %s, n=%d", cfg.Pattern, k.name, n), func() {
		u := &run{rank: r, cfg: cfg, meter: meter, t: r.tensor(dtype.F32, make([]float32, n)), weight: float32(perHost)}
		levels := got(sparse.NewHierarchical(r.rt, mesh, n, cfg))
		r.after(levels.Close)
		u.sparse = levels
		u.from, _ = levels.Share()
		for step := range 5 {
			u.step(r.gradient(k, n, r.rank, r.size, step))
		}
	})
}
