// Command commands checks each command in a block of README and the guides. CI must run it as it stands, or it must
// say what it needs:
//
//	go run ./.ci/commands          # fails for one that does neither
//	go run ./.ci/commands -run DIR # runs those that need nothing but this machine, in new folders of DIR
//
// A command says what it needs by its own words, such as srun or --join, or in the comment after it: "needs 16
// processors", "needs root", "takes a minute". The table evidence lists commands that other steps run, with the text
// that shows it.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

func main() {
	log.SetFlags(0)
	list := flag.Bool("list", false, "print all commands with what they need")
	root := flag.String("root", ".", "the checkout")
	folder := flag.String("run", "", "run commands in new folders of this one")
	flag.Parse()
	commands, err := readAll(*root)
	if err != nil {
		log.Fatal(err)
	}
	problems := judge(commands, *root)
	if *list {
		for _, c := range commands {
			fmt.Printf("%s:%d\t%s\t%s\n", c.page, c.line, c.verdict, c.text)
		}
	}
	if len(problems) > 0 {
		log.Fatal(strings.Join(problems, "\n"))
	}
	fmt.Println(count(commands))
	if *folder == "" {
		return
	}
	if err := runAll(commands, *root, *folder); err != nil {
		log.Fatal(err)
	}
}

// command is a command of a document.
type command struct {
	page    string
	line    int
	block   int    // first line of its block
	text    string // on one line
	note    string // the comment after it, or before it on a line of its block
	shown   string // output shown in the block; "" if none
	verdict string // "here", "by …" or "needs …" once it is judged
}

// readAll returns the commands of all documents.
func readAll(root string) (all []command, err error) {
	paths, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil {
		return nil, err
	}
	paths = append([]string{filepath.Join(root, "README.md"), filepath.Join(root, "CONTRIBUTING.md")}, paths...)
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		page, err := filepath.Rel(root, path)
		if err != nil {
			return nil, err
		}
		all = append(all, read(filepath.ToSlash(page), string(text))...)
	}
	return all, nil
}

var (
	fence   = regexp.MustCompile("^ *```([a-z]*)")
	comment = regexp.MustCompile(`(^|\s)# (.*)$`)
)

// read returns the commands of a document: lines of blocks of sh, and lines after "$ " in blocks of console or of no
// language, whose other lines are output.
func read(page, text string) (all []command) {
	language := "" // of the block; "-" for none
	note := ""
	var unfinished *command // its line ends in a backslash
	number := 0
	block := 0
	for line := range strings.Lines(text) {
		number++
		line = strings.TrimRight(line, "\n")
		if match := fence.FindStringSubmatch(line); match != nil {
			note = ""
			block = number
			switch {
			case language != "":
				language = ""
			case match[1] == "":
				language = "-"
			default:
				language = match[1]
			}
			continue
		}
		if language != "sh" && language != "console" && language != "-" {
			continue
		}
		line = strings.TrimSpace(line)
		if language != "sh" && unfinished == nil {
			prompted, isCommand := strings.CutPrefix(line, "$ ")
			if !isCommand {
				if n := len(all); n > 0 && all[n-1].page == page {
					all[n-1].shown += line + "\n"
				}
				continue
			}
			line = prompted
		}
		c := command{page: page, line: number, block: block, note: note}
		if unfinished != nil {
			c = *unfinished
			unfinished = nil
		}
		if match := comment.FindStringSubmatchIndex(line); match != nil {
			c.note += line[match[4]:match[5]]
			line = strings.TrimSpace(line[:match[0]])
		}
		if line == "" {
			note = c.note // it applies to the rest of the block
			continue
		}
		part, goesOn := strings.CutSuffix(line, "\\")
		c.text += part
		if goesOn {
			unfinished = &c
			continue
		}
		all = append(all, c)
	}
	return all
}

// own maps words of commands to their needs.
var own = []struct{ pattern, need string }{
	{`\b(srun|sbatch|scontrol)\b`, "Slurm"},
	{`\bkubectl\b`, "Kubernetes"},
	{`\btorchrun\b`, "PyTorch"},
	{`--backend nccl|BACKEND=nccl`, "GPUs"},
	{`--machines|--join|--hosts? "?[a-z$]`, "several machines"},
	{`\btutti-store\b`, "several machines"},
	{`\.ci/gpu\b`, "GPUs"},
}

// need matches the needs in a command's comment.
var need = regexp.MustCompile(`\b(?:needs|takes) (` +
	`(?:\d+ processors|a GPU|(?:\d+ |two |four )?GPUs|MPI|root|a minute|minutes)\b)`)

// inClone matches commands that only work in a checkout.
var inClone = regexp.MustCompile(`^(\w+=\S+ )*(\.ci/|lab/|go \w+ (-C|\./))`)

