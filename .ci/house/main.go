// Command house counts properties that make code hard to read, and fails if a count exceeds its bound below:
//
//	go run ./.ci/house [-list]
//
// A bound is the tree's present count. A change that needs less lowers it, until it reaches its goal. Tests,
// generated files and testdata do not count. -list prints the places behind the counts.
package main

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"io"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// measure is a count with its bound and goal.
type measure struct {
	name        string
	count       float64
	bound, goal float64
	places      []string // of items that are counted one by one
}

const (
	maxLines   = 70  // of a function without its comment
	maxColumns = 120 // of a line; a tab counts as one
)

// functionWords are prepositions, pronouns and adverbs, which say nothing about the things that they name.
var functionWords = strings.Fields(`of at over each most least there then how why again both own more less
	later above below beside behind into within until since still any some other others rest same apart alike mine
	theirs such what who whose where when already together both very here`)

func main() {
	log.SetFlags(0)
	list := flag.Bool("list", false, "print the places as well")
	flag.Parse()
	t, err := read()
	if err != nil {
		log.Fatal(err)
	}
	if exceeded := report(os.Stdout, t.measures(), *list); exceeded > 0 {
		log.Fatalf("%d bounds of .ci/house are exceeded", exceeded)
	}
}

// report prints a line for each measure, with the places of measures above their bound, or of all. It returns the
// number of measures above their bound.
func report(w io.Writer, measures []measure, places bool) (exceeded int) {
	for _, m := range measures {
		verdict := ""
		if m.count > m.bound {
			verdict = "  TOO MANY"
			exceeded++
		}
		fmt.Fprintf(w, "%-36s %8.2f  bound %8.2f  goal %7.1f%s\n", m.name, m.count, m.bound, m.goal, verdict)
		if places || verdict != "" {
			for _, place := range m.places {
				fmt.Fprintln(w, "  ", place)
			}
		}
	}
	return exceeded
}

// read counts in the current directory and below.
func read() (*tree, error) {
	t := &tree{files: token.NewFileSet(), parsed: map[string][]*ast.File{}}
	err := filepath.WalkDir(".", t.visit)
	if err != nil {
		return nil, err
	}
	t.unset, err = unset(t.files, t.parsed)
	return t, err
}

// tree holds the counts.
type tree struct {
	files     *token.FileSet
	codeLines int
	tokens    int

	declared int      // names
	words    []string // function words among them
	exported []string // names
	long     []string // functions
	wide     []string // lines
	unset    []string // options
	silent   []string // fields without a comment
	together []string // assignments of several values

	parsed map[string][]*ast.File // by folder
}

func (t *tree) measures() []measure {
	return []measure{
		{name: "tokens a line of code", count: float64(t.tokens) / float64(t.codeLines), bound: 7.4, goal: 7.4},
		{
			name:   "function words in 1,000 names",
			count:  1000 * float64(len(t.words)) / float64(t.declared),
			bound:  0,
			goal:   3,
			places: t.words,
		},
		{name: "exported names", count: float64(len(t.exported)), bound: 380, goal: 380},
		{name: "options that nothing sets", count: float64(len(t.unset)), bound: 0, goal: 0, places: t.unset},
		{name: "fields without a comment", count: float64(len(t.silent)), bound: 0, goal: 0, places: t.silent},
		{name: "parallel assignments", count: float64(len(t.together)), bound: 0, goal: 0, places: t.together},
		{name: "functions above 70 lines", count: float64(len(t.long)), bound: 4, goal: 8, places: t.long},
		{name: "lines above 120 columns", count: float64(len(t.wide)), bound: 0, goal: 0, places: t.wide},
	}
}

