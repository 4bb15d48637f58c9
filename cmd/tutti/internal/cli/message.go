package cli

import (
	"errors"
	"regexp"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/comm"
)

// message is the text of an error that many ranks may share. It says what went wrong. It omits ranks that only report
// another rank's failure, and lists texts that differ only in the rank once. The end says how many ranks were
// omitted.
func message(err error) string {
	// An unsupported option is no failure of ranks, and all ranks report the same.
	if refused := new(backend.OptionError); errors.As(err, &refused) {
		return refused.Error()
	}
	all := leaves(err)
	isEcho := func(err error) bool {
		return errors.Is(err, comm.ErrPeerFailed)
	}
	echoes := 0
	if slices.ContainsFunc(all, func(err error) bool { return !isEcho(err) }) {
		before := len(all)
		all = slices.DeleteFunc(all, isEcho)
		echoes = before - len(all)
	}
	var lines []string
	seen := map[string]bool{} // texts without rank numbers
	for _, leaf := range all {
		line := leaf.Error()
		pattern := rankNumber.ReplaceAllString(line, "rank")
		switch {
		case !seen[pattern]:
			seen[pattern] = true
			lines = append(lines, line)
		case !slices.Contains(lines, line):
			echoes++
		}
	}
	if echoes > 0 {
		lines = append(lines, "and "+backend.Counted(echoes, "more rank"))
	}
	return strings.Join(lines, "\n")
}

// rankNumber matches the numbers of ranks in a message.
var rankNumber = regexp.MustCompile(`\branks? \d+(,? (and )?\d+)*`)

// leaves splits an error made by [errors.Join]. Other errors with several causes have their own text and stay whole.
func leaves(err error) []error {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	var parts []error
	var texts []string
	for _, e := range joined.Unwrap() {
		parts = append(parts, leaves(e)...)
		texts = append(texts, e.Error())
	}
	if strings.Join(texts, "\n") != err.Error() {
		return []error{err}
	}
	return parts
}
