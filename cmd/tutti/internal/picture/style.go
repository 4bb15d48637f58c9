package picture

import (
	"bytes"
	"fmt"
	"html"
	"image/color"
	"io"
	"math"
	"path/filepath"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/tutti-go/tutti/atomicfile"
)

// Formats returns the file name extensions of the supported picture formats.
func Formats() []string {
	return []string{".png", ".svg"}
}

// Style of all pictures.
const (
	width  = 8 * vg.Inch
	height = 5 * vg.Inch

	fontVariant font.Variant = "Sans"

	pngResolution = 150 // dots per inch

	roundTicks = 9 // approximate number of labels

	// An SVG names the font of its layout. Fonts of the same widths follow for readers without it.
	svgFont  = "font-family:Liberation Sans;"
	svgFonts = "font-family:Liberation Sans,Arimo,Arial,Helvetica,sans-serif;"

	// The end of an SVG's first tag.
	svgHead = `xmlns:xlink="http://www.w3.org/1999/xlink">` + "\n"

	// Of a picture that is shown 600 pixels wide.
	smallWidth  = 6.25 * vg.Inch
	smallHeight = 3.75 * vg.Inch
)

// NewPlot makes an empty picture with a title, in the common fonts.
func NewPlot(title string) *plot.Plot {
	p := plot.New()
	p.Title.Text = title
	p.Title.Padding = vg.Points(8)
	p.Title.TextStyle.Font.Variant = fontVariant
	p.Legend.TextStyle.Font.Variant = fontVariant
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Label.Padding = vg.Points(6)
		axis.Label.TextStyle.Font.Variant = fontVariant
		axis.Tick.Label.Font.Variant = fontVariant
	}
	return p
}

// The lower corners of a picture.
const (
	Left  = 1.0
	Right = -1.0
)

// NewChart makes a plot for curves, with grey lines at the labeled ticks and the legend in a lower corner.
func NewChart(title, x, y string, corner vg.Length) *plot.Plot {
	p := NewPlot(title)
	p.X.Label.Text = x
	p.Y.Label.Text = y
	grid := plotter.NewGrid()
	grid.Horizontal.Color = color.Gray{Y: 215}
	grid.Vertical.Color = color.Gray{Y: 215}
	p.Add(grid)
	p.Legend.Left = corner == Left
	p.Legend.XOffs = corner * vg.Points(8)
	p.Legend.YOffs = vg.Points(6)
	p.Legend.Padding = vg.Points(2)
	return p
}

// sample is a curve's line in the legend, with a gap on both sides.
type sample struct {
	*plotter.Line
	gap vg.Length // on each side
}

// Thumbnail implements [plot.Thumbnailer].
func (s sample) Thumbnail(c *draw.Canvas) {
	inner := draw.Crop(*c, s.gap, -s.gap, 0, 0)
	s.Line.Thumbnail(&inner)
}

// legendGap returns the gap between the legend's texts and lines. A text to the left of its line would run into it if
// a reader's font is wider than the font of the layout, by up to a sixth.
func legendGap(p *plot.Plot, curves []Curve) vg.Length {
	gap := vg.Length(6)
	if p.Legend.Left {
		return gap
	}
	for _, c := range curves {
		gap = max(gap, p.Legend.TextStyle.Width(c.Name)/6)
	}
	return gap
}

// Curve is a line of a picture.
type Curve struct {
	Name   string           // in the legend; "" for no entry
	Points plotter.XYs      // drawn if there are at least two
	Style  draw.LineStyle   // of the line
	Steps  plotter.StepKind // the zero value joins points by straight lines
}

// AddCurves draws the curves with at least two points. At least one curve must have them.
func AddCurves(p *plot.Plot, curves []Curve) error {
	gap := legendGap(p, curves)
	p.Legend.ThumbnailWidth = vg.Points(24) + 2*gap
	drawn := false
	for _, c := range curves {
		if len(c.Points) < 2 {
			continue
		}
		line, err := plotter.NewLine(c.Points)
		if err != nil {
			return fmt.Errorf("curve of %s: %w", c.Name, err)
		}
		line.LineStyle = c.Style
		line.StepStyle = c.Steps
		p.Add(line)
		if c.Name != "" {
			p.Legend.Add(c.Name, sample{line, gap})
		}
		drawn = true
	}
	if !drawn {
		return ErrNothingToDraw
	}
	return nil
}

// RoundTicks puts about nine labels at multiples of 1, 2 or 5 times a power of ten, and small ticks at fifths of the
// distance.
func RoundTicks(low, high float64) []plot.Tick {
	step := math.Pow(10, math.Floor(math.Log10((high-low)/roundTicks)))
	for _, factor := range []float64{2, 2.5, 2} { // 1, 2, 5, 10
		if (high-low)/step <= roundTicks {
			break
		}
		step *= factor
	}
	const parts = 5
	var ticks []plot.Tick
	for i := math.Ceil(low / step * parts); i*step/parts <= high; i++ {
		tick := plot.Tick{Value: i * step / parts}
		if math.Mod(i, parts) == 0 {
			tick.Label = FormatNumber(tick.Value)
		}
		ticks = append(ticks, tick)
	}
	return ticks
}

// Goal is a dotted horizontal line that curves are meant to reach.
func Goal(height float64) *plotter.Function {
	line := plotter.NewFunction(func(float64) float64 { return height })
	line.Color = color.Gray{Y: 110}
	line.Dashes = []vg.Length{vg.Points(2), vg.Points(3)}
	return line
}

// Save writes a picture in the format of path's extension, one of Formats.
func Save(p *plot.Plot, path string) error { return save(p, path, width, height) }

// SaveSmall is Save for a picture that readers see 600 pixels wide.
func SaveSmall(p *plot.Plot, path string) error {
	return save(p, path, smallWidth, smallHeight)
}

func save(p *plot.Plot, path string, width, height vg.Length) error {
	var canvas vg.CanvasWriterTo = vgsvg.New(width, height)
	if filepath.Ext(path) == ".png" {
		canvas = vgimg.PngCanvas{Canvas: vgimg.NewWith(vgimg.UseWH(width, height), vgimg.UseDPI(pngResolution))}
	}
	image, err := render(p, canvas)
	if err != nil {
		return err
	}
	err = atomicfile.Write(path, func(w io.Writer) error {
		_, err := w.Write(image)
		return err
	})
	if err != nil {
		err = fmt.Errorf("writing the picture: %w", err)
	}
	return err
}

// SVG returns SaveSmall's picture, with a summary for readers who cannot see it.
func SVG(p *plot.Plot, summary string) ([]byte, error) {
	image, err := render(p, vgsvg.New(smallWidth, smallHeight))
	if err != nil {
		return nil, err
	}
	title := svgHead + "<title>" + html.EscapeString(summary) + "</title>"
	return bytes.Replace(image, []byte(svgHead), []byte(title), 1), nil
}

// render draws a picture and returns the contents of its file.
func render(p *plot.Plot, canvas vg.CanvasWriterTo) ([]byte, error) {
	p.Draw(draw.Crop(
		draw.New(canvas),
		vg.Points(6),
		-vg.Points(14),
		vg.Points(6),
		-vg.Points(6),
	))
	var image bytes.Buffer
	_, err := canvas.WriteTo(&image)
	if err != nil {
		return nil, fmt.Errorf("drawing the picture: %w", err)
	}
	return bytes.ReplaceAll(image.Bytes(), []byte(svgFont), []byte(svgFonts)), nil
}
