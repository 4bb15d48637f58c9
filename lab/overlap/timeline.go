package overlap

import (
	"cmp"
	"image/color"
	"slices"
)

// Kind is the kind of a span in a timeline.
type Kind string

// The kinds of spans.
const (
	Forward   Kind = "forward"
	Backward  Kind = "backward"
	AllReduce Kind = "allreduce"
	Select    Kind = "select" // of a sparse bucket, like the next two
	Exchange  Kind = "exchange"
	Merge     Kind = "merge"
)

// Kinds returns all kinds.
func Kinds() []Kind {
	return []Kind{Forward, Backward, AllReduce, Select, Exchange, Merge}
}

// shown says how timelines show a kind of work: its stream, and a color of Paul Tol's "muted" scheme, which readers
// with any form of color vision can tell apart (https://sronpersonalpages.nl/~pault/).
var shown = map[Kind]struct {
	lane  Lane
	color color.RGBA
}{
	Forward: {ComputeLane, color.RGBA{
		R: 0x88,
		G: 0xcc,
		B: 0xee,
		A: 255,
	}},
	Backward: {ComputeLane, color.RGBA{
		R: 0x33,
		G: 0x22,
		B: 0x88,
		A: 255,
	}},
	AllReduce: {CommunicationLane, color.RGBA{
		R: 0xcc,
		G: 0x66,
		B: 0x77,
		A: 255,
	}},
	Select: {SparseLane, color.RGBA{
		R: 0x11,
		G: 0x77,
		B: 0x33,
		A: 255,
	}},
	Exchange: {CommunicationLane, color.RGBA{
		R: 0xcc,
		G: 0x66,
		B: 0x77,
		A: 255,
	}},
	Merge: {SparseLane, color.RGBA{
		R: 0xdd,
		G: 0xcc,
		B: 0x77,
		A: 255,
	}},
}

// Lane is the stream that runs a kind of work. The default is the compute stream.
func (k Kind) Lane() Lane { return cmp.Or(shown[k].lane, ComputeLane) }

// Color is the color in pictures.
func (k Kind) Color() color.RGBA { return shown[k].color }

// Lane is one of the streams of a rank.
type Lane string

// The lanes.
const (
	ComputeLane       Lane = "compute"
	SparseLane        Lane = "sparse buckets"
	CommunicationLane Lane = "communication"
)

// Lanes returns all lanes in the order in which pictures show them.
func Lanes() []Lane { return []Lane{ComputeLane, SparseLane, CommunicationLane} }

// Span is one piece of work on a stream.
type Span struct {
	Kind  Kind    `json:"kind"`
	Name  string  `json:"name"`     // such as "forward 3" or "bucket 0"
	Start float64 `json:"start_us"` // microseconds since the timeline began
	End   float64 `json:"end_us"`
}

// Timeline is the work on one rank's streams in a step.
type Timeline struct {
	Name  string  `json:"name"`
	Total float64 `json:"total_us"` // duration of the step
	Spans []Span  `json:"spans"`
}

// medianTimeline returns the timeline of middle length.
func medianTimeline(all []Timeline) Timeline {
	sorted := slices.SortedFunc(slices.Values(all), func(a, b Timeline) int {
		return cmp.Compare(a.Total, b.Total)
	})
	return sorted[(len(sorted)-1)/2]
}
