package local_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// nothing is an importer of packages that are empty: what this package takes from
// others does not matter here.
type nothing struct{}

func (nothing) Import(name string) (*types.Package, error) {
	p := types.NewPackage(name, path.Base(name))
	p.MarkComplete()
	return p, nil
}

// TestFilesUseThoseBefore compares what the package's documentation says of its
// files with what they use.
func TestFilesUseThoseBefore(t *testing.T) {
	names, err := filepath.Glob("*.go")
	require.NoError(t, err)
	names = slices.DeleteFunc(names, func(name string) bool { return strings.HasSuffix(name, "_test.go") })
	if len(names) == 0 {
		t.Skip("is a test binary away from its sources")
	}
	set := token.NewFileSet()
	var files []*ast.File
	var order []string
	for _, name := range names {
		f, err := parser.ParseFile(set, name, nil, parser.ParseComments)
		require.NoError(t, err)
		files = append(files, f)
		for _, m := range regexp.MustCompile(`(?m)^  - ([a-z, ]+):`).FindAllStringSubmatch(f.Doc.Text(), -1) {
			order = append(order, strings.Split(m[1], ", ")...)
		}
	}
	require.Len(t, order, len(files), "the files that the documentation names")
	info := &types.Info{Uses: map[*ast.Ident]types.Object{}}
	config := types.Config{Importer: nothing{}, Error: func(error) {}}
	pkg, _ := config.Check("local", set, files, info)
	rank := func(p token.Pos) int {
		return slices.Index(order, strings.TrimSuffix(path.Base(set.Position(p).Filename), ".go"))
	}
	arrows := map[[2]int]bool{}
	for id, object := range info.Uses {
		if object.Pkg() != pkg || !object.Pos().IsValid() {
			continue
		}
		user, used := rank(id.Pos()), rank(object.Pos())
		assert.LessOrEqual(t, used, user, "%v uses %s", set.Position(id.Pos()), object.Name())
		if user != used {
			arrows[[2]int{user, used}] = true
		}
	}
	require.Greater(t, len(arrows), len(files), "arrows that were found")
	t.Logf("%d arrows between %d files", len(arrows), len(files))
}
