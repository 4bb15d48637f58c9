package launch

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/tcp"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/printable"
)

// Slots is a host and its number of ranks.
type Slots struct {
	Host  string // the name by which ssh and the other hosts know it
	Ranks int    // 1 and up
}

// ParseSlots reads hosts in mpirun's notation: names separated by commas, each with an optional colon and number of
// ranks. The default is one rank. A repeated name adds ranks. IPv6 addresses are in brackets.
func ParseSlots(text string) (all []Slots, err error) {
	for word := range strings.SplitSeq(text, ",") {
		slots := Slots{Host: strings.TrimSpace(word), Ranks: 1}
		if i := strings.LastIndexByte(slots.Host, ':'); i > strings.LastIndexByte(slots.Host, ']') {
			if slots.Ranks, err = strconv.Atoi(slots.Host[i+1:]); err != nil || slots.Ranks < 1 || slots.Ranks > MaxRanks {
				return nil, fmt.Errorf("%q: want a name and a number of ranks from 1 to %d, such as a:4", word, MaxRanks)
			}
			slots.Host = slots.Host[:i]
		}
		unwanted := " \t'\":"
		if strings.HasPrefix(slots.Host, "[") && strings.HasSuffix(slots.Host, "]") {
			slots.Host = slots.Host[1 : len(slots.Host)-1]
			unwanted = " \t'\""
		}
		// ssh would read a name that begins with a dash as an option.
		if slots.Host == "" || slots.Host[0] == '-' || strings.ContainsAny(slots.Host, unwanted) ||
			printable.Text(slots.Host) != slots.Host {
			return nil, fmt.Errorf("%q is no name of a host", word)
		}
		isEqual := func(s Slots) bool { return s.Host == slots.Host }
		if i := slices.IndexFunc(all, isEqual); i >= 0 {
			all[i].Ranks += slots.Ranks
			if all[i].Ranks > MaxRanks {
				return nil, fmt.Errorf("%q has %d ranks: at most %d", slots.Host, all[i].Ranks, MaxRanks)
			}
			continue
		}
		all = append(all, slots)
	}
	return all, nil
}

// stage is the progress of a host's launcher.
type stage int

const (
	stageConnecting stage = iota // ssh is connecting
	stageStarted                 // it looks for the job's store, or is about to keep it
	stageJoined                  // it keeps the store or has joined it
	stageGone                    // it has ended, or its connection has
)

// remote is the launcher of a host.
type remote struct {
	Slots
	through  int                 // ranks of the hosts up to this one
	local    bool                // the host is this machine, so it needs no ssh
	cmd      *exec.Cmd           // ssh, or the launcher itself where local is set
	control  io.WriteCloser      // its standard input: the assignment, then signals
	gone     chan struct{}       // closed when it has ended and its output is read
	reported chan struct{}       // closed when it has reported its end
	signals  chan syscall.Signal // signals to send
	stage    stage               // used only by follow
	excused  bool                // the job does not need it to join; used only by follow
	end      *End                // what it reported; nil before; used only by follow
	state    *os.ProcessState    // state at its end; nil before; used only by follow
	address  string              // of the host, "" before it has joined; used only by follow
	quiet    int                 // consecutive looks that found nothing from it; used only by follow
	silence  time.Duration       // the silence for which it counted as lost; 0 if it does not; used only by follow

	beating    atomic.Bool  // it has sent a sign of life, so more must follow
	heard      atomic.Bool  // something has come since the last look
	delivering atomic.Int32 // its lines that wait for room in the output; nothing is read meanwhile

	mu   sync.Mutex // before outlet.mu
	held []string   // lines of its standard error from before it joined; guarded by mu
}

// word is a host launcher's report, or its end.
type word struct {
	from  *remote          // the launcher that sent it
	kind  string           // "" if it has ended
	value string           // of the report
	err   error            // of its end
	state *os.ProcessState // of its end
}

