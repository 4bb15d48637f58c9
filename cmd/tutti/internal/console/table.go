package console

import (
	"io"
	"os"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
	"golang.org/x/term"
)

// NewTable makes a table in the style of all commands, without a frame and with headers as written. [PrintTable]
// prints it.
func NewTable() table.Writer {
	t := table.NewWriter()
	t.SuppressTrailingSpaces()
	style := table.StyleLight
	style.Options = table.OptionsNoBordersAndSeparators
	style.Options.SeparateHeader = true
	style.Format.Header = text.FormatDefault
	style.Box.PaddingLeft = ""
	style.Box.PaddingRight = "  "
	t.SetStyle(style)
	return t
}

// Yes formats a boolean in a table.
var Yes = map[bool]string{true: "yes", false: "no"}

// AlignRight right-aligns the columns with numbers from one to another.
func AlignRight(from, to int) (columns []table.ColumnConfig) {
	for i := from; i <= to; i++ {
		columns = append(columns, table.ColumnConfig{
			Number:      i,
			Align:       text.AlignRight,
			AlignHeader: text.AlignRight,
		})
	}
	return columns
}

// Widths of text columns, which are wrapped.
const (
	ProseWidth    = 72
	leastProse    = 15 // the longest name of a pattern
	widthUnseen   = 80 // of a table that is not on a terminal
	leastTerminal = 40
)

// PrintTable prints a table. It wraps the texts in the columns numbered prose, the widest first, until the table fits
// the terminal.
func PrintTable(out io.Writer, t table.Writer, columns []table.ColumnConfig, prose ...int) {
	width, shown := terminalWidth(out)
	if !shown {
		width = widthUnseen
	}
	for _, number := range prose {
		columns = append(columns, table.ColumnConfig{
			Number:           number,
			WidthMax:         ProseWidth,
			WidthMaxEnforcer: text.WrapSoft,
		})
	}
	wrapped := columns[len(columns)-len(prose):]
	for {
		t.SetColumnConfigs(columns)
		lines := t.Render()
		widest := 0
		for line := range strings.Lines(lines) {
			widest = max(widest, text.StringWidth(strings.TrimRight(line, "\n")))
		}
		if len(wrapped) > 0 && widest > width {
			i := 0
			for j := range wrapped {
				if wrapped[j].WidthMax > wrapped[i].WidthMax {
					i = j
				}
			}
			if wrapped[i].WidthMax > leastProse {
				wrapped[i].WidthMax--
				continue
			}
		}
		_, _ = io.WriteString(out, lines+"\n")
		return
	}
}

// terminalWidth returns the number of columns of the terminal behind w, and whether it is known.
func terminalWidth(w io.Writer) (columns int, ok bool) {
	if o, is := w.(*Output); is {
		w = o.writer
	}
	f, ok := w.(*os.File)
	if !ok {
		return 0, false
	}
	columns, _, err := term.GetSize(int(f.Fd()))
	return columns, err == nil && columns > 0
}

// Wrapped breaks a text between words to the width of the terminal behind w, which would break it anywhere.
func Wrapped(w io.Writer, s string) string {
	if columns, ok := terminalWidth(w); ok {
		return text.WrapSoft(s, columns)
	}
	return s
}

// CanRedraw reports whether w is a terminal that can show progress in place.
func CanRedraw(w io.Writer) bool {
	columns, ok := terminalWidth(w)
	return ok && columns >= leastTerminal && !slices.Contains([]string{"", "dumb"}, os.Getenv("TERM"))
}
