package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/build"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// settings finds options that only tests set: fields of structs whose names end in Config or Options, by their types.
// Packages of other modules are left empty, so expressions of their types have no type. Errors that follow from this
// are ignored.
type settings struct {
	files    *token.FileSet
	modules  map[string]string // paths of modules by their folders
	parsed   map[string][]*ast.File
	checked  map[string]*types.Package // by import path
	infos    map[string]*types.Info    // of checked packages
	standard types.Importer

	options   []option
	set       map[*types.Var]bool
	converted [][2]*types.Struct // from, to
}

// option is a field of such a struct.
type option struct {
	name  string // with folder and type
	field *types.Var
}

// readers are the names of functions that set options by environment variables.
var readers = []string{"ReadEnv", "FromEnv"}

// unset returns the options that only tests set, in packages given as files by folder.
func unset(files *token.FileSet, parsed map[string][]*ast.File) ([]string, error) {
	s := settings{
		files:   files,
		modules: map[string]string{},
		parsed:  map[string][]*ast.File{},
		checked: map[string]*types.Package{},
		infos:   map[string]*types.Info{},
		set:     map[*types.Var]bool{},
	}
	if err := s.findModules(); err != nil {
		return nil, err
	}
	var imports []string
	for folder, all := range parsed {
		matching := s.matching(all)
		s.parsed[s.importPath(folder)] = matching
		for _, file := range matching {
			for _, spec := range file.Imports {
				imports = append(imports, strings.Trim(spec.Path.Value, `"`))
			}
		}
	}
	if err := s.findStandard(imports); err != nil {
		return nil, err
	}
	for folder := range parsed {
		if _, err := s.Import(s.importPath(folder)); err != nil {
			return nil, err
		}
	}
	for folder := range parsed {
		s.declared(folder)
		s.read(s.importPath(folder))
	}
	s.convert()
	var names []string
	for _, o := range s.options {
		if !s.set[o.field] {
			names = append(names, o.name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// findModules reads the paths of the repository's modules.
func (s *settings) findModules() error {
	return filepath.WalkDir(".", func(name string, entry os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && strings.HasPrefix(entry.Name(), ".") && name != "." {
			return filepath.SkipDir
		}
		if entry.Name() != "go.mod" {
			return nil
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		line, _, _ := strings.Cut(string(text), "\n")
		s.modules[filepath.Dir(name)] = strings.TrimPrefix(line, "module ")
		return nil
	})
}

// importPath returns the import path of a folder's package.
func (s *settings) importPath(folder string) string {
	for root := folder; ; root = filepath.Dir(root) {
		if module, ok := s.modules[root]; ok {
			below, err := filepath.Rel(root, folder)
			if err != nil {
				panic(err) // both are relative to the same folder
			}
			return path.Join(module, filepath.ToSlash(below))
		}
	}
}

// matching returns the files that are built here, which make the package on one system.
func (s *settings) matching(files []*ast.File) []*ast.File {
	var matching []*ast.File
	for _, file := range files {
		name := s.files.Position(file.Package).Filename
		if ok, err := build.Default.MatchFile(filepath.Split(name)); ok && err == nil {
			matching = append(matching, file)
		}
	}
	return matching
}

// findStandard makes imports of the standard library read the go command's compiled packages.
func (s *settings) findStandard(imports []string) error {
	slices.Sort(imports)
	imports = slices.DeleteFunc(slices.Compact(imports), func(p string) bool {
		first, _, _ := strings.Cut(p, "/")
		return strings.Contains(first, ".") || p == "C" || p == "unsafe"
	})
	list := exec.Command("go", "list", "-export", "-deps", "-f", "{{.ImportPath}} {{.Export}}")
	list.Args = append(list.Args, imports...)
	list.Stderr = os.Stderr
	text, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	exports := map[string]string{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		name, file, _ := strings.Cut(lines.Text(), " ")
		exports[name] = file
	}
	s.standard = importer.ForCompiler(s.files, "gc", func(name string) (io.ReadCloser, error) {
		if exports[name] == "" {
			return nil, errors.New("not of the standard library")
		}
		return os.Open(exports[name])
	})
	return nil
}

// Import implements [types.Importer].
func (s *settings) Import(name string) (*types.Package, error) {
	if p := s.checked[name]; p != nil {
		return p, nil
	}
	files := s.parsed[name]
	if len(files) == 0 {
		if p, err := s.standard.Import(name); err == nil {
			return p, nil
		}
		return types.NewPackage(name, path.Base(name)), nil
	}
	info := &types.Info{
		Types:      map[ast.Expr]types.TypeAndValue{},
		Uses:       map[*ast.Ident]types.Object{},
		Selections: map[*ast.SelectorExpr]*types.Selection{},
	}
	config := types.Config{Importer: s, FakeImportC: true, Error: func(error) {}}
	p, err := config.Check(name, s.files, files, info)
	if p == nil {
		return nil, err
	}
	s.checked[name] = p
	s.infos[name] = info
	return p, nil
}

// declared records the options that a folder's package declares.
func (s *settings) declared(folder string) {
	p := s.checked[s.importPath(folder)]
	if p == nil || p.Name() == "main" || !hasOptions(folder) {
		return
	}
	for _, name := range p.Scope().Names() {
		object, ok := p.Scope().Lookup(name).(*types.TypeName)
		if !ok || !object.Exported() || object.IsAlias() {
			continue
		}
		if !strings.HasSuffix(name, "Config") && !strings.HasSuffix(name, "Options") {
			continue
		}
		fields, ok := object.Type().Underlying().(*types.Struct)
		if !ok {
			continue
		}
		for field := range fields.Fields() {
			if field.Exported() && !field.Embedded() {
				s.options = append(s.options, option{fmt.Sprintf("%s.%s.%s", folder, name, field.Name()), field})
			}
		}
	}
}

// read records the options that a package sets.
func (s *settings) read(name string) {
	info := s.infos[name]
	if info == nil || isKit(name) {
		return
	}
	for _, file := range s.parsed[name] {
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			byEnvironment := ok && slices.Contains(readers, f.Name.Name)
			ast.Inspect(d, func(n ast.Node) bool {
				s.node(name, info, n, byEnvironment)
				return true
			})
		}
	}
}

// node records the fields that a node of a package sets. Settings of a package's options
// within the package are defaults, unless they come from the environment.
func (s *settings) node(name string, info *types.Info, n ast.Node, byEnvironment bool) {
	set := func(object types.Object) {
		field, ok := object.(*types.Var)
		if !ok || !field.IsField() {
			return
		}
		if byEnvironment || field.Pkg() == nil || field.Pkg().Path() != name {
			s.set[field.Origin()] = true
		}
	}
	target := func(x ast.Expr) {
		for {
			switch inner := ast.Unparen(x).(type) {
			case *ast.SelectorExpr:
				set(info.Uses[inner.Sel])
				return
			case *ast.IndexExpr: // an entry of an option
				x = inner.X
			default:
				return
			}
		}
	}
	switch n := n.(type) {
	case *ast.CompositeLit:
		s.literal(info, n, set)
	case *ast.AssignStmt:
		for _, x := range n.Lhs {
			target(x)
		}
	case *ast.RangeStmt:
		if n.Tok == token.ASSIGN {
			target(n.Key)
			target(n.Value)
		}
	case *ast.UnaryExpr: // the address of an option, as for a flag
		if n.Op == token.AND {
			target(n.X)
		}
	case *ast.CallExpr:
		if info.Types[n.Fun].IsType() && len(n.Args) == 1 {
			to := structOf(info.Types[n.Fun].Type)
			from := structOf(info.Types[n.Args[0]].Type)
			if from != nil && to != nil && from != to {
				s.converted = append(s.converted, [2]*types.Struct{from, to})
			}
		}
	}
}

// literal records the fields that a composite literal sets.
func (s *settings) literal(info *types.Info, n *ast.CompositeLit, set func(types.Object)) {
	fields := structOf(info.Types[n].Type)
	if fields == nil {
		return
	}
	for i, element := range n.Elts {
		pair, ok := element.(*ast.KeyValueExpr)
		if !ok {
			set(fields.Field(i))
			continue
		}
		if key, ok := pair.Key.(*ast.Ident); ok {
			set(info.Uses[key])
		}
	}
}

// convert propagates settings over conversions until nothing changes.
func (s *settings) convert() {
	for changed := true; changed; {
		changed = false
		for _, pair := range s.converted {
			for i := range pair[0].NumFields() {
				from := pair[0].Field(i).Origin()
				to := pair[1].Field(i).Origin()
				if s.set[from] && !s.set[to] {
					s.set[to] = true
					changed = true
				}
			}
		}
	}
}

// structOf returns the struct behind a type or a pointer to it, or nil.
func structOf(t types.Type) *types.Struct {
	if t == nil {
		return nil
	}
	if p, ok := t.Underlying().(*types.Pointer); ok {
		t = p.Elem()
	}
	fields, ok := t.Underlying().(*types.Struct)
	if !ok {
		return nil
	}
	return fields
}

// hasOptions reports whether programs set options of a folder's package.
func hasOptions(folder string) bool {
	if below(folder, "cmd", "examples", "lab", "deploy") {
		return false
	}
	return !slices.Contains(strings.Split(filepath.ToSlash(folder), "/"), "internal") && !isKit(folder)
}

// isKit reports whether a package is only for tests.
func isKit(name string) bool {
	for _, part := range strings.Split(filepath.ToSlash(name), "/") {
		if strings.HasSuffix(part, "test") || slices.Contains(kits, part) {
			return true
		}
	}
	return false
}

// kits are packages for tests whose names do not end in "test".
var kits = []string{"standin", "simulation"}
