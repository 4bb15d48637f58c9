// Command comments lists the exported names without a comment in the packages below a folder, except in tests, and
// fails if there are any:
//
//	go run ./.ci/comments [folder]
//
// A constant or variable may share the comment of its group. Fields need no comment.
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	root := "."
	if len(os.Args) > 1 {
		root = os.Args[1]
	}
	c := check{files: token.NewFileSet(), documented: map[string]bool{}}
	if err := filepath.WalkDir(root, c.visit); err != nil {
		log.Fatal(err)
	}
	for folder, ok := range c.documented {
		if !ok {
			c.missing = append(c.missing, folder+": package")
		}
	}
	for _, m := range c.missing {
		fmt.Println(m)
	}
	if len(c.missing) > 0 {
		log.Fatalf("%d exported names have no comment", len(c.missing))
	}
}

type check struct {
	files      *token.FileSet
	documented map[string]bool // packages, by folder
	missing    []string
}

// visit checks a file.
func (c *check) visit(path string, entry fs.DirEntry, err error) error {
	switch name := entry.Name(); {
	case err != nil:
		return err
	case entry.IsDir() && (name == "testdata" || name == ".git"):
		return fs.SkipDir
	case entry.IsDir() || filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go"):
		return nil
	}
	file, err := parser.ParseFile(c.files, path, nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	folder := filepath.Dir(path)
	c.documented[folder] = c.documented[folder] || file.Doc != nil
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if exportedReceiver(d.Recv) {
				c.want(d.Name, d.Doc)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				c.spec(d, spec)
			}
		}
	}
	return nil
}

func (c *check) spec(d *ast.GenDecl, spec ast.Spec) {
	switch s := spec.(type) {
	case *ast.ValueSpec:
		for _, name := range s.Names {
			c.want(name, d.Doc, s.Doc, s.Comment)
		}
	case *ast.TypeSpec:
		c.want(s.Name, d.Doc, s.Doc)
		if t, ok := s.Type.(*ast.InterfaceType); ok && s.Name.IsExported() {
			for _, m := range t.Methods.List {
				for _, name := range m.Names {
					c.want(name, m.Doc, m.Comment)
				}
			}
		}
	}
}

// want records an exported name without a comment.
func (c *check) want(name *ast.Ident, comments ...*ast.CommentGroup) {
	if !name.IsExported() {
		return
	}
	for _, comment := range comments {
		if comment != nil {
			return
		}
	}
	c.missing = append(c.missing, fmt.Sprintf("%s: %s", c.files.Position(name.Pos()), name.Name))
}

// exportedReceiver reports whether a function belongs to the package itself or is a method of an exported type.
func exportedReceiver(receiver *ast.FieldList) bool {
	if receiver == nil {
		return true
	}
	t := receiver.List[0].Type
	for {
		switch x := t.(type) {
		case *ast.StarExpr:
			t = x.X
		case *ast.IndexExpr:
			t = x.X
		case *ast.IndexListExpr:
			t = x.X
		case *ast.Ident:
			return x.IsExported()
		default:
			return false
		}
	}
}