// evidence lists commands that other steps and tests run as they stand or, if a reason is given, in another form. A
// text in a file shows it.
var evidence = []struct{ pattern, file, shows, reason string }{
	{`^go (run|build) \./(examples/[\w-]+|delta/example)$`, ".ci/run", `./examples/... ./delta/example`, ""},
	{`^go test \./examples/gradients$`, ".ci/run", `go test -p "$at_once" -count=1 -vet all`, ""},
	{`^go (run|build) \./\.ci/bits$`, ".ci/run", `go build "$bare" -o "$scratch/bits" ./.ci/bits`, ""},
	{`^tutti launch -n 3 \./bits$`, ".ci/run", `same_bits "$tutti" launch -n 3 "$scratch/bits"`, ""},
	{`^(TUTTI_EXTENDED=1 )?\.ci/run any_ranks$`, ".ci/run", `step 15 "same bits for any number of ranks" any_ranks`, ""},
	{`^tutti launch .*(--machines|--join) .*train --backend tcp$`, "cmd/tutti/launch_test.go",
		`func TestTwoMachinesByTheDocuments`, ""},
	{`^go get github.com/tutti-go/tutti/delta@latest$`, ".ci/run", `publish_module "github.com/tutti-go/tutti/$module"`,
		"with go mod tidy"},
	{`^tutti launch -n 4 --min 2 .* --json &$`, ".ci/run", `--min 1 --restarts 3 "$tutti" "${train[@]}" --elastic`,
		"it would kill other jobs"},
	{`^sleep 2; kill -9 \$\(pgrep`, "cmd/tutti/misfortune_linux_test.go", `kill -9 $(`, "it would kill other jobs"},
	{`^tutti launch -n 4 \./gradients -steps 100000$`, "cmd/tutti/misfortune_linux_test.go",
		`one: remote + ` + "`signal: killed",
		"a reader kills a rank"},
	{`^echo \$\?$`, "cmd/tutti/misfortune_linux_test.go", `code: 137`, "a reader kills a rank"},
	{`^TUTTI_RECORD=1000 tutti launch -n 4 \./gradients &$`, "cmd/tutti/misfortune_linux_test.go", `tutti-record-0.json`,
		"a reader changes the program"},
	{`^sleep 5; kill -USR1 \$!; sleep 1$`, "cmd/tutti/misfortune_linux_test.go", `kill -USR1 $first`,
		"a reader changes the program"},
	{`^tutti diagnose \.$`, "cmd/tutti/misfortune_linux_test.go", `"$TUTTI" diagnose .`, "a reader changes the program"},
}

// judge decides where each command runs or what it needs, and returns the problems.
func judge(commands []command, root string) (problems []string) {
	used := map[int]bool{}
	for i := range commands {
		c := &commands[i]
		c.verdict = "here"
		if match := need.FindStringSubmatch(c.note); match != nil {
			c.verdict = "needs " + match[1]
		}
		for _, w := range own {
			if regexp.MustCompile(w.pattern).MatchString(c.text) {
				c.verdict = "needs " + w.need
			}
		}
		for k, e := range evidence {
			if !regexp.MustCompile(e.pattern).MatchString(c.text) {
				continue
			}
			used[k] = true
			c.verdict = "by " + e.file
			if e.reason != "" {
				c.verdict += " in another form: " + e.reason
			}
		}
		if c.verdict == "here" && inClone.MatchString(c.text) {
			const format = "%s:%d: %s: say what it needs, or in .ci/commands which step runs it in the checkout"
			problems = append(problems, fmt.Sprintf(format, c.page, c.line, c.text))
		}
	}
	for k, e := range evidence {
		text, err := os.ReadFile(filepath.Join(root, e.file))
		switch {
		case err != nil:
			problems = append(problems, err.Error())
		case !strings.Contains(string(text), e.shows):
			problem := fmt.Sprintf("%s no longer has %q, which shows that %s is run", e.file, e.shows, e.pattern)
			problems = append(problems, problem)
		case !used[k]:
			problems = append(problems, fmt.Sprintf("no document has a command like %s", e.pattern))
		}
	}
	return problems
}

// count says how many commands run, and how.
func count(commands []command) string {
	var here, by, changed, needs int
	for _, c := range commands {
		switch {
		case c.verdict == "here":
			here++
		case strings.Contains(c.verdict, "in another form"):
			changed++
		case strings.HasPrefix(c.verdict, "by "):
			by++
		default:
			needs++
		}
	}
	const format = "%d commands in documents: %d run here, %d by other steps, %d in another form; %d say what they need"
	return fmt.Sprintf(format, len(commands), here, by, changed, needs)
}

// pages returns the documents of commands in order.
func pages(commands []command) (names []string) {
	for _, c := range commands {
		if !slices.Contains(names, c.page) {
			names = append(names, c.page)
		}
	}
	return names
}
