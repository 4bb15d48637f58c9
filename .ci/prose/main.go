// Command prose checks the words of documents, doc comments, errors and help, and fails if it finds a problem:
//
//	go run ./.ci/prose [-list]
//
// Documents, comments and texts of programs must not contain old words from the table in words.go. Documents must not
// have sentences that are too long, or links to missing pages and sections. The flags of commands in documents must
// exist. The changelog must not have the same entry twice.
package main

import (
	"flag"
	"fmt"
	"go/scanner"
	"go/token"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

const maxWords = 45 // of a sentence in a document

func main() {
	log.SetFlags(0)
	list := flag.Bool("list", false, "print old words within the bound as well")
	flag.Parse()
	c := &check{flags: knownFlags(), anchors: map[string]map[string]bool{}, old: map[int][]string{}}
	for _, pattern := range []string{"*.md", "docs/*.md", "lab/results/*.md", "adapters/*/*.md"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			log.Fatal(err)
		}
		c.documents = append(c.documents, paths...)
	}
	for _, path := range c.documents {
		c.document(path)
	}
	c.repeated("CHANGELOG.md")
	if err := filepath.WalkDir(".", c.source); err != nil {
		log.Fatal(err)
	}
	c.judgeWords(*list)
	if c.found > 0 {
		log.Fatalf("%d findings", c.found)
	}
}

// check goes through the tree.
type check struct {
	documents []string
	flags     map[string]bool
	anchors   map[string]map[string]bool // sections of each document
	old       map[int][]string           // old words, by row
	found     int
}

func (c *check) report(path string, line int, format string, args ...any) {
	c.found++
	fmt.Printf("%s:%d: %s\n", path, line, fmt.Sprintf(format, args...))
}

// knownFlags returns the flags in the reference, which is generated from the command's help.
func knownFlags() map[string]bool {
	text, err := os.ReadFile("docs/environment.md")
	if err != nil {
		log.Fatal(err)
	}
	flags := map[string]bool{"--help": true, "--version": true}
	for _, match := range regexp.MustCompile("(?m)^- `(--[a-z0-9-]+)`").FindAllStringSubmatch(string(text), -1) {
		flags[match[1]] = true
	}
	return flags
}

var (
	link     = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	inline   = regexp.MustCompile("`[^`]*`")
	flagWord = regexp.MustCompile(`--[a-z][a-z0-9-]*`)
	ends     = regexp.MustCompile(`[.:;?!]["”)*]*(\s|$)`)
)

// repeated reports entries that stand in the changelog twice, for example after a merge that kept both sides.
func (c *check) repeated(path string) {
	text, err := os.ReadFile(path)
	if err != nil {
		log.Fatal(err)
	}
	first := map[string]int{} // line of each entry
	for number, line := range strings.Split(string(text), "\n") {
		if !strings.HasPrefix(line, "- ") {
			continue
		}
		if first[line] > 0 {
			c.report(path, number+1, "an entry that stands in line %d as well", first[line])
			continue
		}
		first[line] = number + 1
	}
}

// document checks one document. The changelog and adapters' pages may have long sentences.
func (c *check) document(path string) {
	text, err := os.ReadFile(path)
	if err != nil {
		log.Fatal(err)
	}
	var paragraph strings.Builder
	code := false
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
			continue
		}
		if code {
			c.command(path, number, line)
			continue
		}
		for _, match := range link.FindAllStringSubmatch(inline.ReplaceAllString(line, ""), -1) {
			c.link(path, number, match[1])
		}
		c.words(path, number, inDocument, inline.ReplaceAllString(strings.TrimSpace(line), "code"))
		if path == "CHANGELOG.md" || strings.HasPrefix(path, "adapters/") {
			continue
		}
		if starts(line) {
			c.sentences(path, number, paragraph.String())
			paragraph.Reset()
		}
		if !strings.HasPrefix(line, "|") && !strings.HasPrefix(line, "#") {
			paragraph.WriteString(line)
		}
	}
	c.sentences(path, number, paragraph.String())
}

// starts reports whether a line begins a paragraph, an item or a table.
func starts(line string) bool {
	text := strings.TrimSpace(line)
	if text == "" {
		return true
	}
	item := regexp.MustCompile(`^([-*|#>]|\d+\.) ?`)
	return item.MatchString(text) && !strings.HasPrefix(text, "**")
}