// spread is a job on several hosts, whose launchers this launcher has started.
type spread struct {
	Config
	secret  string         // of the job
	self    string         // this program's file
	folder  string         // in which it was started; "", which is no directory on hosts either, if that is gone
	out     *outlet        // of the ranks' output
	err     *outlet        // of the ranks' errors and the launchers' messages
	notes   io.Writer      // this launcher's messages
	hosts   []*remote      // in the order of their ranks
	started int            // hosts whose launchers were started: the first ones in hosts
	words   chan word      // reports and ends of the hosts' launchers
	closed  chan struct{}  // closed when words has no receiver any more
	address string         // of the store, set before known is closed
	known   chan struct{}  // closed when address is set
	silence time.Duration  // a launcher that sends nothing for this time is lost
	ordered syscall.Signal // signal that ended the job; 0 for none; used only by follow
	overdue bool           // stopTime has passed and some launchers have not ended; set by follow, read after it
}

// Spread runs a job on the hosts of cfg.Slots. It starts a launcher on each host and ends it again, by ssh unless the
// host is this machine. The first host has the job's store, and the others join it, so no host needs to reach this
// machine. Hosts have this program at the same place or in PATH. It returns as [Run] does.
func Spread(ctx context.Context, cfg Config) (err error) {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	var settings tcp.Config
	if err := settings.ReadEnv(os.Getenv, 0); err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	cfg.Grace = cmp.Or(cfg.Grace, DefaultGrace)
	folder, _ := os.Getwd() // now, as a host that is this machine may remove it
	s := &spread{
		Config:  cfg,
		folder:  folder,
		silence: cmp.Or(settings.Silence, tcp.DefaultSilence),
		self:    self,
		out:     newOutlet(cfg.Out),
		err:     newOutlet(cfg.Err),
		words:   make(chan word),
		closed:  make(chan struct{}),
		known:   make(chan struct{}),
	}
	s.notes = note{s.err}
	defer func() { err = flush(s.out, s.err, err) }()
	if s.secret, err = sharedSecret(cfg.SecretFile); err != nil {
		return fmt.Errorf("launch: %w", err)
	}
	for _, slots := range cfg.Slots {
		h := &remote{Slots: slots, gone: make(chan struct{}), reported: make(chan struct{})}
		h.signals = make(chan syscall.Signal, 8)
		h.through = slots.Ranks
		if len(s.hosts) > 0 {
			h.through += s.hosts[len(s.hosts)-1].through
		}
		s.hosts = append(s.hosts, h)
	}
	s.findLocal(ctx)
	stopped := make(chan struct{})
	defer close(stopped)
	defer s.close()
	for _, h := range s.hosts {
		if err := s.start(h); err != nil {
			return fmt.Errorf("launch: %s: %w", h.Host, err)
		}
		s.started++
	}
	defer s.relay()()
	if end := s.follow(ctx); end.Text != "" {
		go announce(s.notes, end.Text+"; the other ranks", s.Grace, stopped)
		return &end
	}
	return nil
}

// sharedSecret returns the secret to hand over: the user's, or a random one.
func sharedSecret(path string) (string, error) {
	if path == "" {
		if text := os.Getenv(env.Secret); text != "" {
			return text, nil
		}
		path = os.Getenv(env.SecretFile)
	}
	if path == "" {
		return rand.Text() + rand.Text(), nil
	}
	return rendezvous.ReadSecret(path, true)
}

// findLocal determines which hosts are this machine.
func (s *spread) findLocal(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, resolveTime)
	defer cancel()
	var all sync.WaitGroup
	for _, h := range s.hosts {
		all.Go(func() { h.local = isLocal(bounded, h.Host) })
	}
	all.Wait()
}

// isLocal reports whether all addresses of a host belong to this machine.
func isLocal(ctx context.Context, host string) bool {
	if name, _ := os.Hostname(); host == "localhost" || strings.EqualFold(host, name) {
		return true
	}
	addresses, err := net.DefaultResolver.LookupIPAddr(ctx, host) // an error for names that only ssh knows
	ours, _ := net.InterfaceAddrs()
	foreign := func(a net.IPAddr) bool {
		isEqual := func(o net.Addr) bool {
			n, ok := o.(*net.IPNet)
			return ok && n.IP.Equal(a.IP)
		}
		return !a.IP.IsLoopback() && !slices.ContainsFunc(ours, isEqual)
	}
	return err == nil && !slices.ContainsFunc(addresses, foreign)
}

