package main

import (
	"fmt"
	"go/ast"
	"go/token"
	"path/filepath"
)

// parallel records assignments of several values in one statement. It skips assignments whose sides depend on each
// other, such as a swap or a step of a recurrence, and the heads of loops, which have no other form.
func (t *tree) parallel(path string, file *ast.File) {
	if isKit(filepath.Dir(path)) {
		return
	}
	heads := map[ast.Stmt]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ForStmt:
			heads[n.Init] = true
			heads[n.Post] = true
		case *ast.IfStmt:
			heads[n.Init] = true
		case *ast.SwitchStmt:
			heads[n.Init] = true
		case *ast.AssignStmt:
			if len(n.Lhs) > 1 && len(n.Rhs) == len(n.Lhs) && !heads[n] && !depends(n) {
				t.together = append(t.together, fmt.Sprint(t.files.Position(n.Pos())))
			}
		}
		return true
	})
}

// depends reports whether a side of an assignment mentions a variable that it sets.
func depends(a *ast.AssignStmt) bool {
	if a.Tok == token.DEFINE {
		return false
	}
	set := map[string]bool{}
	for _, x := range a.Lhs {
		set[text(x)] = true
	}
	delete(set, "")
	found := false
	for _, x := range a.Rhs {
		ast.Inspect(x, func(n ast.Node) bool {
			if e, ok := n.(ast.Expr); ok && set[text(e)] {
				found = true
			}
			return !found
		})
	}
	return found
}

// text is a variable, or a field of one, as written; "" for other expressions.
func text(x ast.Expr) string {
	switch x := x.(type) {
	case *ast.Ident:
		return x.Name
	case *ast.SelectorExpr:
		if base := text(x.X); base != "" {
			return base + "." + x.Sel.Name
		}
	case *ast.IndexExpr:
		base := text(x.X)
		index := text(x.Index)
		if base != "" && index != "" {
			return base + "[" + index + "]"
		}
	}
	return ""
}
