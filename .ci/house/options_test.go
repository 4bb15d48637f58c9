package main

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// declared is a package with options. Another module sets them.
const declared = `package a

import "os"

type Config struct {
	Unset   int // by anybody
	ByTest  int // of another package, which are not read
	ByKit   int
	Default int // by the package itself alone
	Literal int // by the package itself alone

	ByLiteral  int
	Assigned   int
	Entry      map[string]int
	ByFlag     int
	Ranged     int
	Positional Options
	Converted  Inner
	ByValue    int
	ByEnv      string
	hidden     int
	Embedded
}

type Options struct{ First, Second int }

type Inner struct{ Carried, Left int }

type Embedded struct{ X int }

type Settings struct{ X int } // whose name is another

type ownConfig struct{ X int }

type InnerConfig struct{ Carried, Left int }

func New(c Config) Config {
	if c.Default == 0 {
		c.Default = 1
	}
	return Config{Literal: c.hidden}
}

func (c *Config) ReadEnv() { c.ByEnv = os.Getenv("X") }

func Convert(i Inner) InnerConfig { return InnerConfig(i) }
`

const setter = `package b

import (
	"flag"

	"example.com/a"
)

func F(p *a.Config) {
	c := a.Config{ByLiteral: 1}
	c.Assigned = 2
	c.Entry["x"] = 3
	flag.IntVar(&c.ByFlag, "x", 0, "")
	for p.Ranged = range 2 {
	}
	c.Positional = a.Options{1, 2}
	c.Converted = a.Inner{Carried: 1}
	(p.ByValue) = c.Unset
	_ = a.New(c)
}
`

func TestOptions(t *testing.T) {
	set := func(field string) string {
		return fmt.Sprintf("package b\n\nimport \"example.com/a\"\n\nvar X = a.Config{%s: 1}\n", field)
	}
	files := map[string]string{
		"go.mod":               "module example.com/b\n\ngo 1.25\n",
		"a/go.mod":             "module example.com/a\n\ngo 1.25\n",
		"a/a.go":               declared,
		"b.go":                 setter,
		"b_test.go":            set("ByTest"),
		"btest/b.go":           set("ByKit"),
		"a/internal/c/c.go":    "package c\n\ntype Config struct{ X int }\n",
		"examples/c/config.go": "package c\n\ntype Config struct{ X int }\n",
		"foreign/c.go":         "package c\n\nimport \"example.org/away\"\n\nvar X = away.Config{Y: 1}\n",
	}
	want := []string{
		"a.Config.ByKit", "a.Config.ByTest", "a.Config.Default", "a.Config.Literal", "a.Config.Unset",
		"a.InnerConfig.Left",
	}
	enter(t, files)
	counted, err := read()
	require.NoError(t, err)
	assert.Equal(t, want, counted.unset)

	// Each option is set in one place. Without that place, it is reported as unset.
	for _, c := range []struct{ option, place, instead string }{
		{"a.Config.ByLiteral", "{ByLiteral: 1}", "{}"},
		{"a.Config.Assigned", "c.Assigned = 2", ""},
		{"a.Config.Entry", `c.Entry["x"] = 3`, ""},
		{"a.Config.ByFlag", "&c.ByFlag", "nil"},
		{"a.Config.Ranged", "p.Ranged = ", ""},
		{"a.Options.First", "a.Options{1, 2}", "a.Options{}"},
		{"a.InnerConfig.Carried", "{Carried: 1}", "{}"},
		{"a.Config.ByValue", "(p.ByValue) = c.Unset", ""},
		{"a.Config.ByEnv", "ReadEnv", "Read"},
	} {
		t.Run(c.option, func(t *testing.T) {
			without := maps.Clone(files)
			without["a/a.go"] = strings.Replace(declared, c.place, c.instead, 1)
			without["b.go"] = strings.Replace(setter, c.place, c.instead, 1)
			enter(t, without)
			counted, err := read()
			require.NoError(t, err)
			assert.Subset(t, counted.unset, append(want, c.option))
		})
	}
}