// start starts the launcher of a host.
func (s *spread) start(h *remote) error {
	h.cmd = exec.Command(s.self, Inside)
	if !h.local {
		ssh, err := exec.LookPath("ssh")
		if err != nil {
			return fmt.Errorf("%w: other hosts are reached by ssh", err)
		}
		// Nobody can answer the questions of several ssh processes at once. Without a timeout, this machine may wait
		// long for a host that is down.
		h.cmd = exec.Command(ssh, "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=4", h.Host, s.script())
	}
	h.cmd.SysProcAttr = separate() // a terminal's signals reach it through this launcher alone
	h.cmd.Env = slices.DeleteFunc(os.Environ(), func(setting string) bool {
		return strings.HasPrefix(setting, env.Secret+"=") // the secret goes through standard input; ssh may send variables
	})
	var err error
	if h.control, err = h.cmd.StdinPipe(); err != nil {
		return err
	}
	outRead, outWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	defer outWrite.Close() //nolint:errcheck // the launcher has it
	errRead, errWrite, err := os.Pipe()
	if err != nil {
		return err
	}
	defer errWrite.Close() //nolint:errcheck // the launcher has it
	h.cmd.Stdout = outWrite
	h.cmd.Stderr = errWrite
	if err := h.cmd.Start(); err != nil {
		return err
	}
	var copied sync.WaitGroup
	prefix := h.Host + ": "
	if s.NoPrefix {
		prefix = ""
	}
	copied.Go(func() { copyOutput(&lines{out: &output{to: s.out, from: h, prefix: prefix}}, outRead) })
	copied.Go(func() { copyOutput(&lines{out: &reader{spread: s, from: h, prefix: prefix}}, errRead) })
	go s.await(h, &copied)
	go s.direct(h)
	return nil
}

// script returns the command for ssh. It runs this program from the same place, or else from PATH. Any user's shell can
// read it.
func (s *spread) script() string {
	const find = `for tutti in "$0" tutti; do ` +
		`if command -v "$tutti" >/dev/null; then exec "$tutti" ` + Inside + `; fi; done; exit 127`
	return "exec sh -c " + quoted(find) + " " + quoted(s.self)
}

// await waits for the end of a host's launcher. An ssh with a shared connection may leave a process that holds the
// output for longer.
func (s *spread) await(h *remote, copied *sync.WaitGroup) {
	err := h.cmd.Wait()
	read := make(chan struct{})
	go func() {
		copied.Wait()
		close(read)
	}()
	select {
	case <-read:
	case <-time.After(linger):
		if s.Min == 0 || h == s.hosts[0] {
			s.unblock(h, read)
		}
	}
	s.tell(word{from: h, err: err, state: h.cmd.ProcessState})
	close(h.gone)
}

// unblock stops output from waiting for a reader. Otherwise an ended launcher's report could stay unread behind lines
// of its ranks.
func (s *spread) unblock(h *remote, read <-chan struct{}) {
	s.out.keepWaiting(false)
	s.err.keepWaiting(false)
	select {
	case <-read:
	case <-h.reported:
	case <-time.After(stopMargin):
	}
}

// direct sends a host's launcher its assignment, then the signals in their order, and signs of life in between. The
// first host gets its assignment at once. The others get theirs when they can join the first one's store.
func (s *spread) direct(h *remote) {
	a := s.assignment(h)
	if h == s.hosts[0] {
		a.Listen = cmp.Or(s.Listen, s.anyPort())
	} else {
		select {
		case <-s.known:
		case <-h.gone:
			return
		}
		a.Join = []string{s.address}
	}
	text, _ := json.Marshal(a)
	_, _ = h.control.Write(append(text, '\n')) // a launcher that does not read it has ended, or ends later
	beat := time.NewTicker(s.silence / beats)
	defer beat.Stop()
	for {
		select {
		case number := <-h.signals:
			// A launcher that does not read the signal is killed in time.
			_, _ = io.WriteString(h.control, signalNames[number]+"\n")
		case <-beat.C:
			_, _ = io.WriteString(h.control, reportAlive+"\n")
		case <-h.gone:
			return
		}
	}
}

