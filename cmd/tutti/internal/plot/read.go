// Package plot draws measurements of trainings from files of JSON lines.
package plot

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/tutti-go/tutti/cmd/tutti/internal/train"
)

const (
	longestLine = 64 << 20 // a training of a million tests
	mostErrors  = 10       // wrong lines in one error
	// longestQuote is the number of characters of a wrong line in an error.
	longestQuote = 30
)

// Point is one measurement of a training.
type Point struct {
	Step      *float64 `json:"step"`       // nil if the line has none; the same for all fields
	Seconds   *float64 `json:"s"`          // of the training
	SentBytes *float64 `json:"sent_bytes"` // by a rank
	Accuracy  *float64 `json:"accuracy"`   // in the test, in percent
	Loss      *float64 `json:"loss"`       // in the test
}

// Curve is a training.
type Curve struct {
	Name   string  // as the legend shows it
	Points []Point // in the file's order
}

// line is one line of a file: a training, or a point of one.
type line struct {
	Point
	Name    string  `json:"name"`    // of the point's training
	Pattern string  `json:"pattern"` // of a training
	Tests   []Point // of a training; nil for a point
}

// Read returns the trainings of a file in order. A line with tests is a training, as tutti train --json prints it.
// Any other line is a point of the training with its "name" or, without one, of a training with the file's name. Read
// strips the prefix that tutti launch writes before a rank's line. Its error names the lines that are neither.
func Read(name string, r io.Reader) ([]Curve, error) {
	f := file{name: strings.TrimSuffix(filepath.Base(name), filepath.Ext(name))}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, longestLine)
	var errs []error
	number := 0
	for lines.Scan() {
		number++
		text := strings.TrimSpace(rankPrefix.ReplaceAllString(lines.Text(), ""))
		if text == "" {
			continue
		}
		if err := f.add(text); err != nil {
			errs = append(errs, fmt.Errorf("%s:%d: %w", name, number, err))
		}
		if len(errs) == mostErrors {
			break
		}
	}
	if err := lines.Err(); err != nil {
		errs = append(errs, fmt.Errorf("%s:%d: %w", name, number+1, err))
	}
	return f.curves, errors.Join(errs...)
}

// rankPrefix is the prefix that tutti launch writes before a rank's line. With --hosts it includes the host.
var rankPrefix = regexp.MustCompile(`^(\S+: )?\[ *\d+\] `)

// file is the state of reading one file.
type file struct {
	name    string  // without folder and extension
	curves  []Curve // in the file's order
	advised bool    // an error has explained how programs print JSON
}

// add reads a line.
func (f *file) add(text string) error {
	var l line
	if err := json.Unmarshal([]byte(text), &l); err != nil {
		return f.reason(text, err)
	}
	if l.Tests == nil {
		return f.addPoint(cmp.Or(l.Name, l.Pattern, f.name), l.Point)
	}
	var result train.Result
	if err := json.Unmarshal([]byte(text), &result); err != nil {
		return f.reason(text, err)
	}
	name := l.Name
	if name == "" {
		name = result.Name()
	}
	for i, p := range l.Tests {
		if err := p.check(); err != nil {
			return fmt.Errorf("test %d: %w", i+1, err)
		}
	}
	f.curves = append(f.curves, Curve{name, l.Tests})
	return nil
}

// addPoint adds a point to the training with the given name.
func (f *file) addPoint(name string, p Point) error {
	if err := p.check(); err != nil {
		return err
	}
	for i := range f.curves {
		if f.curves[i].Name == name {
			f.curves[i].Points = append(f.curves[i].Points, p)
			return nil
		}
	}
	f.curves = append(f.curves, Curve{name, []Point{p}})
	return nil
}

// check returns an error if no picture can show the point.
func (p *Point) check() error {
	if p.Step == nil && p.Seconds == nil && p.SentBytes == nil {
		return errors.New(`none of "step", "s" and "sent_bytes"`)
	}
	if p.Accuracy == nil && p.Loss == nil {
		return errors.New(`neither "accuracy" nor "loss"`)
	}
	return nil
}

// reason explains in the writer's terms why a line cannot be read.
func (f *file) reason(text string, err error) error {
	var kind *json.UnmarshalTypeError
	if errors.As(err, &kind) && kind.Field != "" {
		field := kind.Field[strings.LastIndexByte(kind.Field, '.')+1:]
		return fmt.Errorf("%q is a %s, which is not what tutti train --json prints", field, kind.Value)
	}
	if text[0] != '{' {
		advice := ""
		if !f.advised {
			advice = ": has the program an option to print JSON?"
		}
		f.advised = true
		return fmt.Errorf("no JSON object, but %q%s", shortened(text), advice)
	}
	return fmt.Errorf("no JSON object: %w", err)
}

// shortened returns the beginning of a line.
func shortened(text string) string {
	if runes := []rune(text); len(runes) > longestQuote {
		return string(runes[:longestQuote]) + "…"
	}
	return text
}

// finite reports whether a value exists and can be drawn.
func finite(v *float64) bool {
	return v != nil && !math.IsInf(*v, 0) && !math.IsNaN(*v)
}