// visit reads a file.
func (t *tree) visit(path string, entry fs.DirEntry, err error) error {
	if err != nil {
		return err
	}
	name := entry.Name()
	if entry.IsDir() {
		if name == "testdata" || strings.HasPrefix(name, ".") && path != "." {
			return fs.SkipDir
		}
		return nil
	}
	if filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") {
		return nil
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	file, err := parser.ParseFile(t.files, path, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	folder := filepath.Dir(path)
	t.parsed[folder] = append(t.parsed[folder], file)
	if ast.IsGenerated(file) {
		return nil
	}
	t.countTokens(path, text)
	for i, line := range strings.Split(string(text), "\n") {
		generate := strings.HasPrefix(line, "//go:generate ") // it cannot be wrapped
		if len([]rune(line)) > maxColumns && !generate {
			t.wide = append(t.wide, fmt.Sprintf("%s:%d", path, i+1))
		}
	}
	t.declarations(path, file)
	t.uncommented(path, file)
	t.parallel(path, file)
	ast.Inspect(file, func(n ast.Node) bool {
		t.names(n)
		return true
	})
	return nil
}

// countTokens counts the tokens of code, and the lines with tokens.
func (t *tree) countTokens(path string, text []byte) {
	files := token.NewFileSet()
	file := files.AddFile(path, -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, 0)
	lines := map[int]bool{}
	for {
		pos, tok, literal := s.Scan()
		if tok == token.EOF {
			break
		}
		if tok == token.SEMICOLON && literal == "\n" {
			continue
		}
		t.tokens++
		lines[file.Line(pos)] = true
	}
	t.codeLines += len(lines)
}

// declarations examines the declarations of a file.
func (t *tree) declarations(path string, file *ast.File) {
	folder := filepath.Dir(path)
	public := file.Name.Name != "main" && isPublic(folder)
	export := func(name *ast.Ident) {
		if public && name.IsExported() {
			t.exported = append(t.exported, folder+"."+name.Name)
		}
	}
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil {
				export(d.Name)
			}
			first := t.files.Position(d.Pos()).Line
			last := t.files.Position(d.End()).Line
			if last-first+1 > maxLines {
				t.long = append(t.long, fmt.Sprintf("%s:%d: %s has %d lines", path, first, d.Name.Name, last-first+1))
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					export(spec.Name)
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						export(name)
					}
				}
			}
		}
	}
}

// isPublic reports whether programs import the packages of a folder. Commands, examples, other modules, and packages
// for tests are not public.
func isPublic(folder string) bool {
	for _, part := range strings.Split(filepath.ToSlash(folder), "/") {
		if part == "internal" || strings.HasSuffix(part, "test") {
			return false
		}
	}
	return !below(folder, "cmd", "examples", "adapters", "lab", "delta")
}

// below reports whether a folder is one of others or below one.
func below(folder string, others ...string) bool {
	for _, other := range others {
		if folder == other || strings.HasPrefix(folder, other+string(filepath.Separator)) {
			return true
		}
	}
	return false
}

// names counts the names that a node declares.
func (t *tree) names(n ast.Node) {
	switch n := n.(type) {
	case *ast.FuncDecl:
		t.name(n.Name)
	case *ast.TypeSpec:
		t.name(n.Name)
	case *ast.Field:
		t.all(n.Names)
	case *ast.ValueSpec:
		t.all(n.Names)
	case *ast.AssignStmt:
		if n.Tok == token.DEFINE {
			for _, x := range n.Lhs {
				t.expression(x)
			}
		}
	case *ast.RangeStmt:
		if n.Tok == token.DEFINE {
			t.expression(n.Key)
			t.expression(n.Value)
		}
	}
}

func (t *tree) all(names []*ast.Ident) {
	for _, name := range names {
		t.name(name)
	}
}

func (t *tree) expression(x ast.Expr) {
	if name, ok := x.(*ast.Ident); ok {
		t.name(name)
	}
}

func (t *tree) name(id *ast.Ident) {
	if id.Name == "_" {
		return
	}
	t.declared++
	if slices.Contains(functionWords, id.Name) {
		t.words = append(t.words, fmt.Sprintf("%s: %s", t.files.Position(id.Pos()), id.Name))
	}
}