// assignment returns the instructions for a host's launcher.
func (s *spread) assignment(h *remote) assignment {
	index := slices.Index(s.hosts, h)
	return assignment{
		Directory:   []byte(s.folder),
		Environment: inBytes(jobVariables(os.Environ())),
		Program:     inBytes(s.Typed),
		Secret:      s.secret,
		Ranks:       h.Ranks,
		Through:     h.through,
		Total:       s.hosts[len(s.hosts)-1].through,
		Index:       index,
		Machines:    len(s.hosts),
		LocalFirst:  s.localRanks(h, index),
		LocalSize:   s.localRanks(h, len(s.hosts)),
		Job:         s.Job,
		Restarts:    s.Restarts,
		Min:         s.Min,
		Max:         s.Max,
		Wait:        s.Wait,
		Grace:       s.Grace,
		Silence:     s.silence,
		Bind:        s.Bind,
		NoPrefix:    s.NoPrefix,
		Color:       s.Color,
	}
}

// localRanks returns how many ranks the first hosts put on the machine of h. Only hosts that are known to be this
// machine share one.
func (s *spread) localRanks(h *remote, hosts int) (ranks int) {
	for _, earlier := range s.hosts[:hosts] {
		if earlier == h || earlier.local && h.local {
			ranks += earlier.Ranks
		}
	}
	return ranks
}

// anyPort returns the first host's listening address if nobody has set one.
func (s *spread) anyPort() string {
	if slices.ContainsFunc(s.hosts, func(h *remote) bool { return !h.local }) {
		return ":0"
	}
	return net.JoinHostPort(loopback, "0")
}

// inBytes returns strings as bytes.
func inBytes(list []string) (all [][]byte) {
	for _, s := range list {
		all = append(all, []byte(s))
	}
	return all
}

// jobVariables returns this process's variables that a job needs on all hosts: TUTTI_* and NCCL_*, without the secret
// and this machine's addresses.
func jobVariables(environ []string) (all []string) {
	for _, variable := range environ {
		name, value, _ := strings.Cut(variable, "=")
		switch {
		case !strings.HasPrefix(name, "TUTTI_") && !strings.HasPrefix(name, "NCCL_"):
		case name == env.Secret, name == env.SecretFile, name == env.TCPAdvertise:
		case name != env.TCPListen:
			all = append(all, variable)
		case listenPort(value) != "":
			all = append(all, name+"="+listenPort(value))
		}
	}
	return all
}

// tell passes a word to follow.
func (s *spread) tell(w word) {
	select {
	case s.words <- w:
	case <-s.closed:
	}
}

// output writes the lines of a host's standard output that follow the first report. Earlier lines are a shell's
// greeting.
type output struct {
	to     io.Writer // destination of the lines
	from   *remote   // source of the lines
	prefix string    // of each line; "" is none
	open   bool      // lines are written
}

// Write takes a line.
func (o *output) Write(line []byte) (int, error) {
	defer o.from.receive()()
	switch {
	case bytes.HasPrefix(line, []byte(marker)):
		o.open = true
	case !o.open:
		// A shell may have begun the line, such as with a terminal's title.
		o.open = bytes.Contains(line, []byte(marker))
	default:
		_, err := o.to.Write(append([]byte(o.prefix), line...))
		return len(line), err
	}
	return len(line), nil
}

// reader reads the standard error of a host's launcher: reports, and messages of the launcher and its ranks. It holds
// messages from before the launcher joined, because they may tell why it does not.
type reader struct {
	spread *spread // the job
	from   *remote // source of the lines
	prefix string  // of each line that is written; "" is none
	open   bool    // lines are written
	ended  bool    // its end was reported
}

// longestReason bounds the number of held lines.
const longestReason = 100

