// Package elastic trains with members that join and leave: at each boundary between two steps it determines the members
// of the next epoch and makes a communicator for them. A joining member gets the state of the others. If a step loses a
// member, the remaining members repeat it.
//
//	gradients, err := ddp.New(ctx, rt, noop.New(rt), parameters, ddp.Config{})
//	…
//	m, err := elastic.Join(ctx, elastic.Config{Name: host, Min: 2, Max: 8, …}, gradients)
//	…
//	err = m.Run(ctx, func(ctx context.Context, e *elastic.Epoch) error {
//		// forward and backward pass
//		if err := gradients.ReduceAll(ctx, slopes); err != nil { // calls m.Commit
//			return err // rolled back: the step is made again
//		}
//		// update
//	})
//
// docs/elastic.md is the guide.
//
// # Steps
//
// A step ends with a vote, [Member.Commit]: an allreduce of two words for each member. A [Trainer] calls it before
// anything that cannot be rolled back. A member whose vote fails does not know whether the others have committed. When
// the members form the next epoch, they share what they know and act alike: they commit if all of them had the result,
// and otherwise roll back (cooperative termination of two-phase commit: Bernstein, Hadzilacos, Goodman, "Concurrency
// Control and Recovery in Database Systems", 1987, §7.4).
//
// # Epochs
//
// Each member keeps its status in a store, as a leased entry. A member that sees all live members of an epoch at the
// boundary writes the next epoch by compare-and-set. If its communicator cannot be formed, all are at a boundary again,
// and the next attempt has a higher number. A communicator belongs to one epoch.
//
// The store does not belong to the members: a launcher or etcd keeps it. It outlives them, and it alone decides which
// epoch is next. So the members that reach it may continue, down to Config.Min, whichever members are lost.
//
// # How it is written
//
//   - elastic.go, trainer.go: what a program calls
//   - form.go: votes, and the communicator of a new epoch
//   - await.go: the wait for a new epoch
//   - state.go: what joining and leaving members exchange
//   - coded.go: how tensors of floats are sent to those that join
//   - standing.go: what a member says of itself in the store
//   - valid.go: what members believe of what the store has
//   - view.go: the members of the next epoch and its first step, as a function of the entries in the store
//   - reach.go: the members that an epoch leaves out, as nobody reaches them
//   - boundary.go: what a waiting member does, as a function of these and of what it knows of itself
//   - attend.go: sessions of the store
//   - publish.go: this member's entries in it
//   - timeouts.go: all times
package elastic

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/tutti-go/tutti/comm"
	"github.com/tutti-go/tutti/comm/rendezvous"
	"github.com/tutti-go/tutti/comm/store"
	"github.com/tutti-go/tutti/internal/env"
	"github.com/tutti-go/tutti/internal/repeats"
	"github.com/tutti-go/tutti/runtime"
	"github.com/tutti-go/tutti/runtime/cpu"
)

var (
	// ErrLeft means that this member has left in order, or was closed.
	ErrLeft = errors.New("this member has left")
	// ErrStore means that the store is out of reach, or refuses this member's entry. The others may go on, so this
	// member may not.
	ErrStore = errors.New("the job's store is out of reach")
	// ErrEnded means that the others have made the last step of the job. This process does not have the job's final state
	// unless it was in the last epoch, for which [Member.Run] returns nil.
	ErrEnded = errors.New("the job has ended")
	// ErrIdentity means that another living process has this member's name.
	ErrIdentity = errors.New("another member has this name")
)

// errComplete is the ErrEnded of a member that has the state of the last step.
var errComplete = fmt.Errorf("%w with this member's last step", ErrEnded)

// Place is a member's place in an epoch.
type Place struct {
	Rank, Size int    // of the member in the epoch, from 0
	World      string // names the epoch: no other one has it
}

