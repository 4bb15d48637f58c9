// Command locks compares the locks of the code with docs/locks.md, which puts them in order:
//
//	go run ./.ci/locks
//
// It ignores tests, packages for tests, examples, adapters and the laboratory.
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
	"regexp"
	"slices"
	"strings"
)

const page = "docs/locks.md"

// outside are folders whose locks are not on the page.
var outside = []string{"adapters", "examples", "lab", "testdata"}

func main() {
	log.SetFlags(0)
	text, err := os.ReadFile(page)
	if err != nil {
		log.Fatal(err)
	}
	named := map[string]bool{}
	for _, line := range strings.Split(string(text), "\n") {
		row, isRow := strings.CutPrefix(line, "| `")
		if !isRow {
			continue
		}
		cell, _, _ := strings.Cut("`"+row, " | ")
		for _, m := range name.FindAllStringSubmatch(cell, -1) {
			named[m[1]] = true
		}
	}
	var found []string
	visit := func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		base := entry.Name()
		if entry.IsDir() {
			hidden := strings.HasPrefix(base, ".") && path != "."
			if hidden || slices.Contains(outside, base) || strings.HasSuffix(base, "test") || base == "standin" {
				return fs.SkipDir
			}
			return nil
		}
		if filepath.Ext(base) != ".go" || strings.HasSuffix(base, "_test.go") {
			return nil
		}
		locks, err := locksOf(path)
		found = append(found, locks...)
		return err
	}
	if err := filepath.WalkDir(".", visit); err != nil {
		log.Fatal(err)
	}
	failed := false
	for _, lock := range found {
		if !named[lock] {
			fmt.Printf("%s does not say in which order %s is taken\n", page, lock)
			failed = true
		}
	}
	for lock := range named {
		if !slices.Contains(found, lock) {
			fmt.Printf("%s has %s, which is no lock\n", page, lock)
			failed = true
		}
	}
	if failed {
		os.Exit(1)
	}
}

// name matches a lock in the first cell of a row.
var name = regexp.MustCompile("`([^`]+)`")

// locksOf returns the locks of a file: fields and variables, by package, type and name. An embedded lock has the name
// of its struct.
func locksOf(path string) (all []string, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, d := range file.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, spec := range g.Specs {
			switch spec := spec.(type) {
			case *ast.TypeSpec:
				all = append(all, within(file.Name.Name+"."+spec.Name.Name, spec.Type)...)
			case *ast.ValueSpec:
				t := spec.Type
				if t == nil && len(spec.Values) == 1 {
					if literal, ok := spec.Values[0].(*ast.CompositeLit); ok {
						t = literal.Type
					}
				}
				for _, n := range spec.Names {
					all = append(all, within(file.Name.Name+"."+n.Name, t)...)
				}
			}
		}
	}
	return all, nil
}

// within returns the locks of a named type.
func within(prefix string, t ast.Expr) (all []string) {
	if isLock(t) {
		return []string{prefix}
	}
	s, ok := t.(*ast.StructType)
	if !ok {
		return nil
	}
	for _, f := range s.Fields.List {
		if f.Names == nil && isLock(f.Type) {
			all = append(all, prefix)
		}
		for _, n := range f.Names {
			all = append(all, within(prefix+"."+n.Name, f.Type)...)
		}
	}
	return all
}

func isLock(t ast.Expr) bool {
	s, ok := t.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	return s.Sel.Name == "Mutex" || s.Sel.Name == "RWMutex"
}