// Write takes a line.
func (r *reader) Write(line []byte) (int, error) {
	defer r.from.receive()()
	before, text, ok := bytes.Cut(line, []byte(marker))
	kind, value, _ := strings.Cut(strings.TrimSpace(string(text)), " ")
	if r.open && (len(before) > 0 || kind != reportEnded && kind != reportAlive) {
		ok = false // a rank's line: shells begin lines, and launchers start, only before there are ranks
	}
	if ok && kind == reportAlive {
		r.from.beating.Store(true)
		return len(line), nil
	}
	if ok {
		if kind == reportJoined && !r.open {
			r.open = true
			r.from.release(r.spread.err, r.prefix)
		}
		r.spread.tell(word{from: r.from, kind: kind, value: value})
		if kind == reportEnded && !r.ended {
			r.ended = true
			close(r.from.reported)
		}
		return len(line), nil
	}
	if r.open {
		_, err := r.spread.err.Write(append([]byte(r.prefix), line...))
		return len(line), err
	}
	r.from.hold(string(line))
	return len(line), nil
}

// receive notes that something has come from a host. Delivery lasts until done is called.
func (h *remote) receive() (done func()) {
	h.delivering.Add(1)
	return func() {
		h.heard.Store(true)
		h.delivering.Add(-1)
	}
}

// hold keeps a line of a launcher that has not joined.
func (h *remote) hold(line string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.held) < longestReason {
		h.held = append(h.held, line)
	}
}

// release writes the held lines.
func (h *remote) release(to io.Writer, prefix string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, line := range h.held {
		_, _ = io.WriteString(to, prefix+line)
	}
	h.held = nil
}

// follow waits until the launchers of all hosts have ended. It returns the job's end, as the first host's launcher
// reports it.
func (s *spread) follow(ctx context.Context) End {
	interrupted := ctx.Done()
	late := time.After(s.Wait)
	var expired <-chan time.Time // nil until the job is about to end
	wait := reportTime
	overdue := time.After(wait)
	tick := time.NewTicker(s.silence / looks)
	defer tick.Stop()
	for {
		select {
		case w := <-s.words:
			if end := s.hear(w); end != nil {
				return *end
			}
			ending := w.kind == "" && (s.Min == 0 || w.from == s.hosts[0])
			if ending && expired == nil {
				expired = time.After(s.stopTime())
			}
			if !slices.ContainsFunc(s.hosts, func(h *remote) bool { return h.stage < stageGone }) {
				return s.result()
			}
		case <-tick.C:
			if end := s.lose(s.look()); end != nil {
				return *end
			}
		case <-overdue:
			if text := s.missing(wait); text != "" {
				fmt.Fprintf(s.notes, "tutti: %s\n", text)
				wait *= 2
				overdue = time.After(wait)
			}
		case <-late:
			text := s.missing(s.Wait)
			switch {
			case text == "":
			case s.Min == 0 || s.joined() < s.Min:
				return End{Text: text + " (--wait)", Code: 1}
			default:
				fmt.Fprintf(s.notes, "tutti: %s (--wait); the job goes on with the other hosts\n", text)
				s.excuse()
			}
		case <-interrupted:
			interrupted = nil
			s.out.keepWaiting(false)
			s.err.keepWaiting(false)
			expired = time.After(s.stopTime())
			s.ordered = Signal(ctx)
			s.signal(s.excuse(), s.ordered)
		case <-expired:
			s.overdue = true
			return s.unended()
		}
	}
}

// hear handles a word of a host's launcher. It returns the job's end if the job must end at once.
func (s *spread) hear(w word) *End {
	h := w.from
	switch w.kind {
	case reportStarted:
		h.stage = max(h.stage, stageStarted)
		if w.value != s.Version {
			const format = "%s has tutti %s, and this machine tutti %s: all hosts of a job use one build%s"
			return &End{Text: fmt.Sprintf(format, h.Host, printable.Text(w.value), s.Version, s.copying(h)), Code: 1}
		}
	case reportJoined:
		h.stage = max(h.stage, stageJoined)
		store, host, _ := strings.Cut(w.value, " ")
		h.address = printable.Text(host)
		if h == s.hosts[0] && s.address == "" {
			s.address = store
			close(s.known)
		}
	case reportEnded:
		if end, err := readEnd([]byte(w.value)); err == nil {
			h.end = &end
		}
	case "":
		before := h.stage
		h.stage = stageGone
		h.state = w.state
		if h.end == nil && w.err == nil && before >= stageJoined {
			h.end = &End{} // its report may lie behind output that waits for a reader
		}
		switch {
		case before < stageJoined && h.excused:
		case before < stageJoined:
			return &End{Text: h.reason(s, before, w.err), Code: 1}
		case h.end == nil && h == s.hosts[0]:
			result := s.result()
			return &result // the other hosts would look for its store
		case h.end == nil && s.Min > 0:
			fmt.Fprintf(s.notes, "tutti: %s; the job goes on without it\n", h.lost())
		}
	}
	return nil
}

