package cuda

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tutti-go/tutti/runtime/internal/strided"
)

func TestAsTransposes(t *testing.T) {
	type axis [3]int // size, stride in the destination and in the source
	convert := func(all []axis) (axes []strided.Axis) {
		for _, x := range all {
			axes = append(axes, strided.Axis{Size: x[0], Dst: x[1], Src: x[2]})
		}
		return axes
	}
	for name, c := range map[string]struct {
		axes, want []axis
		tiles      int // 0: it is none
	}{
		"matrix":             {[]axis{{65, 130, 1}, {130, 1, 65}}, []axis{{65, 130, 1}, {130, 1, 65}}, 3 * 5},
		"batch":              {[]axis{{7, 9600, 9600}, {60, 160, 1}, {160, 1, 60}}, []axis{{7, 9600, 9600}, {60, 160, 1}, {160, 1, 60}}, 7 * 2 * 5},
		"outermost to inner": {[]axis{{16, 1320, 1}, {33, 40, 640}, {40, 1, 16}}, []axis{{33, 40, 640}, {16, 1320, 1}, {40, 1, 16}}, 33 * 1 * 2},
		"reversed":           {[]axis{{64, 64, -1}, {64, -1, 64}}, []axis{{64, 64, -1}, {64, -1, 64}}, 4},
		"one axis":           {[]axis{{64, 1, 2}}, nil, 0},
		"rows":               {[]axis{{64, 70, 80}, {64, 1, 1}}, nil, 0},
		"broadcast":          {[]axis{{64, 64, 1}, {64, 1, 0}}, nil, 0},
		"few columns":        {[]axis{{1000, 3, 1}, {3, 1, 1000}}, nil, 0},
		"few rows":           {[]axis{{3, 1000, 1}, {1000, 1, 3}}, nil, 0},
		"gaps in the source": {[]axis{{64, 64, 2}, {64, 1, 128}}, nil, 0},
		"gaps in the other":  {[]axis{{64, 128, 1}, {64, 2, 64}}, nil, 0},
	} {
		axes := convert(c.axes)
		tiles, ok := asTransposes(axes)
		assert.Equal(t, c.tiles > 0, ok, name)
		if ok {
			assert.Equal(t, c.tiles, tiles, name)
			assert.Equal(t, convert(c.want), axes, name)
		} else {
			assert.Equal(t, convert(c.axes), axes, "%s: left as it was", name)
		}
	}
}
