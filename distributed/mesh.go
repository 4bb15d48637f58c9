package distributed

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/distributed/internal/base"
)

// Dim is one dimension of a [Mesh].
type Dim struct {
	Name string // such as "data", "tensor", "pipeline" or "expert"
	Size int    // number of ranks along it
}

// Mesh arranges the ranks of a communicator in a grid with named dimensions
// and has, for each dimension, a communicator of the ranks that differ from
// this one only in that dimension.
//
// Ranks are laid out row by row: the last dimension varies fastest. In a mesh of data:2 and tensor:4, rank 5 has the
// coordinates data 1, tensor 1; its "tensor" communicator joins ranks 4 to 7 and its "data" communicator ranks 1 and 5.
// So put the dimension that communicates most last: its neighbours are usually on one host. Within a communicator the
// rank is the coordinate.
type Mesh struct {
	dims   []Dim               // of the mesh, the slowest one first
	coords []int               // of this rank, by dimension
	comms  []comm.Communicator // of this rank's lines, by dimension
}

// NewMesh splits c, collectively: all ranks pass the same dimensions, whose sizes multiply to the world size. One size
// may be -1, which stands for the remaining ranks. The mesh does not own c.
func NewMesh(ctx context.Context, c comm.Communicator, dims ...Dim) (*Mesh, error) {
	const op = "mesh"
	if err := base.CheckComm(c); err != nil {
		return nil, base.OpError(op, err)
	}
	dims, err := checkDims(slices.Clone(dims), c.WorldSize())
	if err != nil {
		return nil, base.OpError(op, err)
	}
	m := &Mesh{dims: dims, coords: make([]int, len(dims))}
	index := c.Rank()
	for d := len(dims) - 1; d >= 0; d-- {
		m.coords[d] = index % dims[d].Size
		index /= dims[d].Size
	}
	stride := c.WorldSize()
	for d, dim := range dims {
		stride /= dim.Size
		// The rank of the line's first member names the line.
		color := c.Rank() - m.coords[d]*stride
		sub, err := c.Split(ctx, color, m.coords[d])
		if err != nil {
			return nil, base.OpError(op, errors.Join(fmt.Errorf("dimension %q: %w", dim.Name, err), m.Close()))
		}
		m.comms = append(m.comms, sub)
	}
	return m, nil
}

// JoinMesh makes a mesh from one communicator for each dimension, slowest dimension first, for example NCCL within
// hosts and MPI between them. Each has one of the names, and joins the ranks that differ from this one only in that
// dimension, in the order of their coordinate. JoinMesh does not communicate. The mesh owns the communicators.
func JoinMesh(names []string, comms []comm.Communicator) (*Mesh, error) {
	const op = "mesh"
	if len(names) != len(comms) {
		return nil, base.OpError(op, fmt.Errorf("%w: %d names of %d communicators",
			comm.ErrArgument, len(names), len(comms)))
	}
	m := &Mesh{}
	world := 1
	for i, c := range comms {
		if err := base.CheckComm(c); err != nil {
			return nil, base.OpError(op, fmt.Errorf("dimension %q: %w", names[i], err))
		}
		world *= c.WorldSize()
		m.dims = append(m.dims, Dim{Name: names[i], Size: c.WorldSize()})
		m.coords = append(m.coords, c.Rank())
		m.comms = append(m.comms, c)
	}
	if _, err := checkDims(m.dims, world); err != nil {
		return nil, base.OpError(op, err)
	}
	return m, nil
}

// checkDims checks names and sizes and fills in a size of -1.
func checkDims(dims []Dim, world int) ([]Dim, error) {
	if len(dims) == 0 {
		return nil, fmt.Errorf("%w: a mesh needs a dimension", comm.ErrArgument)
	}
	product := 1
	open := -1
	for i, d := range dims {
		if d.Name == "" {
			return nil, fmt.Errorf("%w: dimension %d has no name", comm.ErrArgument, i)
		}
		if j := slices.IndexFunc(dims, func(o Dim) bool { return o.Name == d.Name }); j < i {
			return nil, fmt.Errorf("%w: two dimensions have the name %q", comm.ErrArgument, d.Name)
		}
		switch {
		case d.Size == -1 && open < 0:
			open = i
		case d.Size < 1:
			return nil, fmt.Errorf("%w: dimension %q has size %d", comm.ErrArgument, d.Name, d.Size)
		case d.Size > world/product:
			return nil, fmt.Errorf("%w: dimensions %v need more ranks than the world size, %d", comm.ErrArgument, dims, world)
		default:
			product *= d.Size
		}
	}
	if open >= 0 && world%product == 0 {
		dims[open].Size = world / product
		product = world
	}
	if product != world {
		return nil, fmt.Errorf("%w: dimensions %v need world size %d, the communicator has %d",
			comm.ErrArgument, dims, product, world)
	}
	return dims, nil
}

// Dims returns the dimensions, slowest first.
func (m *Mesh) Dims() []Dim {
	return slices.Clone(m.dims)
}

// Comm returns the communicator along a dimension. It belongs to the mesh.
func (m *Mesh) Comm(name string) (comm.Communicator, error) {
	d, err := m.dim(name)
	if err != nil {
		return nil, err
	}
	return m.comms[d], nil
}

// Coord returns this rank's place along a dimension.
func (m *Mesh) Coord(name string) (int, error) {
	d, err := m.dim(name)
	if err != nil {
		return 0, err
	}
	return m.coords[d], nil
}

// Rank returns which rank of the communicator that was split has the given
// coordinates, one per dimension.
func (m *Mesh) Rank(coords ...int) (int, error) {
	if len(coords) != len(m.dims) {
		return 0, base.OpError("mesh", fmt.Errorf("%w: %d coordinates for %d dimensions",
			comm.ErrArgument, len(coords), len(m.dims)))
	}
	rank := 0
	for d, x := range coords {
		if x < 0 || x >= m.dims[d].Size {
			return 0, base.OpError("mesh", fmt.Errorf("%w: coordinate %d of %q is not in [0, %d)",
				comm.ErrArgument, x, m.dims[d].Name, m.dims[d].Size))
		}
		rank = rank*m.dims[d].Size + x
	}
	return rank, nil
}

// Close closes the mesh's communicators. Closing twice is fine.
func (m *Mesh) Close() error {
	var errs []error
	for _, c := range m.comms {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

func (m *Mesh) dim(name string) (int, error) {
	d := slices.IndexFunc(m.dims, func(d Dim) bool { return d.Name == name })
	if d < 0 {
		return 0, base.OpError("mesh", fmt.Errorf("%w: no dimension %q in %v", comm.ErrArgument, name, m.dims))
	}
	return d, nil
}