// look counts consecutive looks at which nothing had come from a host. It returns the hosts that are lost by that
// count. It counts looks, not time: while this process was stopped, it did not read.
func (s *spread) look() (lost []*remote) {
	for _, h := range s.hosts {
		heard := h.heard.Swap(false) || h.delivering.Load() > 0
		if heard || !h.beating.Load() || h.stage == stageGone {
			h.quiet = 0
			continue
		}
		h.quiet++
		if h.quiet == looks {
			lost = append(lost, h)
		}
	}
	return lost
}

// lose ends the connections to silent hosts. It returns the job's end if the job needs one of them.
func (s *spread) lose(silent []*remote) *End {
	needed := s.Min == 0
	var texts []string
	for _, h := range silent {
		h.silence = s.silence
		_ = h.cmd.Process.Kill() // ssh, or a launcher of this machine, which may be stopped
		needed = needed || h == s.hosts[0] || h.stage < stageJoined
		texts = append(texts, h.lost())
	}
	if len(silent) == 0 || !needed {
		return nil // in an elastic job, hear reports the lost hosts
	}
	return &End{Text: strings.Join(texts, "; "), Code: 1}
}

// copying returns the command that copies this program to a host.
func (s *spread) copying(h *remote) string {
	host := h.Host
	if strings.Contains(host, ":") { // an IPv6 address
		i := strings.LastIndexByte(host, '@') + 1
		host = host[:i] + "[" + host[i:] + "]"
	}
	return fmt.Sprintf(" (scp %s %s)", quoted(s.self), quoted(host+":"+s.self))
}

// reason tells why a host's launcher does not take part, and what to do.
func (h *remote) reason(s *spread, before stage, err error) string {
	said := h.said()
	code := h.state.ExitCode()
	switch {
	case h.local || before == stageStarted:
		return fmt.Sprintf("%s: %s", h.Host, cmp.Or(said, fmt.Sprint(err)))
	case code == 127 || code == 126:
		return fmt.Sprintf("%s has no tutti that runs, neither %s nor one in the PATH of ssh: copy it%s",
			h.Host, s.self, s.copying(h))
	case code == 255 || code < 0:
		return fmt.Sprintf("%s cannot be reached: %s: `ssh %s true` has to work without a prompt",
			h.Host, cmp.Or(said, fmt.Sprint(err)), h.Host)
	}
	const format = "%s has another tutti, which does not know of --hosts: %s: all hosts of a job use one build%s"
	return fmt.Sprintf(format, h.Host, cmp.Or(said, fmt.Sprint(err)), s.copying(h))
}

// said returns the line in which a host's launcher, or ssh, told why it ended: its first error, or else its last line.
func (h *remote) said() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	last := ""
	for _, line := range h.held {
		if text, ok := strings.CutPrefix(line, "tutti: "); ok && !strings.Contains(line, "the ranks of this host run in") {
			return printable.Text(strings.TrimPrefix(strings.TrimSpace(text), "launch: "))
		}
		last = cmp.Or(strings.TrimSpace(line), last)
	}
	return printable.Text(last)
}

// lost returns the text for a launcher that has ended without a report, or that sends nothing any more.
func (h *remote) lost() string {
	if h.silence > 0 {
		place := h.Host
		if h.address != "" {
			place += " (" + h.address + ")"
		}
		const format = "%s: nothing has come from its launcher for %v: is the machine down or hung, or the network to it cut?"
		return fmt.Sprintf(format, place, h.silence)
	}
	return fmt.Sprintf("the launcher on %s, or the connection to it, has ended (%v)", h.Host, h.state)
}

