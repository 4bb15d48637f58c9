package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// kinds of text.
const (
	inDocument = "document"
	inComment  = "comment"
	inText     = "text" // of a program: errors, logs, help
)

// row is an old word and its replacement.
type row struct {
	pattern string
	instead string
	kinds   []string // nil for all
	path    string   // prefix of the files that it applies to; "" for all
	bound   int      // how many there may be: the findings in tests and kernels' packages when the row was added; to be lowered
}

// slack is how far findings may exceed a row's bound, so that two changes that each keep it do not exceed it
// together.
const slack = 6

// rows are the mechanical part of the glossary (CONTRIBUTING.md, Words). They include former names: a comment that
// uses one describes something that does not exist.
var rows = []row{
	{pattern: `gives? up|gave up|giv(en|ing) up`, instead: "aborts, stops waiting"},
	{pattern: `(communicator|world)s? (that )?(is|are|was|were|may|to) (be )?broken|broken (communicator|world)s?|` +
		`breaks? (a|the|this|one)( good)? (communicator|world|part)`, instead: "aborted, aborts"},
	{pattern: `split off`, instead: "sub-communicator"},
	{pattern: `under way|outstanding|nothing is (ever )?pending|pending (call|operation|request|work)s?`,
		instead: "in flight"},
	{pattern: `settle[sd]?|settling|quiesce[sd]?`, instead: "drain", bound: 1},
	{pattern: `(late|silent|deaf|absent) ranks?`, instead: "straggler, missing rank"},
	{pattern: `picks|picked|picking`, instead: "selects, chooses", bound: 1},
	{pattern: `taken out of|(gives?|gave|giv(en|ing)) back`, instead: "subtracted, restored, returned, freed", bound: 1},
	{pattern: `regions?`, instead: "partition", path: "distributed/"},
	{pattern: `what ([a-z]+ ){1,3}not sent`, instead: "residual"},
	{pattern: `overflow(s|ed)?`, instead: "non-finite gradient", kinds: []string{inComment, inDocument}, path: "distributed/"},
	{pattern: `(looks|looked) for overflows`, instead: "detects non-finite gradients"},
	{pattern: `undone|undoes|undo them`, instead: "rolled back"},
	{pattern: `(step|update|ranks?|gradient)s? (that )?(is |are |was |were )?dropped|dropped steps?`, instead: "skipped"},
	{pattern: `joint(ly)?`, instead: "transactional", bound: 1},
	{pattern: `(travel|go|run|exchanged?|sent) behind`, instead: "asynchronously"},
	{pattern: `branched stream|stream branch(es)?`, instead: "side stream"},
	{pattern: `(with|without|of) levels`, instead: "hierarchical"},
	{pattern: `lobby|farewells?|takes note`, instead: "mode handshake, goodbye, records"},
	{pattern: `boards?|stamp(s|ed)?`, instead: "shared-memory segment, sequence flag"},
	{pattern: `doors?`, instead: "backend adapter"},
	{pattern: `Ender|Reacher|Brancher|Noticer`, instead: "Aborter, MemoryChecker, StreamForker, AsyncCopier"},
	{pattern: `(call|chain) history|history of (the )?calls`, instead: "call log"},

	{pattern: `(?-i:What|Whatever|Whoever|Whose|Who|Those|That of) [^.?]*[.,:;?]?`, instead: "a noun first",
		kinds: []string{inComment, inDocument}},
	{pattern: `so (many|long|much)`, instead: "the number", kinds: []string{inComment, inDocument, inText}},
	{pattern: `foretells?|foretold`, instead: "predicts"},
	{pattern: `images read`, instead: "test accuracy"},
	{pattern: `to be had`, instead: "available"},
	{pattern: `as ever`},
	{pattern: `for ever`, instead: "forever"},
	{pattern: `that of`, instead: "the noun itself", bound: 4},
	{pattern: `of its own|of their own`, instead: "its own", bound: 3},
	{pattern: `in the place of`, instead: "instead of"},
	{pattern: `others than`, instead: "other … than"},
	{pattern: `is no call`, instead: "does not move data"},
	{pattern: `cancelled|cancelling`, instead: "canceled"},
	{pattern: `of here`, instead: "from here"},
}

// exceptions are phrases in which an old word is right.
var exceptions = []struct{ phrase, reason string }{
	{"GPU of its own", "one GPU for each rank"},
	{"world of its own", "each rank alone in one"},
	{"error of its own", "beside the errors of waits"},
	{"connections of its own", "beside those of the program's network"},
	{"communicators of their own", "a model is trained on this text as well"},
	{"checksum is that of the parameters", "a model is trained on this text, and its README has the sums"},
	{"`Overflow`", "a name that the changelog says is gone"},
	{"so long as", "a condition"},
	{"So long as", "a condition"},
}

// compiled are the patterns of rows as whole words.
var compiled = func() (all []*regexp.Regexp) {
	for _, r := range rows {
		start := `\b`
		if strings.HasPrefix(r.pattern, `(?-i:`) {
			start = `(?:^|[.] )` // at the start of a sentence
		}
		all = append(all, regexp.MustCompile(`(?i)`+start+`(`+r.pattern+`)(?:\b|$)`))
	}
	return all
}()

var withoutExceptions = func() *strings.Replacer {
	var pairs []string
	for _, e := range exceptions {
		pairs = append(pairs, e.phrase, "")
	}
	return strings.NewReplacer(pairs...)
}()

// words looks for old words in a text of a file.
func (c *check) words(path string, line int, kind, text string) {
	text = withoutExceptions.Replace(text)
	for i, r := range rows {
		if r.kinds != nil && !slices.Contains(r.kinds, kind) || !strings.HasPrefix(path, r.path) {
			continue
		}
		for _, match := range compiled[i].FindAllStringSubmatch(text, -1) {
			if strings.HasSuffix(match[1], "?") {
				continue // a question begins with such a word
			}
			const format = "%s:%d: %q: %s"
			c.old[i] = append(c.old[i], fmt.Sprintf(format, path, line, match[1], r.instead))
		}
	}
}

// judgeWords reports rows with more findings than their bound.
func (c *check) judgeWords(list bool) {
	for i, r := range rows {
		found := len(c.old[i])
		if list || found > r.bound+slack {
			for _, place := range c.old[i] {
				fmt.Println(place)
			}
		}
		if found > r.bound+slack {
			c.report(".", 0, "%d old words, bound %d: %s (CONTRIBUTING.md, Words)", found, r.bound, r.pattern)
		}
	}
}
