// Command examples lists the exported functions, types and methods of the public packages that occur in no example,
// and the packages whose index is too long. It fails if there are any:
//
//	go run ./.ci/examples
//
// A name occurs in an example if a file with Example functions, or a program in examples, contains it: a function or
// type after its package's name, a method after any value. A type also occurs if its field, or a function or method
// that takes or returns it, occurs. Names are matched by their text, without types.
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"log"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

const (
	module   = "github.com/tutti-go/tutti"
	maxIndex = 100 // lines of go doc: two screens
)

// indexed are the packages that most programs start with.
var indexed = []string{".", "./comm", "./distributed", "./distributed/ddp"}

// forAuthors are packages for authors of backends, runtimes and decorators. The backends in the tree are their
// examples.
var forAuthors = []string{
	"comm/backend", "comm/commtest", "comm/instrument", "comm/staged",
	"distributed/distributedtest",
	"runtime/kernel", "runtime/runtimetest",
}

// exceptions are methods that programs do not call: methods of interfaces in packages comm/backend and
// runtime/kernel, what flight recorders ask a communicator, methods of a runtime for GPU backends, and one for package
// encoding/json.
var exceptions = []string{
	"AllReduceFixed", "Reduced", "AllReduceRounded", "HandOver", "Progress", "ShareLists", // package backend
	"OpenWindow",             // comm/staged, by package window
	"RunName",                // package record
	"Kernels", "NewHostCopy", // package kernel
	"AllocateMapping", "BetweenLaunches", "Capturing", "CurrentToFree", "HasCaptured", "ReleaseMapping", "Serialize",
	"StartsEarly", "Unmapping", // for comm/nccl and comm/p2p
	"UnmarshalText",
}

func main() {
	log.SetFlags(0)
	c := check{files: token.NewFileSet(), used: map[string]bool{}}
	if err := filepath.WalkDir(".", c.visit); err != nil {
		log.Fatal(err)
	}
	findings := c.missing()
	for _, folder := range indexed {
		text, err := exec.Command("go", "doc", folder).Output()
		if err != nil {
			log.Fatalf("go doc %s: %v", folder, err)
		}
		if lines := strings.Count(string(text), "\n"); lines > maxIndex {
			findings = append(findings, fmt.Sprintf("go doc %s has %d lines, at most %d", folder, lines, maxIndex))
		}
	}
	for _, finding := range findings {
		fmt.Println(finding)
	}
	if len(findings) > 0 {
		log.Fatalf("%d findings", len(findings))
	}
}

// check goes through the tree.
type check struct {
	files    *token.FileSet
	declared []name
	used     map[string]bool // by key
}

// A name is exported by a public package.
type name struct {
	folder, receiver, text string   // receiver is "" for functions and types
	mentions               []string // types of the package in the declaration of a function, method or type
}

func (n name) key() string {
	if n.receiver != "" {
		return "." + n.text
	}
	return n.folder + "." + n.text
}

func (n name) String() string {
	if n.receiver != "" {
		return n.folder + ": " + n.receiver + "." + n.text
	}
	return n.folder + ": " + n.text
}

// missing returns the names without an example, sorted.
func (c *check) missing() []string {
	for grown := true; grown; {
		grown = c.spread()
	}
	var all []string
	for _, n := range c.declared {
		if !c.used[n.key()] && !slices.Contains(exceptions, n.text) {
			all = append(all, n.String())
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// spread marks the types that used names mention, and reports whether it marked any.
func (c *check) spread() (grown bool) {
	for _, n := range c.declared {
		if !c.used[n.key()] {
			continue
		}
		for _, t := range n.mentions {
			if key := n.folder + "." + t; !c.used[key] {
				c.used[key] = true
				grown = true
			}
		}
	}
	return grown
}

// mentioned returns the names in a declaration that may be types of its package.
func mentioned(declaration ast.Node) (all []string) {
	ast.Inspect(declaration, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr: // of another package
			return false
		case *ast.Ident:
			if n.IsExported() {
				all = append(all, n.Name)
			}
		}
		return true
	})
	return all
}

// visit reads a file: a test's examples, a program in examples, or a public package's declarations.
func (c *check) visit(path string, entry fs.DirEntry, err error) error {
	if err != nil {
		return err
	}
	if entry.IsDir() {
		if slices.Contains([]string{"testdata", "internal", "lab", ".git", ".ci", "cmd"}, entry.Name()) {
			return fs.SkipDir
		}
		return nil
	}
	if filepath.Ext(path) != ".go" {
		return nil
	}
	file, err := parser.ParseFile(c.files, path, nil, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	folder := filepath.ToSlash(filepath.Dir(path))
	program := strings.HasPrefix(folder, "examples/")
	if program || strings.HasSuffix(path, "_test.go") {
		c.uses(file, program)
		return nil
	}
	if file.Name.Name != "main" && !strings.HasPrefix(folder, "adapters/") && !slices.Contains(forAuthors, folder) {
		c.declares(file, folder)
	}
	return nil
}

// uses records the names in a file's examples. A program is one example.
func (c *check) uses(file *ast.File, program bool) {
	imports := map[string]string{}
	for _, i := range file.Imports {
		path := strings.Trim(i.Path.Value, `"`)
		folder, public := strings.CutPrefix(path, module+"/")
		if path == module {
			folder, public = ".", true
		}
		if !public {
			continue
		}
		local := filepath.Base(path)
		if i.Name != nil {
			local = i.Name.Name
		}
		imports[local] = folder
	}
	example := func(d ast.Decl) bool {
		f, ok := d.(*ast.FuncDecl)
		return ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Example")
	}
	// Declarations that examples use are often in the same file.
	if !program && !slices.ContainsFunc(file.Decls, example) {
		return
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if f, ok := n.(*ast.FuncDecl); ok {
			_, shown, _ := strings.Cut(f.Name.Name, "_") // ExampleType_Method, which another package may call
			c.used["."+shown] = true
			c.used["."+f.Name.Name] = true // a method of an interface that the example implements
			return true
		}
		selector, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		c.used["."+selector.Sel.Name] = true
		if x, ok := selector.X.(*ast.Ident); ok && imports[x.Name] != "" {
			c.used[imports[x.Name]+"."+selector.Sel.Name] = true
		}
		return true
	})
}

// declares records the exported functions, types and methods of a package's file, including an interface's methods.
func (c *check) declares(file *ast.File, folder string) {
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			receiver := receiverName(d.Recv)
			if d.Name.IsExported() && (d.Recv == nil || ast.IsExported(receiver)) {
				all := mentioned(d.Type)
				if receiver != "" {
					all = append(all, receiver)
				}
				c.declared = append(c.declared, name{folder, receiver, d.Name.Name, all})
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				if s, ok := spec.(*ast.TypeSpec); ok && s.Name.IsExported() {
					c.declaresType(s, folder)
				}
			}
		}
	}
}

func (c *check) declaresType(s *ast.TypeSpec, folder string) {
	c.declared = append(c.declared, name{folder, "", s.Name.Name, mentioned(s.Type)})
	t, ok := s.Type.(*ast.InterfaceType)
	if !ok {
		return
	}
	for _, m := range t.Methods.List {
		for _, method := range m.Names {
			if method.IsExported() {
				c.declared = append(c.declared, name{folder, s.Name.Name, method.Name, mentioned(m.Type)})
			}
		}
	}
}

// receiverName returns the type that a method belongs to, or "" for a function.
func receiverName(receiver *ast.FieldList) string {
	if receiver == nil {
		return ""
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
			return x.Name
		default:
			return ""
		}
	}
}