// sentences reports the sentences of a paragraph that are too long.
func (c *check) sentences(path string, line int, text string) {
	for _, sentence := range ends.Split(inline.ReplaceAllString(text, "code"), -1) {
		if n := len(strings.Fields(sentence)); n > maxWords {
			c.report(path, line, "a sentence has %d words, at most %d: %.60q…", n, maxWords, strings.TrimSpace(sentence))
		}
	}
}

// command reports flags that tutti does not have. A command that tutti starts has its own flags.
func (c *check) command(path string, line int, text string) {
	text, _, _ = strings.Cut(text, " #")
	start := regexp.MustCompile(`(^|[\s$])tutti (train|bench|launch|cluster|info|diagnose|delta)\b`).FindStringIndex(text)
	if start == nil {
		return
	}
	text = text[start[0]:]
	if program := strings.Index(text, "./"); program >= 0 {
		text = text[:program]
	}
	for _, name := range flagWord.FindAllString(text, -1) {
		if !c.flags[name] {
			c.report(path, line, "tutti has no flag %s (docs/environment.md)", name)
		}
	}
}

// link reports a link to a missing target.
func (c *check) link(path string, line int, target string) {
	if strings.Contains(target, "://") {
		return
	}
	file, section, _ := strings.Cut(target, "#")
	to := path
	if file != "" {
		to = filepath.Join(filepath.Dir(path), file)
	}
	if _, err := os.Stat(to); err != nil {
		c.report(path, line, "a link to %s, which does not exist", target)
		return
	}
	if section != "" && filepath.Ext(to) == ".md" && !c.sections(to)[section] {
		c.report(path, line, "a link to %s, which has no such section", target)
	}
}

// sections returns the anchors of a document, as GitHub makes them.
func (c *check) sections(path string) map[string]bool {
	if c.anchors[path] != nil {
		return c.anchors[path]
	}
	text, err := os.ReadFile(path)
	if err != nil {
		log.Fatal(err)
	}
	all := map[string]bool{}
	dropped := regexp.MustCompile(`[^\p{L}\p{N}_\- ]`)
	for _, match := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		title := link.ReplaceAllString(match[1], "]")
		all[strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(title), ""), " ", "-")] = true
	}
	c.anchors[path] = all
	return all
}

// source checks the comments and texts of Go files, and the comments of kernels.
func (c *check) source(path string, entry fs.DirEntry, err error) error {
	if err != nil {
		return err
	}
	if entry.IsDir() && (entry.Name() == "testdata" || path == ".git" || path == ".ci/prose") {
		return fs.SkipDir
	}
	if entry.IsDir() {
		return nil
	}
	switch filepath.Ext(path) {
	case ".go":
		return c.goFile(path)
	case ".cu", ".cuh":
		return c.kernels(path)
	}
	return nil
}

// goFile checks comments, each as a whole, and texts. Tests may have texts with old words, such as file names.
func (c *check) goFile(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	files := token.NewFileSet()
	file := files.AddFile(path, -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments)
	start := 0    // first line of the current comment, whose lines begin with two slashes
	comment := "" // its text; "" if there is none
	last := 0     // its last line
	for {
		place, kind, literal := s.Scan()
		if kind == token.SEMICOLON && literal == "\n" {
			continue // precedes a comment at the end of a line
		}
		line := files.Position(place).Line
		text, goesOn := strings.CutPrefix(literal, "//")
		if kind == token.COMMENT && goesOn && comment != "" && line == last+1 {
			comment += " " + strings.TrimSpace(text)
			last = line
			continue
		}
		c.words(path, start, inComment, comment)
		comment = ""
		switch {
		case kind == token.EOF:
			return nil
		case kind == token.COMMENT:
			start = line
			comment = strings.Join(strings.Fields(text), " ")
			last = line
		case kind == token.STRING && !strings.HasSuffix(path, "_test.go"):
			c.words(path, line, inText, literal)
		}
	}
}

// kernels checks the comments of a file in CUDA C.
func (c *check) kernels(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	number := 0
	for line := range strings.Lines(string(text)) {
		number++
		if _, comment, found := strings.Cut(line, "//"); found {
			c.words(path, number, inComment, strings.TrimSpace(comment))
		}
	}
	return nil
}