// Config names a member, connects it to the others, and has the state and the terms that all members share.
type Config struct {
	Name     string // of one living process at a time
	Min, Max int    // members of an epoch; Max 0 is any number
	// Terms must be the same on all members: a version, a configuration. Members with other terms are refused.
	Terms string

	// Dial connects to the job's store, again whenever the session is lost. The store outlives members, and ends the
	// leases of silent processes. Dial must not be nil.
	Dial func(ctx context.Context) (store.Store, error)
	// TLS, which [FromEnv] sets, configures the connections between members, for Form. It may be nil.
	TLS *tls.Config
	// Silence is how long a member may be silent before the others go on without it, [DefaultSilence] unless set. Five
	// times Silence bounds each wait of a member: for the store, for a communicator, and for an epoch that can begin.
	Silence time.Duration
	limit   time.Duration // five times Silence unless a test sets it
	// Patience is how long a member that lives may keep all others waiting, 10 min unless set. It counts from when the
	// last of the others came to the exchange of a step, or to the boundary behind one. Then they take the
	// member to hang, and go on without it unless they are fewer than Min. If it goes on, it joins again, without its
	// residuals. Set Patience above the time of an evaluation or a checkpoint that other members wait for.
	Patience time.Duration

	// Form makes the communicator of an epoch, as [tcp.New] does. All members of the epoch call it. It may exchange
	// addresses in the store, under names that contain the World; kv repeats refused writes until ctx ends. If its error
	// has a method MissingRanks() []int, as [tcp.New]'s has, that lists the ranks that were never connected to. The next
	// epoch is formed without those that most others miss.
	Form func(ctx context.Context, kv store.Store, p Place) (comm.Communicator, error)
	// Runtime has the memory that communicators reach: package cpu's unless set.
	Runtime runtime.Runtime

	// Tensors are the same on all members, with the same lengths and types: parameters, the state of the optimizer. A
	// joining member gets them from another member.
	Tensors []*runtime.Tensor
	// Step is the number of steps behind a state that the member brings along, for example from a file.
	Step uint64
}

// Epoch is a list of members and their communicator, which belongs to the Member.
type Epoch struct {
	Number  uint64            // 1 and up
	Members []string          // names, by rank
	Comm    comm.Communicator // of the members; nil until the epoch is formed
	Joined  bool              // this member got its state in this epoch

	record  *record // as the store has it: see view.go
	bound   bool    // the trainer has the communicator and the state
	changes bool    // the last vote has found that members come or go
	leaves  []int   // the ranks of those that leave, by that vote
	hash    int64   // of what members have alike, 0 after the first vote, which has compared it
}

// Member is a process of an elastic job. Only one goroutine may call its methods, except Leave.
type Member struct {
	cfg     Config  // with defaults; never changed
	trainer Trainer // has the state; called by Next and Commit alone

	ctx    context.Context    // ends with Close
	end    context.CancelFunc // ends ctx
	caller context.Context    // of the last Next; the recorder of an epoch's calls has it (form.go)
	gone   sync.WaitGroup     // of attend, the goroutine of the store's sessions (attend.go)

	failure   error       // of the last attempt at an epoch, nil if that did not fail; used only by Next and Commit
	formed    bool        // this process was in an epoch; used only by Next and Commit
	runName   string      // names the job in flight records, "" before the store has said it; used only by attend
	failures  int         // of Dial and what follows it, one after the other; used only by attend
	denials   repeats.Log // logs, ever less often, that the store refuses writes; used only by attend
	residuals repeats.Log // likewise what became of the residuals of others, and of this member's

	wakeup chan struct{} // of capacity 1: the goroutine that writes the claims to the store (keep) is to look at them

	mu          sync.Mutex       // guards what follows
	kv          store.Store      // nil while the store is out of reach
	session     time.Time        // when it began; zero before the first one
	entries     map[string]entry // what the store has, by key (attend.go)
	changed     chan struct{}    // closed by the next change
	status      status           // of this member; all but Wishes and Awaits is changed by Next and Commit alone
	longWaits   int              // waits in exchanges that the others are told of; 0 if Awaits is ""
	late        []person         // members of the epoch for whom this one has aborted it (view.go); nil if it has not
	statusClaim claim            // the status as the store has it, and as it is to have it (publish.go)
	endClaim    claim            // the World of the epoch with the last step, once this member has made that
	refusal     error            // why the store does not have these claims; nil if it took the last write
	fault       error            // why this process cannot be a member; nil if it can
	ignored     int              // entries that no member writes
	ends        bool             // all members of the last epoch are to leave
	withdrawn   uint64           // the step up to which it could have committed when it stopped waiting, 0 if none
	epoch       *Epoch           // entered last: nil for a member that joins, without Comm until it is formed
}

