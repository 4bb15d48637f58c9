// Package mutate puts defects into Go source, for tests of tests. A file keeps its functions and gets defective
// variants next to them; a number selects one when the program runs, so that one build has all of them.
package mutate

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strings"
)

// Variant is a function in which Old is replaced by New.
type Variant struct {
	Number   int    // selects it
	Old, New string // text of the source, and its replacement
}

// Functions returns the text of a Go file with variants of its functions. A function runs as the variant whose number
// the expression chosen has, or unchanged. The text Old of a variant must occur exactly once in the file, in the body
// of a function.
func Functions(text, chosen string, variants []Variant) (string, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "", text, 0)
	if err != nil {
		return "", err
	}
	found := map[int]bool{}
	changed := text
	for _, d := range slices.Backward(file.Decls) { // from the end, so that earlier offsets stay valid
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		begin := files.Position(f.Body.Lbrace).Offset + 1
		end := files.Position(f.Body.Rbrace).Offset
		for _, v := range variants {
			if !strings.Contains(text[begin:end], v.Old) {
				continue
			}
			body := strings.Replace(text[begin:end], v.Old, v.New, 1)
			if f.Type.Results == nil {
				body += "\nreturn\n"
			}
			found[v.Number] = true
			changed = fmt.Sprintf("%s\nif %s == %d {%s}\n%s", changed[:begin], chosen, v.Number, body, changed[begin:])
		}
	}
	for _, v := range variants {
		if n := strings.Count(text, v.Old); n != 1 || !found[v.Number] {
			return "", fmt.Errorf("the text of variant %d stands %d times, in a function: %t: %q",
				v.Number, n, found[v.Number], v.Old)
		}
	}
	return changed, nil
}
