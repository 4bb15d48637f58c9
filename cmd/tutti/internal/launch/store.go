package launch

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/distributed/elastic"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/printable"
	"github.com/tutti-go/tutti/internal/repeats"
)

// protocol is the version of the launchers' protocol in the store.
const protocol = 1

// terms are the settings that all launchers of a job share.
type terms struct {
	Protocol int    `json:"protocol"` // 0 for versions that do not send one
	Version  string `json:"version"`  // version of the program
	Job      string `json:"job"`      // the title of the job ([agent.title])
	Command  string `json:"command"`  // the command of one launcher, with folders
	Served   bool   `json:"served"`   // other processes serve the store
	Machines int    `json:"machines"` // machines of the job; 0 for an elastic job
	Min      int    `json:"min"`      // 0 of a job that is not elastic
	Max      int    `json:"max"`      // 0 of a job that is not elastic
	Restarts int    `json:"restarts"` // how often the ranks are started again
}

// String returns the flags.
func (t terms) String() string {
	if t.Min > 0 {
		return fmt.Sprintf("--min %d --max %d --restarts %d", t.Min, t.Max, t.Restarts)
	}
	return fmt.Sprintf("--machines %d --restarts %d", t.Machines, t.Restarts)
}

// terms returns the settings that this launcher was given.
func (a *agent) terms() terms {
	return terms{
		Protocol: protocol,
		Version:  a.Version,
		Job:      a.title(a.Served),
		Command:  a.line(quoted),
		Served:   a.Served,
		Machines: a.Machines,
		Min:      a.Min,
		Max:      a.Max,
		Restarts: a.Restarts,
	}
}

// longestTitle bounds a job's title, because errors contain it.
const longestTitle = 200

// title distinguishes the job from others. It is the job's name, or else the command without the folders of its files.
// In a served store, nobody has named the first machine, so runs that read from different folders may meet there. Then
// only the program's folder is left out.
func (a *agent) title(served bool) string {
	if a.Job != "" {
		return a.Job
	}
	program := true
	return a.line(func(word string) string {
		if program || !served {
			word = withoutFolder(word)
		}
		program = false
		return quoted(word)
	})
}