// missing names the hosts that the job waits for, "" for none.
func (s *spread) missing(after time.Duration) string {
	var texts []string
	for i, h := range s.hosts {
		switch {
		case h.stage == stageConnecting:
			texts = append(texts, fmt.Sprintf("ssh to %s has not answered: does `ssh %s true` work?", h.Host, h.Host))
		case h.stage == stageStarted && i == 0:
			const format = "the launcher on %s has started, and does not go on: does `ls %s` answer there?"
			texts = append(texts, fmt.Sprintf(format, h.Host, quoted(s.folder)))
		case h.stage == stageStarted && i > 0 && s.address != "":
			const format = "%s does not reach the first host at %s: does a firewall close that port (--listen)?"
			texts = append(texts, fmt.Sprintf(format, h.Host, s.address))
		}
	}
	if len(texts) == 0 {
		return ""
	}
	return fmt.Sprintf("after %v, %s", after, strings.Join(texts, "; "))
}

// joined returns the number of ranks on hosts that have joined.
func (s *spread) joined() (ranks int) {
	for _, h := range s.hosts {
		if h.stage >= stageJoined {
			ranks += h.Ranks
		}
	}
	return ranks
}

// result returns the job's end.
func (s *spread) result() End {
	first := s.hosts[0]
	switch {
	case first.end != nil:
		return *first.end
	case first.stage < stageGone:
		return End{Text: fmt.Sprintf("the launcher on %s does not answer", first.Host), Code: 1}
	case first.excused: // it was told to end before it had the job's store
		return End{Text: Signaled(s.ordered).Error(), Code: 128 + int(s.ordered), Signal: s.ordered}
	}
	return End{Text: first.lost(), Code: first.exitCode()}
}

// exitCode returns the job's exit code for a launcher that has ended without a report.
func (h *remote) exitCode() int {
	const ofSSH = 255 // ssh's code if the connection fails
	code := h.state.ExitCode()
	if code <= 0 || code == crashed || code >= ofSSH {
		return 1
	}
	return code
}

// unended returns the end of a job if some launchers do not end.
func (s *spread) unended() End {
	end := s.result()
	if end.Text != "" {
		return end
	}
	left := slices.IndexFunc(s.hosts, func(h *remote) bool { return h.stage < stageGone })
	const format = "the launcher on %s has not ended %v after those of other hosts"
	return End{Text: fmt.Sprintf(format, s.hosts[left].Host, s.stopTime()), Code: 1}
}

// signal sends launchers a signal.
func (s *spread) signal(hosts []*remote, number syscall.Signal) {
	for _, h := range hosts {
		select {
		case h.signals <- number:
		default: // the launcher reads none
		}
	}
}

// excuse ends the launchers that have not joined, except the first host's: they have no ranks. It returns the others.
func (s *spread) excuse() (left []*remote) {
	for i, h := range s.hosts {
		h.excused = h.stage < stageJoined
		switch {
		case h.excused && h.stage == stageConnecting && !h.local:
			_ = h.cmd.Process.Kill() // an ssh that has not connected
		case h.excused && i > 0:
			_ = h.control.Close()
		default:
			left = append(left, h)
		}
	}
	return left
}

// stopTime bounds how long launchers take to end after the first one has.
func (s *spread) stopTime() time.Duration { return s.Grace + stopMargin + dumpTime + patience }

// close ends the remaining launchers: each sees its standard input end. They share one stopTime, unless they have had
// it already.
func (s *spread) close() {
	close(s.closed)
	limit := s.stopTime()
	if s.overdue {
		limit = stopMargin
	}
	bounded, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for _, h := range s.hosts[:s.started] {
		_ = h.control.Close()
		if h.stage == stageConnecting {
			_ = h.cmd.Process.Kill() // an ssh that has not connected
		}
	}
	for _, h := range s.hosts[:s.started] {
		select {
		case <-h.gone:
		case <-bounded.Done():
			_ = h.cmd.Process.Kill()
			<-h.gone
		}
	}
}
