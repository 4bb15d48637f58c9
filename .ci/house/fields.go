package main

import (
	"fmt"
	"go/ast"
	"path/filepath"
)

// uncommented records the fields of a file's structs without a comment: on their line, above them, or above a run of
// consecutive fields that contains them. Rows of tables and of JSON have obvious shapes and are left out: structs
// without a name, and fields with a tag.
func (t *tree) uncommented(path string, file *ast.File) {
	if isKit(filepath.Dir(path)) || below(path, ".ci", filepath.Join("internal", "simd", "gen")) {
		return
	}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		fields, ok := spec.Type.(*ast.StructType)
		if !ok {
			return true
		}
		t.structFields(spec.Name.Name, fields)
		return true
	})
}

// structFields records the fields of a struct without a comment.
func (t *tree) structFields(name string, s *ast.StructType) {
	previous := t.files.Position(s.Pos()).Line - 1 // last line of the previous field
	told := true                                   // a comment above covers it; for a struct on one line, the type's
	for _, field := range s.Fields.List {
		position := t.files.Position(field.Pos())
		switch {
		case field.Doc != nil:
			told = true
		case previous+1 != position.Line && previous != position.Line:
			told = false
		}
		previous = t.files.Position(field.End()).Line
		if field.Comment != nil || field.Tag != nil || told {
			continue
		}
		for _, id := range field.Names {
			if id.Name == "_" {
				continue // padding
			}
			t.silent = append(t.silent, fmt.Sprintf("%s: %s.%s", position, name, id.Name))
		}
	}
}