// withoutFolder returns a word of a command without the folder of the file that it names, also behind a flag.
func withoutFolder(word string) string {
	flag, file, isFlag := strings.Cut(word, "=")
	if !isFlag || !strings.HasPrefix(word, "-") {
		flag = ""
		file = word
	}
	if strings.ContainsAny(file, " \t\n;|&") { // a script
		return word
	}
	file = file[strings.LastIndexAny(strings.TrimRight(file, `/\`), `/\`)+1:]
	if flag != "" {
		return flag + "=" + file
	}
	return file
}

// line returns the ranks' command in one line, after it has applied change to each word. A long line is cut and ends
// with a hash of the whole.
func (a *agent) line(change func(word string) string) string {
	words := slices.Clone(a.typed())
	for i, word := range words {
		if i == 0 {
			word = strings.TrimSuffix(word, ".exe")
		}
		words[i] = change(word)
	}
	text := strings.Join(words, " ")
	if len(text) > longestTitle {
		sum := sha256.Sum256([]byte(text))
		text = fmt.Sprintf("%s… (%x)", strings.ToValidUTF8(text[:longestTitle], ""), sum[:4])
	}
	return text
}

// checkVersion returns an error if the first machine's version differs from this launcher's.
func (t terms) checkVersion(version string) error {
	switch {
	case t.Version != version:
		return fmt.Errorf("%w: this is tutti %s, and the first machine has tutti %s: "+
			"all machines of a job use one build of tutti ('tutti version' prints which)",
			comm.ErrMismatch, version, printable.Text(t.Version))
	case t.Protocol != protocol:
		return fmt.Errorf("%w: this tutti speaks version %d of the launchers' protocol, and the first machine's "+
			"version %d: all machines of a job use one build of tutti ('tutti version' prints which)",
			comm.ErrMismatch, protocol, t.Protocol)
	}
	return nil
}

// refused tells the other launchers why this launcher does not take part.
func (a *agent) refused(ctx context.Context, err error) error {
	text, _ := json.Marshal(refusal{Host: a.host, Address: a.machine().Address, Reason: err.Error()})
	_ = a.kv.Set(ctx, refusals+rand.Text(), text, store.Lease) // the others only print it
	return err
}

// refusal tells why a launcher does not take part.
type refusal struct {
	Host    string `json:"host"`    // of the launcher
	Address string `json:"address"` // of its machine
	Reason  string `json:"reason"`  // the reason, as its user sees it
}

// hearRefusals prints which launchers do not take part. It records the processes that they and the store have refused.
func (a *agent) hearRefusals(ctx context.Context) error {
	var log repeats.Log
	_, err := a.kv.Watch(ctx, refusals, func(e store.Event) {
		var r refusal
		if e.Deleted || json.Unmarshal(e.Value, &r) != nil {
			return
		}
		launcher := fmt.Sprintf("the launcher of %s (%s)", printable.Text(r.Host), printable.Text(r.Address))
		reason := printable.Text(r.Reason)
		a.turnedAway.add(launcher, reason)
		if times, due := log.Count(launcher); due {
			fmt.Fprintf(a.notes, "tutti: %s does not take part: %s (%d)\n", launcher, reason, times)
		}
	})
	if err != nil {
		return err
	}
	_, err = a.kv.Watch(ctx, store.RefusedKey, func(e store.Event) { // the store's log prints it
		if e.Deleted {
			return
		}
		from, reason, ok := strings.Cut(string(e.Value), ": ")
		host, _, err := net.SplitHostPort(from)
		if ok && err == nil {
			a.turnedAway.add(printable.Text(host), printable.Text(reason))
		}
	})
	return err
}

// mostNamed bounds how many refused processes a last line names.
const mostNamed = 4

// refusalLog records refused processes for the last line. The zero value is empty.
type refusalLog struct {
	mu      sync.Mutex        // taken alone
	names   []string          // in the order of first refusals; guarded by mu
	reasons map[string]string // last reason by name; nil before the first; guarded by mu
	times   map[string]int    // refusals by name; nil before the first; guarded by mu
}

// add adds a refusal, unless the log already names mostNamed others.
func (l *refusalLog) add(name, reason string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.reasons == nil {
		l.reasons = map[string]string{}
		l.times = map[string]int{}
	}
	if l.reasons[name] == "" {
		if len(l.names) == mostNamed {
			return
		}
		l.names = append(l.names, name)
	}
	l.reasons[name] = reason
	l.times[name]++
}

// explain adds the refusals to the error of a job whose machines have not joined.
func (l *refusalLog) explain(err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, name := range l.names {
		verb := ""
		if i == 0 {
			verb = "refused: "
		}
		err = fmt.Errorf("%w; %s%s: %s", err, verb, name, l.reasons[name])
		if l.times[name] > 1 {
			err = fmt.Errorf("%w (%d times)", err, l.times[name])
		}
	}
	return err
}

// connect keeps the store, or joins it.
func (a *agent) connect(ctx context.Context) error {
	secret, err := a.secret()
	if err != nil {
		return err
	}
	if !a.first {
		conf, err := a.environment(secret, a.Join)
		if err != nil {
			return err
		}
		return a.dial(ctx, conf)
	}
	address := cmp.Or(a.Listen, "127.0.0.1:0")
	if a.Listen == "" && a.Machines > 1 {
		address = DefaultListen
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("%w; --listen takes another address", err)
	}
	conf, err := a.environment(secret, []string{l.Addr().String()})
	if err != nil {
		return errors.Join(err, l.Close())
	}
	return a.keep(ctx, l, conf)
}

// environment sets the ranks' variables that describe the store. It returns the configuration of connections to the
// store, as ranks use it.
func (a *agent) environment(secret secret, addresses []string) (*tls.Config, error) {
	for _, address := range addresses {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return nil, fmt.Errorf("%w: --join takes HOST:PORT, or several separated by commas", err)
		}
	}
	host, port, _ := net.SplitHostPort(addresses[0])
	if ip := net.ParseIP(host); a.Served || ip != nil && ip.IsUnspecified() {
		host = a.reachable()
	}
	a.address = net.JoinHostPort(host, port)
	localSize := a.perHost()
	if a.starter != nil {
		localSize = a.starter.localSize
	}
	env := map[string]string{
		"MASTER_ADDR":            host,
		"MASTER_PORT":            port,
		env.Secret:               secret.text,
		env.SecretFile:           secret.path,
		"TUTTI_LOCAL_WORLD_SIZE": strconv.Itoa(localSize),
		"TUTTI_RANK":             "0",
		"TUTTI_WORLD_SIZE":       "1",
		env.Store:                strings.Join(a.Join, ","),
		env.Job:                  a.Job,
	}
	for name, value := range env {
		a.env = append(a.env, name+"="+value)
	}
	job, err := rendezvous.FromEnv(func(name string) string { return env[name] })
	if err != nil {
		return nil, err
	}
	return job.TLS("store")
}

// keep serves the store in this launcher, which is on the first machine.
func (a *agent) keep(ctx context.Context, l net.Listener, conf *tls.Config) error {
	options := store.Options{Job: a.Job}
	if a.Min > 0 {
		options.Silence = elastic.DefaultSilence
		a.bounds()
	}
	server := store.NewServer(options)
	server.Serve(l, conf)
	a.kv = server.Owner("the first launcher")
	if err := a.arrive(ctx); err != nil {
		return err
	}
	text, _ := json.Marshal(a.terms())
	return a.kv.Set(ctx, jobKey, text)
}

// dial joins the store that the first machine keeps or that other processes serve. An elastic job has two more chances
// in a served store. It goes on at the next address when a session is lost meanwhile. It tries again when the store
// refuses a request that it may run later. Requests that are repeated change nothing.
func (a *agent) dial(ctx context.Context, conf *tls.Config) error {
	for {
		err := a.join(ctx, conf)
		if err == nil {
			return nil
		}
		if a.kv == nil {
			return err
		}
		lost := a.kv.Err() != nil
		retry := lost || unexecuted(err)
		err = errors.Join(err, a.kv.Close())
		if !retry || !a.Served || a.Min == 0 || ctx.Err() != nil {
			return err
		}
		if lost {
			continue
		}
		select {
		case <-time.After(storeRetry):
		case <-ctx.Done():
			return fmt.Errorf("%w; the store's last refusal: %w", comm.ContextError(ctx), err)
		}
	}
}

// unexecuted reports whether the store has not run a request but may run it later: etcd refuses some requests while it
// elects a leader. Permanent refusals are other errors.
func unexecuted(err error) bool { return errors.Is(err, comm.ErrPeerFailed) }

// join begins a session of the store and adds this machine to the job. The session is nil if nobody answers.
func (a *agent) join(ctx context.Context, conf *tls.Config) error {
	title := fmt.Sprintf("the launcher of %s (%s)", a.host, printable.Text(a.line(quoted)))
	name := title + ", " + rand.Text()
	a.dialer = store.Dialer{Addresses: a.Join, TLS: conf, Job: a.Job, Name: name, Title: title}
	kv, err := a.dialer.Dial(ctx)
	a.kv = kv
	if errors.Is(err, comm.ErrTimeout) {
		return fmt.Errorf("%w; %s", err, a.remedy())
	}
	if err != nil {
		return err
	}
	if err := a.agree(ctx); err != nil {
		return err
	}
	return a.arrive(ctx)
}

// remedy asks what may keep a launcher from joining when nobody has answered.
func (a *agent) remedy() string {
	if a.Served {
		return "does tutti-store run there, and can this machine reach it?"
	}
	return "does the first machine's launcher run, with that port of --listen, and can this machine reach it?"
}

// agree adopts the first machine's terms of the job. In a served store all launchers have terms, and the first of them
// begins the job.
func (a *agent) agree(ctx context.Context) error {
	var text []byte
	var err error
	switch {
	case !a.Served:
		text, err = a.kv.Get(ctx, jobKey)
	case a.Min > 0:
		text, err = a.begin(ctx)
	default:
		text, err = a.lead(ctx)
	}
	if err != nil {
		return err
	}
	var job terms
	if err := json.Unmarshal(text, &job); err != nil {
		return fmt.Errorf("%w: what the store says of the job: %w", comm.ErrMismatch, err)
	}
	if err := job.checkVersion(a.Version); err != nil {
		return a.refused(ctx, err)
	}
	if title := a.title(job.Served); job.Job != title {
		const text = "%w: this launcher starts %s, and the job at %s is %s: " +
			"another job has another address, and one whose commands differ has a name (--job) on all machines"
		return a.refused(ctx, fmt.Errorf(text, comm.ErrMismatch, title, a.joined(), printable.Text(job.Job)))
	}
	if line := a.line(quoted); a.Job == "" && job.Command != line {
		fmt.Fprintf(a.notes, "tutti: folders differ: the job's command is %s there, and %s here\n",
			printable.Text(job.Command), line)
	}
	job.Command = ""
	if job.Min != 0 && (job.Min < 1 || job.Max != 0 && job.Max < job.Min || job.Restarts < 0) {
		return fmt.Errorf("%w: the bounds of the job are %v", comm.ErrArgument, job)
	}
	ours := a.terms()
	ours.Command = ""
	if a.Served && job != ours {
		const text = "%w: the job%s in the store at %s has %v, and this launcher %v: another job has another name (--job)"
		return fmt.Errorf(text, comm.ErrMismatch, a.named(), a.joined(), job, ours)
	}
	if job.Min > 0 {
		a.Served = job.Served
		a.Min = job.Min
		a.Max = job.Max
		a.Restarts = job.Restarts
		a.bounds()
	}
	return nil
}

// begin begins an elastic job in a served store, unless another launcher has begun it. It returns the terms in the
// store.
func (a *agent) begin(ctx context.Context) ([]byte, error) {
	ended, err := elastic.Ended(ctx, a.kv)
	if err != nil {
		return nil, err
	}
	if ended {
		return nil, fmt.Errorf("%w: the job%s in the store at %s has ended: another job has another name (--job)",
			comm.ErrArgument, a.named(), a.joined())
	}
	text, _ := json.Marshal(a.terms())
	now, _, err := a.kv.CompareAndSet(ctx, jobKey, 0, text)
	return now.Value, err
}

// lead begins a job that is not elastic in a served store, unless another launcher does. Such a job ends with the
// launcher that began it. If that launcher is killed, keys stay in the store.
func (a *agent) lead(ctx context.Context) (text []byte, err error) {
	if _, a.first, err = a.kv.CompareAndSet(ctx, leaderKey, 0, []byte(a.host), store.Lease); err != nil {
		return nil, err
	}
	if !a.first {
		return a.kv.Get(ctx, jobKey)
	}
	// Numbers of machines are never used again: a launcher of the earlier job may still be leaving.
	if err := a.clear(ctx, func(key string) bool {
		return key == leaderKey || key == ranksKey
	}); err != nil {
		return nil, err
	}
	text, _ = json.Marshal(a.terms())
	return text, a.kv.Set(ctx, jobKey, text, store.Lease)
}

// clear deletes all keys except those for which stays returns true.
func (a *agent) clear(ctx context.Context, stays func(key string) bool) error {
	all, err := a.kv.List(ctx, "")
	if err != nil {
		return err
	}
	for _, e := range all {
		if stays(e.Key) {
			continue
		}
		if err := a.kv.Delete(ctx, e.Key, 0); err != nil {
			return err
		}
	}
	return nil
}

// bounds gives ranks the bounds of an elastic job.
func (a *agent) bounds() {
	a.env = append(a.env, env.Min+"="+strconv.Itoa(a.Min), env.Max+"="+strconv.Itoa(a.Max))
}

// joined returns the addresses at which this launcher has joined the job.
func (a *agent) joined() string { return strings.Join(a.Join, ",") }

// named returns the job's name as part of a sentence.
func (a *agent) named() string {
	if a.Job == "" {
		return ""
	}
	return fmt.Sprintf(" %q", a.Job)
}

// keeper names the keeper of the store in an error.
func (a *agent) keeper() string {
	switch {
	case !a.Served:
		return "the launcher of the first machine"
	case a.Min > 0:
		return "the store at " + a.joined()
	}
	return "the store at " + a.joined() + ", with whose session a job ends that is not elastic (--min)"
}

// rejoin connects to the store again: to the next server of a served store, or to the first machine. It fails at once
// if the first machine refuses the connection, because its launcher has then ended. Otherwise it tries for Config.Wait
// from this loss on.
func (a *agent) rejoin(ctx context.Context) (*store.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, a.Wait)
	defer cancel()
	d := a.dialer
	d.Once = !a.Served
	text, _ := json.Marshal(a.machine())
	for {
		kv, err := d.Dial(ctx)
		if err == nil {
			if err = kv.Set(ctx, a.key, text, store.Lease); err == nil {
				err = a.exchangeSignals(ctx, kv)
			}
			if err == nil {
				return kv, nil
			}
			_ = kv.Close() // the session could not be used
		}
		if !a.Served && errors.Is(err, syscall.ECONNREFUSED) {
			return nil, fmt.Errorf("it has ended: %w", err)
		}
		select {
		case <-time.After(storeRetry):
		case <-ctx.Done():
			return nil, fmt.Errorf("not in reach for %v (--wait): %w", a.Wait, err)
		}
	}
}

// reachable returns an address of this machine, the loopback address if the job has no other machine.
func (a *agent) reachable() string {
	if a.Machines == 1 && a.Min == 0 {
		return loopback
	}
	return cmp.Or(reachableAddress(), loopback)
}

// secret is a job's secret: its text, or the path of its file. If there is a path, only the path goes into the
// environment of ranks and their processes.
type secret struct {
	text string // "" where there is a path
	path string // path of the file; "" if there is none
}

// secret returns TUTTI_SECRET, the secret's file, or a random secret that only ranks of this machine need to know.
func (a *agent) secret() (secret, error) {
	if a.starter != nil {
		return secret{text: a.starter.secret}, nil
	}
	if text := os.Getenv(env.Secret); text != "" && a.SecretFile == "" {
		a.known = "the same " + env.Secret
		return secret{text: text}, nil
	}
	path := cmp.Or(a.SecretFile, os.Getenv(env.SecretFile))
	named := path != ""
	if path == "" && a.first && a.Machines == 1 && a.Listen == "" {
		return secret{text: rand.Text() + rand.Text()}, nil
	}
	if path == "" {
		var err error
		if path, err = rendezvous.UserSecretFile(); err != nil {
			return secret{}, err
		}
	}
	_, err := rendezvous.ReadSecret(path, a.first)
	if errors.Is(err, os.ErrNotExist) {
		remedy := "copy the file from the first machine, and pass it with --secret-file"
		switch {
		case a.first:
			remedy = "no secret can be made there; --secret-file names another place"
		case a.Served:
			remedy = "copy the file from a server of the store, and pass it with --secret-file"
		}
		err = fmt.Errorf("%w: %s", err, remedy)
	}
	if err != nil {
		return secret{}, err
	}
	a.known = "a copy of " + path + " at the same place (scp -p)"
	if named {
		a.copyName = filepath.Base(path)
		a.known = fmt.Sprintf("a copy of %s as %s (scp -p)", path, a.copyName)
	}
	path, err = filepath.Abs(path)
	return secret{path: path}, err
}