// Join makes this process a member that trains with trainer. It returns when it has found the store and the member is
// not refused, with [comm.ErrMismatch] for other terms or [ErrIdentity] for a name that is taken. The member enters its
// first epoch in [Member.Next], which keeps looking for the store if Join has not found it within five times
// Config.Silence.
func Join(ctx context.Context, cfg Config, trainer Trainer) (*Member, error) {
	if trainer == nil {
		return nil, fmt.Errorf("elastic: %w: no trainer", comm.ErrArgument)
	}
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("elastic: %w: %w", comm.ErrArgument, err)
	}
	m := &Member{
		cfg:     cfg,
		trainer: trainer,
		changed: make(chan struct{}),
		entries: map[string]entry{},
		wakeup:  make(chan struct{}, 1),
	}
	m.statusClaim = claim{key: m.key(), options: []store.Option{store.Lease}}
	m.endClaim = claim{key: finalKey}
	m.status = status{Name: cfg.Name, Incarnation: rand.Text(), Standing: fresh, Step: cfg.Step} // without the job's state
	trainer.BeforeCommit(m.Commit)
	m.ctx, m.end = context.WithCancel(context.WithoutCancel(ctx))
	m.gone.Go(m.attend)
	bounded, stop := context.WithTimeout(ctx, cfg.limit)
	defer stop()
	err := m.wait(bounded, func() (bool, error) { return m.kv != nil, m.fault }) // looks with mu held
	// Where only the limit has ended it, Next goes on looking for the store.
	if err != nil && (ctx.Err() != nil || bounded.Err() == nil) {
		return nil, errors.Join(fmt.Errorf("elastic: %s: %w", cfg.Name, err), m.Close())
	}
	return m, nil
}

// complete sets what is not set, and returns why the configuration is none.
func (c *Config) complete() error {
	if c.Dial == nil || c.Form == nil {
		return errors.New("no Dial, or no Form")
	}
	if c.Min < 1 || c.Max != 0 && c.Max < c.Min {
		return fmt.Errorf("bounds are %d and %d, want 1 <= Min <= Max, or a Max of 0", c.Min, c.Max)
	}
	if c.Silence < 0 || c.Patience < 0 {
		return fmt.Errorf("times are Silence %v and Patience %v, want none below 0", c.Silence, c.Patience)
	}
	if c.Silence == 0 {
		c.Silence = DefaultSilence
	}
	if c.limit == 0 {
		c.limit = limitFactor * c.Silence
	}
	if c.Patience == 0 {
		c.Patience = defaultPatience
	}
	if c.Runtime == nil {
		c.Runtime = cpu.New()
	}
	return checkText(c.Name) // which the others print
}

// FromEnv completes a configuration for a rank of `tutti launch --min`. It sets Name, Min and Max, Dial for the
// launcher's store, and TLS for [tcp.New].
func FromEnv(cfg Config) (Config, error) {
	job, err := rendezvous.FromEnv(os.Getenv)
	if err != nil {
		return cfg, err
	}
	if os.Getenv(env.Min) == "" {
		return cfg, fmt.Errorf("elastic: %w: %s is not set; tutti launch --min starts the members of a job",
			rendezvous.ErrEnvironment, env.Min)
	}
	cfg.TLS, err = job.TLS("comm/tcp")
	if err != nil {
		return cfg, err
	}
	for variable, bound := range map[string]*int{env.Min: &cfg.Min, env.Max: &cfg.Max} {
		text := os.Getenv(variable)
		*bound, err = strconv.Atoi(text)
		if err != nil {
			return cfg, fmt.Errorf("elastic: %w: %s=%q is no count", rendezvous.ErrEnvironment, variable, text)
		}
	}
	cfg.Name = fmt.Sprint("rank ", job.Rank)
	cfg.Dial = func(ctx context.Context) (store.Store, error) {
		kv, err := job.Connect(ctx)
		if err != nil {
			return nil, err // and no Store of a nil Client
		}
		return kv, nil
	}
	return cfg, nil
}

// Steps returns the number of steps that the members have committed.
func (m *Member) Steps() uint64 { return m.now().Step } // now copies the status

// Leave makes this member leave in order: [Member.Next] returns [ErrLeft] after the next vote, when its residuals are
// handed over. If only the leaving member has the state, it stays until a successor has received that, even if this
// exceeds Max by one.
//
// A member at a boundary leaves at once if it has no state of the job, or if all members of the last epoch are to
// leave. Otherwise it waits for the next vote, for five times Config.Silence at most.
func (m *Member) Leave() {
	m.change(func() { m.status.Wishes = true }) // change holds mu, and wakes what waits for it
}

// Run makes steps until one of them returns [io.EOF], this member has left, ctx ends, or a step fails for another
// reason than a lost member. Call Close after it. If Run returns an error, the other members continue without this one.
//
// Run returns nil for [io.EOF], for [ErrLeft], and if the others end the job after this member has made all of its
// steps. It returns [ErrEnded] if the others have made the last step without this process. Its tensors are then not the
// result of the job: do not report or save them.
//
// If a step loses a member, the remaining members repeat it. A member without the store waits until it can join again.
func (m *Member) Run(ctx context.Context, step func(ctx context.Context, e *Epoch) error) error {
	err := m.run(ctx, step)
	if err != nil {
		m.fail(err) // closes the communicator, so that the others notice
		m.end()
	}
	return err
}

func (m *Member) run(ctx context.Context, step func(ctx context.Context, e *Epoch) error) error {
	var failed error // the error of the last step
	for {
		e, err := m.Next(ctx, failed)
		if errors.Is(err, errComplete) {
			slog.Info("elastic: the others have ended the job", "member", m.cfg.Name)
			return nil
		}
		if errors.Is(err, ErrEnded) && m.formed {
			return fmt.Errorf("%w without this process, which does not have its result", err)
		}
		if errors.Is(err, ErrEnded) {
			return fmt.Errorf("%w: this process came after that and has not trained; "+
				"give a new job another name or prefix", err)
		}
		if errors.Is(err, ErrLeft) && ctx.Err() == nil {
			return nil
		}
		if errors.Is(err, ErrStore) && ctx.Err() == nil {
			slog.Warn("elastic: waiting for the store", "member", m.cfg.Name, "err", err)
			failed = nil
			continue
		}
		if err != nil {
			return err
		}
		failed = step(ctx, e)
		if failed == nil || lost(failed) && ctx.Err() == nil { // also where the io.EOF of a connection is the reason
			continue
		}
		if errors.Is(failed, io.EOF) {
			m.finishJob(e) // has the store say so, for those who come later
			return nil
		}
		return failed
	}
}

// lost reports whether an error comes from a lost member.
func lost(err error) bool {
	sentinels := []error{comm.ErrPeerFailed, comm.ErrBroken, comm.ErrClosed, comm.ErrTimeout}
	return slices.ContainsFunc(sentinels, func(s error) bool { return errors.Is(err, s) })
}

// Close ends this member. The others notice at once, and go on without its residual unless it has left in order.
func (m *Member) Close() error {
	m.end()
	m.gone.Wait()
	e := m.epoch
	m.change(func() { m.epoch = nil })
	if e == nil || e.Comm == nil {
		return nil
	}
	return comm.CloseAll(e.Comm, nil)
}
