// Collectives over peer memory: each rank writes into the scratch memory of the others, and waits for data that
// arrives in its own scratch memory. There is no barrier.
//
// Messages up to some size are sent at once, and each of their words shows whether it has arrived (wires sentinel32,
// sentinel64 and tagged). Larger messages pass through a ring of chunks, whose arrival a flag announces.
//
// A kernel is one operation of all ranks. It reads the number of the operation, its epoch, from the scratch memory and
// increments it, so that a launch captured in a graph may be replayed and mixed with others. At epoch e a rank has
// heard from each peer in e-1, which the peer sent after it completed e-2. Memory that depends on the epoch therefore
// alternates between two places. The protocol relies on grid boundaries as fences at system scope; ../model checks
// this, and the fences that would replace them.
//
// Polls are bounded, by time and by a word in host memory that aborts them. A rank that aborts tells its peers, whose
// waits end as well.
#include "element.cuh"
#include "shared.cuh"

enum { max_ranks = 8, max_blocks = 256, max_width = 512, ring_slots = 4, stages = 2 };
enum { max_lines = 128 * max_width / 32 }; // warps with rings

// The offsets of the parts of a rank's scratch memory, in bytes. They are the same on all ranks.
struct layout {
  u64 words, words_size;   // of the sentinel wires; two places
  u64 tagged, tagged_size; // of the tagged wire; two places
  u64 ring, ring_slot;     // slots of the rings, see ring_at
  u32 lines;               // warps with rings
  u32 chunk;               // packs of each peer in a slot
};

// The head of the scratch memory. Only its own rank accesses it, except for gone, which peers write.
struct state {
  u64 epoch[max_blocks]; // all the same between kernels
  u32 broken;            // aborted: no later operation runs
  u64 gone[max_ranks];   // of peers that have aborted: see gone_of
};
// Encodes that a rank aborted before it completed an operation, while it waited for peer.
DEVICE u64 gone_of(u64 epoch, u32 peer) { return epoch << 8 | 1 + peer; }
enum : u64 { flags_at = 4096 }; // u64 flags[stages][max_lines][max_ranks]

enum { asked, timed_out }; // why a rank aborts; a peer may tell other reasons

// Shared with the host: the kernel reads the limits and reports an abort.
struct watch {
  u32 abort;
  u32 told; // 1 if the fields below are valid
  u64 limit; // longest wait, in nanoseconds
  u32 rank, peer, code;
  u32 reason; // this enum, or a reason that a peer told
  u64 epoch;
};

struct world {
  u32 rank, ranks;
  char *scratch[max_ranks]; // of each rank, as mapped on this one
  watch *host;
  layout places;
};

// One operation. A rank sends each peer a piece and receives one from each. Piece p starts p strides into a buffer;
// the last pieces may be shorter, or empty.
struct call {
  const char *send;
  char *recv;
  u64 bytes, total, send_stride, recv_stride;
  u32 reduction;
  u32 root; // the only sender; max_ranks: all send
  u32 code; // the host's code of the operation
  u32 keeper;  // the only rank that gets a reduction's result; max_ranks: all do
  u32 aligned; // all pieces of all buffers start at packs
  u32 idle; // do nothing: the launch only loads the kernel
  // For rounded values:
  u32 tiles; // of a block in a round
  float factor; // of their sums
  u32 grad_type; // enum; of the gradient that is added to the values first
  const void *grad;
  const float *grad_factor; // 0 means a factor of 1
  char *lost; // receives the rounding errors; 0: they are discarded
};
enum { grad_none, grad_f32, grad_f16, grad_bf16 };

struct launch {
  world w;
  call c;
};

struct pair { u64 word[2]; };
#ifdef EMULATOR // runs kernels on the host
#include "../testdata/emulator.h"
#else

// Memory accesses that other GPUs or the host see or make.
DEVICE void store(void *p, const pack &v) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3]) : "memory");
}
DEVICE pack load(const void *p) {
  pack v;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3]) : "l"(p) : "memory");
  return v;
}
DEVICE void store(void *p, u64 a, u64 b) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
DEVICE pair load_pair(const void *p) {
  pair v;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(v.word[0]), "=l"(v.word[1]) : "l"(p) : "memory");
  return v;
}
DEVICE void store64(u64 *p, u64 v) { asm volatile("st.relaxed.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE u64 load64(const u64 *p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void store32(u32 *p, u32 v) { asm volatile("st.relaxed.sys.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
DEVICE u32 load32(const u32 *p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void release64(u64 *p, u64 v) { asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
DEVICE u64 acquire64(const u64 *p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Sets a word that only this GPU uses to 1 if it was 0, and returns its old value.
DEVICE u32 set_once(u32 *p) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(p) : "memory");
  return before;
}
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEVICE u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
DEVICE u32 active_lanes() {
  u32 mask;
  asm volatile("activemask.b32 %0;" : "=r"(mask));
  return mask;
}
DEVICE bool all_lanes(bool condition) { return (bool)__nvvm_vote_all_sync(~0u, condition); }

// Whether a wait should check now, after `tries` polls, if it must end: in the rank's own memory after some 8 ms, in
// host memory after some 30 ms. A check takes about 1 us, one warp after the other, so all warps together take up to 5
// ms. The intervals are longer: if shorter waits made such checks, the checks of one rank would delay the other until
// it checked too, call after call.
DEVICE bool due(u32 tries) { return tries % (1u << 14) == 0; }
DEVICE bool asks_host(u32 tries) { return tries % (1u << 16) == 0; }
#endif

// Wires: encodings of a pack that show whether it has arrived. Each 32-bit or 64-bit word shows it by itself, because
// the words of a vector may arrive one by one.

// A word has arrived if it is not all ones, a pattern that is one NaN, or two. The sender replaces this NaN by another
// one. The reader restores the sentinel.
struct sentinel32 {
  typedef pack arrived;
  static const u32 size = 16;
  DEVICE u64 place(const layout &at, u64 epoch) { return at.words + (epoch & 1) * at.words_size; }
  DEVICE void put(char *to, pack v, u32) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) v.word[i] = v.word[i] == ~0u ? ~1u : v.word[i];
    store(to, v);
  }
  DEVICE pack look(const char *from) { return load(from); }
  DEVICE bool ready(const pack &v, u32) {
    return v.word[0] != ~0u && v.word[1] != ~0u && v.word[2] != ~0u && v.word[3] != ~0u;
  }
  DEVICE pack value(const pack &v) { return v; }
  DEVICE void clear(char *from) { store(from, pack{{~0u, ~0u, ~0u, ~0u}}); }
};
struct sentinel64 {
  typedef pair arrived;
  static const u32 size = 16;
  DEVICE u64 place(const layout &at, u64 epoch) { return sentinel32::place(at, epoch); }
  DEVICE u64 other(u64 v) { return v == ~0ull ? ~1ull : v; }
  DEVICE void put(char *to, const pack &v, u32) { store(to, other(bits64_of(v, 0)), other(bits64_of(v, 1))); }
  DEVICE pair look(const char *from) { return load_pair(from); }
  DEVICE bool ready(const pair &v, u32) { return v.word[0] != ~0ull && v.word[1] != ~0ull; }
  DEVICE void clear(char *from) { store(from, ~0ull, ~0ull); }
  DEVICE pack value(const pair &v) {
    pack p;
    set_bits64(p, 0, v.word[0]);
    set_bits64(p, 1, v.word[1]);
    return p;
  }
};
// Each 32-bit word travels with the lower half of the epoch, which is never zero. A word last written exactly 2^32-2
// operations ago would be mistaken for a new one.
struct tagged {
  struct arrived { pair half[2]; };
  static const u32 size = 32;
  DEVICE u64 place(const layout &at, u64 epoch) { return at.tagged + (epoch & 1) * at.tagged_size; }
  DEVICE void put(char *to, const pack &v, u32 tag) {
    store(to, (u64)tag << 32 | v.word[0], (u64)tag << 32 | v.word[1]);
    store(to + 16, (u64)tag << 32 | v.word[2], (u64)tag << 32 | v.word[3]);
  }
  DEVICE arrived look(const char *from) { return {{load_pair(from), load_pair(from + 16)}}; }
  DEVICE bool ready(const arrived &v, u32 tag) {
    return v.half[0].word[0] >> 32 == tag && v.half[0].word[1] >> 32 == tag && v.half[1].word[0] >> 32 == tag &&
           v.half[1].word[1] >> 32 == tag;
  }
  DEVICE void clear(char *) {}
  DEVICE pack value(const arrived &v) {
    return {{(u32)v.half[0].word[0], (u32)v.half[0].word[1], (u32)v.half[1].word[0], (u32)v.half[1].word[1]}};
  }
};

// The operation as a thread sees it.
struct operation {
  u64 epoch;
  bool alive; // false after an abort: the thread only joins the barriers
  DEVICE u32 tag(const operation &o) { return (u32)o.epoch; }
};

DEVICE operation begin(const world &w) {
  const state *own = (const state *)w.scratch[w.rank];
  return {load64(&own->epoch[block()]), load32(&own->broken) == 0};
}

// Increments the epoch for the next kernel, once the whole block has read it. Zero is not a tag.
DEVICE void advance(const world &w, const operation &o) {
  barrier();
  u64 next = o.epoch + 1;
  if ((u32)next == 0) next += 2;
  state *own = (state *)w.scratch[w.rank];
  for (u32 b = block() + thread() * blocks(); b < max_blocks; b += threads() * blocks()) store64(&own->epoch[b], next);
}

// Tells all peers that this rank does not complete the operation of this epoch. Peers end waits of this epoch and of
// later ones; earlier operations can still complete.
DEVICE void leave(const world &w, u64 epoch, u32 peer) {
  for (u32 p = 0; p < w.ranks; p++)
    if (p != w.rank) store64(&((state *)w.scratch[p])->gone[w.rank], gone_of(epoch, peer));
}

// Whether to continue a wait for a peer that began at `since` and has polled `tries` times. The first thread that
// aborts reports the reason to the host, makes the rank's other threads abort, and tells the peers, unless a peer told
// this rank.
DEVICE bool patient(const world &w, const call &c, const operation &o, u32 peer, u32 tries, u64 &since) {
  state *own = (state *)w.scratch[w.rank];
  if (load32(&own->broken)) return false;
  u32 reason = 0;
  for (u32 p = 0; p < w.ranks; p++) {
    const u64 gone = load64(&own->gone[p]);
    if (gone && o.epoch >= gone >> 8) reason = (1 + p) << 8 | (gone & 0xff);
  }
  const bool told = reason;
  u64 now = nanoseconds();
  if (since == 0) since = now;
  if (!told) {
    // Of the waiting threads, one asks the host.
    if (!asks_host(tries) || lane() != __builtin_ctz(active_lanes())) return true;
    reason = now - since > load64(&w.host->limit) ? timed_out : asked;
    if (reason == asked && !load32(&w.host->abort)) return true;
  }
  if (set_once(&own->broken) == 0) {
    if (!told) leave(w, o.epoch, peer);
    store32(&w.host->rank, w.rank);
    store32(&w.host->peer, peer);
    store32(&w.host->code, c.code);
    store32(&w.host->reason, reason);
    store64(&w.host->epoch, o.epoch);
    fence_system();
    store32(&w.host->told, 1);
  }
  return false;
}

// The index of rank `from` among the peers of rank `to`.
DEVICE u32 seat(u32 from, u32 to) { return from < to ? from : from - 1; }

// Whether this rank gets the result of a reduction. With the kernels pair, add and twice all ranks get it.
DEVICE bool keeps(const world &w, const call &c) { return c.keeper >= max_ranks || c.keeper == w.rank; }

// The rank `step` ranks after this one.
DEVICE u32 after(const world &w, u32 step) {
  const u32 p = w.rank + step;
  return p < w.ranks ? p : p - w.ranks;
}

// The number of bytes of piece p.
DEVICE u64 piece(const call &c, u32 p) {
  u64 start = p * c.send_stride;
  return start < c.total ? least(c.bytes, c.total - start) : 0;
}
DEVICE u64 packs(u64 bytes) { return (bytes + 15) / 16; }
DEVICE u64 whole_packs(const call &c, u64 bytes) { return c.aligned ? bytes / 16 : 0; }

// Copies packs: put(i, get(i)). Both learn whether the pack is whole.
template <typename G, typename P> DEVICE void copy(u64 first, u64 middle, u64 last, u64 step, G get, P put) {
  const u32 U = 4;
  go_through<U>(
      first, middle, last, step,
      [&](u64 i) {
        pack v[U];
#pragma unroll
        for (u32 u = 0; u < U; u++)
          if (i + u * step < middle) v[u] = get(i + u * step, whole());
#pragma unroll
        for (u32 u = 0; u < U; u++)
          if (i + u * step < middle) put(i + u * step, v[u], whole());
      },
      [&](u64 i) { put(i, get(i, ragged()), ragged()); });
}

// Sends the packs of a piece to every peer, beginning with the rank after this one.
template <typename W> DEVICE void push(const world &w, const call &c, const operation &o) {
  if (!o.alive) return;
  const u64 place = W::place(w.places, o.epoch), size = packs(c.bytes) * W::size;
#pragma unroll 1
  for (u32 step = 1; step < w.ranks; step++) {
    const u32 p = after(w, step);
    const u64 bytes = piece(c, p), n = packs(bytes);
    const char *from = c.send + p * c.send_stride;
    char *to = w.scratch[p] + place + seat(w.rank, p) * size;
    copy(thread_index(), whole_packs(c, bytes), n, thread_count(),
         [&](u64 i, auto shape) { return read(from + i * 16, bytes - i * 16, shape); },
         [&](u64 i, const pack &v, auto) { W::put(to + i * W::size, v, o.tag(o)); });
  }
}

// Up to N packs that are in flight to this rank, a stride apart.
template <typename W, u32 N> struct arrivals {
  char *base;
  u64 stride;
  u32 count;
  typename W::arrived v[N];
  DEVICE char *at(const arrivals &a, u32 k) { return a.base + k * a.stride; }
  DEVICE pack take(const arrivals &a, u32 k) {
    W::clear(at(a, k));
    return W::value(a.v[k]);
  }
};

// Waits until the packs have arrived; peer(k) is the sender of pack k.
template <typename W, u32 N, typename P>
DEVICE void await(const world &w, const call &c, operation &o, arrivals<W, N> &a, P peer) {
  u64 since = 0;
  u32 missing = 0;
#pragma unroll
  for (u32 k = 0; k < N; k++)
    if (k < a.count) a.v[k] = W::look(a.at(a, k));
  for (u32 tries = 1;; tries++) {
    bool here = true;
#pragma unroll
    for (u32 k = 0; k < N; k++) {
      const bool ready = k >= a.count || W::ready(a.v[k], o.tag(o));
      missing = ready ? missing : k;
      here &= ready;
    }
    if (here) return;
    if (due(tries) && !patient(w, c, o, peer(missing), tries, since)) {
      o.alive = false;
      return;
    }
#pragma unroll
    for (u32 k = 0; k < N; k++)
      if (k < a.count) a.v[k] = W::look(a.at(a, k));
  }
}

// The inputs of a reduction in one kernel: this rank's own piece, with its size in bytes, and the pieces of the peers,
// with their size on the wire.
struct share {
  u64 bytes, size;
  const char *own;
  char *in;
};
template <typename W> DEVICE share share_of(const world &w, const call &c, const operation &o) {
  return {piece(c, w.rank), packs(c.bytes) * W::size, c.send + w.rank * c.send_stride, w.scratch[w.rank] + W::place(w.places, o.epoch)};
}
// The rank with this index among the peers.
DEVICE u32 sitting(const world &w, u32 seat) { return seat < w.rank ? seat : seat + 1; }

// Reduces pack i of all ranks, of any alignment and length, one peer after the other. Like the functions below, it
// calls each(i, left, result, shape) with the result.
template <typename T, typename W, typename F>
DEVICE void reduce_in_turn(const world &w, const call &c, operation &o, const share &p, u32 op, u64 i, F each) {
  if (!o.alive) return;
  const u64 left = p.bytes - i * 16;
  const pack mine = read(p.own + i * 16, left, ragged());
  lanes<T> sum;
#pragma unroll 1
  for (u32 s = 0; s < w.ranks; s++) {
    pack v = mine;
    if (s != w.rank) {
      arrivals<W, 1> a = {p.in + seat(s, w.rank) * p.size + i * W::size, 0, 1};
      await(w, c, o, a, [=](u32) { return s; });
      if (!o.alive) return;
      v = a.take(a, 0);
    }
    if (s == 0) sum = widen<T>(v);
    if (s > 0 || op == any || op == all) combine<T>(op, sum, v); // normalizes a byte to a truth value
  }
  each(i, left, finish<T>(c.reduction, sum, w.ranks), ragged());
}

// Adds the whole pack i of more than two ranks.
template <typename T, typename W, typename F>
DEVICE void add_many(const world &w, const call &c, operation &o, const share &p, u64 i, F each) {
  if (!o.alive) return;
  arrivals<W, max_ranks - 1> a = {p.in + i * W::size, p.size, w.ranks - 1};
  const pack mine = read(p.own + i * 16, 16, whole());
  await(w, c, o, a, [&](u32 k) { return sitting(w, k); });
  if (!o.alive) return;
  lanes<T> sum;
#pragma unroll
  for (u32 s = 0; s < max_ranks; s++) {
    if (s < w.ranks) {
      pack v;
#pragma unroll
      for (u32 l = 0; l < 4; l++) {
        const u32 before = s > 0 ? W::value(a.v[s - 1 + (s == 0)]).word[l] : 0;
        const u32 at = s + 1 < max_ranks ? W::value(a.v[s - (s + 1 == max_ranks)]).word[l] : 0;
        v.word[l] = s == w.rank ? mine.word[l] : s < w.rank ? at : before;
      }
      if (s == 0) sum = widen<T>(v);
      else combine<T>(reduction::sum, sum, v);
    }
  }
#pragma unroll
  for (u32 k = 0; k < max_ranks - 1; k++)
    if (k < a.count) W::clear(a.at(a, k));
  each(i, 16, finish<T>(c.reduction, sum, w.ranks), whole());
}

// Reduces the last pack of an aligned piece if it is partial.
template <typename T, typename W, typename F>
DEVICE void add_rest(const world &w, const call &c, operation &o, const share &p, F each) {
  const u64 middle = p.bytes / 16;
  if (p.bytes % 16 != 0 && thread_index() == middle % thread_count()) reduce_in_turn<T, W>(w, c, o, p, sum, middle, each);
}

// In the kernels reduce, pair and add every rank gets the reduction of its piece. If all pieces are the same, this is
// an allreduce. reduce handles all shapes.
template <typename T, typename W> DEVICE void reduce(const world &w, const call &c) {
  operation o = begin(w);
  push<W>(w, c, o);
  advance(w, o);
  const share p = share_of<W>(w, c, o);
  const u64 n = packs(p.bytes);
#pragma unroll 1
  for (u64 i = thread_index(); i < n; i += thread_count())
    reduce_in_turn<T, W>(w, c, o, p, c.reduction, i, [&](u64 i, u64 left, const pack &v, auto shape) {
      if (keeps(w, c)) write(c.recv + i * 16, left, v, shape);
    });
}

// pair adds aligned pieces of two ranks, a few packs of a thread together. It loads the packs that it sends before it
// knows the epoch.
template <typename T, typename W> DEVICE void pair_up(const world &w, const call &c) {
  const u32 U = 4, n = (u32)(c.bytes / 16), first = (u32)thread_index(), step = (u32)thread_count(), peer = 1 - w.rank;
  const char *from = c.send + peer * c.send_stride, *own = c.send + w.rank * c.send_stride;
  start();
  pack v[U];
#pragma unroll
  for (u32 u = 0; u < U; u++)
    if (first + u * step < n) v[u] = *(const pack *)(from + (u64)(first + u * step) * 16);
  operation o = begin(w);
  const u64 place = W::place(w.places, o.epoch);
  char *out = w.scratch[peer] + place, *in = w.scratch[w.rank] + place;
  if (o.alive) {
#pragma unroll 1
    for (u32 i = first; i < n;) {
#pragma unroll
      for (u32 u = 0; u < U; u++)
        if (i + u * step < n) W::put(out + (u64)(i + u * step) * 16, v[u], 0);
      i += U * step;
#pragma unroll
      for (u32 u = 0; u < U; u++)
        if (i + u * step < n) v[u] = *(const pack *)(from + (u64)(i + u * step) * 16);
    }
    if (c.bytes % 16 != 0 && first == n % step) W::put(out + (u64)n * 16, read(from + (u64)n * 16, c.bytes % 16, ragged()), 0);
  }
  advance(w, o);
#pragma unroll 1
  for (u32 i = first; i < n && o.alive; i += U * step) {
    arrivals<W, U> a = {in + (u64)i * 16, (u64)step * 16, 0};
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if (i + u * step < n) a.count = u + 1, v[u] = *(const pack *)(own + (u64)(i + u * step) * 16);
    await(w, c, o, a, [=](u32) { return peer; });
    if (!o.alive) return;
#pragma unroll
    for (u32 u = 0; u < U; u++) {
      if (u < a.count) {
        pack theirs = a.take(a, u);
#pragma unroll
        for (u32 l = 0; l < 4; l++) {
          const u32 mine = v[u].word[l];
          v[u].word[l] = w.rank == 0 ? mine : theirs.word[l];
          theirs.word[l] = w.rank == 0 ? theirs.word[l] : mine;
        }
        lanes<T> sum = widen<T>(v[u]);
        combine<T>(reduction::sum, sum, theirs);
        *(pack *)(c.recv + (u64)(i + u * step) * 16) = finish<T>(c.reduction, sum, 2);
      }
    }
  }
  const share p = {c.bytes, 0, own, in};
  add_rest<T, W>(w, c, o, p, [&](u64 i, u64 left, const pack &v, auto shape) { write(c.recv + i * 16, left, v, shape); });
}

// add adds aligned pieces of more than two ranks.
template <typename T, typename W> DEVICE void add(const world &w, const call &c) {
  start();
  operation o = begin(w);
  push<W>(w, c, o);
  advance(w, o);
  const share p = share_of<W>(w, c, o);
  auto keep = [&](u64 i, u64 left, const pack &v, auto shape) { write(c.recv + i * 16, left, v, shape); };
  for (u64 i = thread_index(); i < p.bytes / 16; i += thread_count()) add_many<T, W>(w, c, o, p, i, keep);
  add_rest<T, W>(w, c, o, p, keep);
}

// twice is an allreduce of more than two ranks: each rank reduces one piece and sends it to all. Only the last piece
// may be shorter.
template <typename T, typename W> DEVICE void twice(const world &w, const call &c) {
  operation o = begin(w);
  push<W>(w, c, o);
  advance(w, o);
  const share p = share_of<W>(w, c, o);
  // The second stage follows the first in memory.
  const u64 second = W::place(w.places, o.epoch) + (w.ranks - 1) * p.size;
  auto pass_on = [&](u64 i, u64 left, const pack &v, auto shape) {
#pragma unroll 1
    for (u32 step = 1; step < w.ranks; step++) {
      const u32 p2 = after(w, step);
      W::put(w.scratch[p2] + second + seat(w.rank, p2) * p.size + i * W::size, v, o.tag(o));
    }
    write(c.recv + w.rank * c.recv_stride + i * 16, left, v, shape);
  };
  const u64 middle = c.aligned && (c.reduction == sum || c.reduction == average) ? p.bytes / 16 : 0;
  u64 next = thread_index();
  for (; next < middle; next += thread_count()) add_many<T, W>(w, c, o, p, next, pass_on);
#pragma unroll 1
  for (; next < packs(p.bytes); next += thread_count()) reduce_in_turn<T, W>(w, c, o, p, c.reduction, next, pass_on);
  const u64 most = packs(c.bytes), short_piece = piece(c, w.ranks - 1);
  for (u64 i = thread_index(); i < most && o.alive; i += thread_count()) {
    const bool all_have = i < packs(short_piece) || w.rank == w.ranks - 1;
    arrivals<W, max_ranks - 1> a = {w.scratch[w.rank] + second + i * W::size, p.size, all_have ? w.ranks - 1 : w.ranks - 2};
    await(w, c, o, a, [&](u32 k) { return sitting(w, k); });
    if (!o.alive) return;
#pragma unroll
    for (u32 k = 0; k < max_ranks - 1; k++) {
      if (k < a.count) {
        const u32 s = sitting(w, k);
        const u64 left = piece(c, s) - i * 16;
        char *to = c.recv + s * c.recv_stride + i * 16;
        const pack v = a.take(a, k);
        if (c.aligned && left >= 16) write(to, left, v, whole());
        else write(to, left, v, ragged());
      }
    }
  }
}

// The number of packs that rank `from` sends to rank `to`.
DEVICE u64 sent(const call &c, u32 from, u32 to) { return c.root < max_ranks && c.root != from ? 0 : packs(piece(c, to)); }

// Copies packs first to last of this rank's piece to itself.
DEVICE void keep_own(const world &w, const call &c, u64 first, u64 last, u64 step) {
  const char *from = c.send + w.rank * c.send_stride;
  char *to = c.recv + w.rank * c.recv_stride;
  if (from == to || !sent(c, w.rank, w.rank)) return;
  const u64 bytes = piece(c, w.rank);
  copy(first, least(whole_packs(c, bytes), last), last, step,
       [&](u64 i, auto shape) { return read(from + i * 16, bytes - i * 16, shape); },
       [&](u64 i, const pack &v, auto shape) { write(to + i * 16, bytes - i * 16, v, shape); });
}

// move: every rank gets a piece of every rank, or of the root. A rank without data announces that, because every rank
// must hear from all in every epoch.
DEVICE void move(const world &w, const call &c) {
  typedef tagged W;
  start();
  operation o = begin(w);
  const u64 place = W::place(w.places, o.epoch), size = (packs(c.bytes) + 1) * W::size;
  if (o.alive) {
#pragma unroll 1
    for (u32 step = 1; step < w.ranks; step++) {
      const u32 p = after(w, step);
      const u64 bytes = piece(c, p), n = sent(c, w.rank, p);
      const char *from = c.send + p * c.send_stride;
      char *to = w.scratch[p] + place + seat(w.rank, p) * size;
      if (n == 0 && thread_index() == 0) W::put(to, pack{{0, 0, 0, 0}}, o.tag(o));
      copy(thread_index(), least(whole_packs(c, bytes), n), n, thread_count(),
           [&](u64 i, auto shape) { return read(from + i * 16, bytes - i * 16, shape); },
           [&](u64 i, const pack &v, auto) { W::put(to + i * W::size, v, o.tag(o)); });
    }
  }
  advance(w, o);
  if (o.alive) keep_own(w, c, thread_index(), packs(piece(c, w.rank)), thread_count());
#pragma unroll 1
  for (u32 s = 0; s < w.ranks; s++) {
    if (s == w.rank) continue;
    const u64 bytes = piece(c, w.rank), n = sent(c, s, w.rank);
    char *in = w.scratch[w.rank] + place + seat(s, w.rank) * size, *to = c.recv + s * c.recv_stride;
    for (u64 i = thread_index(); i < (n ? n : 1) && o.alive; i += thread_count()) {
      arrivals<W, 1> a = {in + i * W::size, 0, 1};
      await(w, c, o, a, [=](u32) { return s; });
      if (o.alive && n) {
        if (i < whole_packs(c, bytes)) write(to + i * 16, 16, W::value(a.v[0]), whole());
        else write(to + i * 16, bytes - i * 16, W::value(a.v[0]), ragged());
      }
    }
  }
}

// The rings. For each stage and peer, a warp has a few slots of chunks in two places, selected by the epoch. Chunks of
// a piece are dealt to the warps in turn. The warps with the same number on all ranks form a line. In a round a line
// writes its chunk, reads its peers' chunks of the round before, and then announces its own. A slot is filled again
// three or more rounds later, when the peers have read it.
//
// A line waits for the same line of its peers; in other kernels a block waits for the same block. A kernel has at most
// as many blocks as fit on every GPU at once (planner.resident). If other kernels occupy that room, this one still
// ends, because GPUs start blocks in ascending order.
struct line {
  u32 index, lane;
  u64 rounds;
  bool alive; // the same in all lanes
};
DEVICE line line_of(const world &w, const call &c, const operation &o) {
  const u32 warps = threads() / 32;
  const u64 stripe = (u64)blocks() * warps * w.places.chunk;
  return {block() * warps + thread() / 32, thread() % 32, (packs(c.bytes) + stripe - 1) / stripe, all_lanes(o.alive)};
}
DEVICE u64 slot_at(const world &w, const operation &o, const line &l, u32 stage, u64 round, u32 seat) {
  u64 slot = ((2 * stage + (o.epoch & 1)) * w.places.lines + l.index) * ring_slots + round % ring_slots;
  return w.places.ring + (slot * (w.ranks - 1) + seat) * w.places.ring_slot;
}
// The number of a peer's chunks that have arrived. It only grows.
DEVICE u64 *flag_at(const world &w, const line &l, u32 rank, u32 stage, u32 seat) {
  return (u64 *)(w.scratch[rank] + flags_at) + (stage * max_lines + l.index) * max_ranks + seat;
}
DEVICE u64 count(const operation &o, u64 round) { return o.epoch << 20 | (round + 1); }

// Announces to all peers that the line has written its chunks so far.
DEVICE void tell(const world &w, const operation &o, const line &l, u32 stage, u64 round) {
  if (l.lane >= w.ranks - 1) return;
  const u32 p = l.lane + (l.lane >= w.rank);
  release64(flag_at(w, l, p, stage, seat(w.rank, p)), count(o, round));
}

// Waits for a chunk of the lane's peer, if it has one. Returns false if the lane aborts.
DEVICE bool arrived(const world &w, const call &c, const operation &o, const line &l, u32 stage, u64 round) {
  if (l.lane >= w.ranks - 1) return true;
  u64 since = 0, now = 0;
  const u64 *flag = flag_at(w, l, w.rank, stage, l.lane);
  for (u32 tries = 1;; tries++) {
    now = acquire64(flag);
    if (now >= count(o, round)) break;
    if (due(tries) && !patient(w, c, o, l.lane + (l.lane >= w.rank), tries, since)) return false;
  }
  return true;
}

// Waits for a chunk of every peer. Returns false if the line aborts.
DEVICE bool hear(const world &w, const call &c, const operation &o, line &l, u32 stage, u64 round) {
  const bool here = arrived(w, c, o, l, stage, round);
  l.alive = all_lanes(here);
  warp_barrier();
  return l.alive;
}

// The packs of a piece that a line handles in one round.
struct part { u64 first, last; };
DEVICE part part_of(const world &w, const line &l, u64 n, u64 round) {
  u64 first = (round * blocks() * (threads() / 32) + l.index) * w.places.chunk;
  return {least(first, n), least(first + w.places.chunk, n)};
}

// Fills this round's slots on the peers with their pieces.
DEVICE void fill(const world &w, const call &c, const operation &o, const line &l, u64 round) {
#pragma unroll 1
  for (u32 step = 1; step < w.ranks; step++) {
    const u32 p = after(w, step);
    const u64 bytes = piece(c, p);
    const part range = part_of(w, l, sent(c, w.rank, p), round);
    const char *from = c.send + p * c.send_stride;
    char *to = w.scratch[p] + slot_at(w, o, l, 0, round, seat(w.rank, p)) - range.first * 16;
    copy(range.first + l.lane, least(whole_packs(c, bytes), range.last), range.last, 32,
         [&](u64 i, auto shape) { return read(from + i * 16, bytes - i * 16, shape); },
         [&](u64 i, const pack &v, auto) { *(pack *)(to + i * 16) = v; });
  }
}

// Reduces U packs from i on, below n, which have arrived from all ranks. `onward` also sends the result to all.
template <typename T, u32 U, typename S>
DEVICE void reduce_here(const world &w, const call &c, const operation &o, const line &l, u64 round, const part &range, u64 i, u64 n, bool onward, S shape) {
  const u64 bytes = piece(c, w.rank);
  const char *own = c.send + w.rank * c.send_stride;
  char *to = c.recv + w.rank * c.recv_stride;
  lanes<T> sum[U];
#pragma unroll 1
  for (u32 s = 0; s < w.ranks; s++) {
    const char *in = w.scratch[w.rank] + slot_at(w, o, l, 0, round, seat(s, w.rank)) - range.first * 16;
    pack p[U];
#pragma unroll
    for (u32 u = 0; u < U; u++) {
      const u64 k = i + u * 32;
      if (k < n) p[u] = s == w.rank ? read(own + k * 16, bytes - k * 16, shape) : load(in + k * 16);
    }
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if (s == 0) sum[u] = widen<T>(p[u]);
      else combine<T>(U > 1 ? reduction::sum : c.reduction, sum[u], p[u]);
  }
#pragma unroll
  for (u32 u = 0; u < U; u++) {
    const u64 k = i + u * 32;
    if (k < n) {
      pack v = finish<T>(c.reduction, sum[u], w.ranks);
      if (keeps(w, c)) write(to + k * 16, bytes - k * 16, v, shape);
#pragma unroll 1
      for (u32 step = 1; onward && step < w.ranks; step++) {
        const u32 p = after(w, step);
        *(pack *)(w.scratch[p] + slot_at(w, o, l, 1, round, seat(w.rank, p)) + (k - range.first) * 16) = v;
      }
    }
  }
}

// Reduces this rank's packs of a round.
template <typename T> DEVICE void reduce_round(const world &w, const call &c, const operation &o, const line &l, u64 round, bool onward) {
  const u64 bytes = piece(c, w.rank);
  const part range = part_of(w, l, packs(bytes), round);
  const bool sums = T::size > 1 && (c.reduction == sum || c.reduction == average);
  const u64 middle = sums ? least(whole_packs(c, bytes), range.last) : 0;
  const u32 U = T::size < 4 ? 2 : 4;
  auto fast = [&](u64 i) { reduce_here<T, U>(w, c, o, l, round, range, i, middle, onward, whole()); };
  auto slow = [&](u64 i) { reduce_here<T, 1>(w, c, o, l, round, range, i, range.last, onward, ragged()); };
  if constexpr (T::size > 1) go_through<U>(range.first + l.lane, middle, range.last, 32, fast, slow);
  else go_through<U>(range.first + l.lane, 0, range.last, 32, [](u64) {}, slow);
}

// Copies the packs that the peers sent in a round to the output. At stage 1 these are the peers' reduced pieces, at
// stage 0 the pieces for this rank.
DEVICE void collect(const world &w, const call &c, const operation &o, const line &l, u32 stage, u64 round) {
#pragma unroll 1
  for (u32 s = 0; s < w.ranks; s++) {
    if (s == w.rank) continue;
    const u64 bytes = piece(c, stage ? s : w.rank);
    const part range = part_of(w, l, stage ? packs(bytes) : sent(c, s, w.rank), round);
    const char *in = w.scratch[w.rank] + slot_at(w, o, l, stage, round, seat(s, w.rank)) - range.first * 16;
    char *to = c.recv + s * c.recv_stride;
    copy(range.first + l.lane, least(whole_packs(c, bytes), range.last), range.last, 32,
         [&](u64 i, auto) { return load(in + i * 16); },
         [&](u64 i, const pack &v, auto shape) {
           if (keeps(w, c)) write(to + i * 16, bytes - i * 16, v, shape);
         });
  }
}

// ring is reduce over the rings; if recv has a stride, it is twice.
template <typename T> DEVICE void ring(const world &w, const call &c) {
  operation o = begin(w);
  advance(w, o);
  line l = line_of(w, c, o);
  const bool onward = c.recv_stride != 0;
  const u64 last = l.rounds + (onward ? 2 : 1);
  for (u64 k = 0; k < last && l.alive; k++) {
    const bool fills = k < l.rounds, reduces = k >= 1 && k - 1 < l.rounds;
    if (fills) fill(w, c, o, l, k);
    if (reduces) {
      if (!hear(w, c, o, l, 0, k - 1)) return;
      reduce_round<T>(w, c, o, l, k - 1, onward);
    }
    if (onward && k >= 2) {
      if (!hear(w, c, o, l, 1, k - 2)) return;
      collect(w, c, o, l, 1, k - 2);
    }
    warp_barrier();
    if (fills) tell(w, o, l, 0, k);
    if (reduces && onward) tell(w, o, l, 1, k - 1);
  }
}

// move_ring is move over the rings.
DEVICE void move_ring(const world &w, const call &c) {
  operation o = begin(w);
  advance(w, o);
  line l = line_of(w, c, o);
  for (u64 k = 0; k < l.rounds + 1 && l.alive; k++) {
    if (k < l.rounds) fill(w, c, o, l, k);
    if (k >= 1) {
      if (!hear(w, c, o, l, 0, k - 1)) return;
      const part own = part_of(w, l, packs(piece(c, w.rank)), k - 1);
      keep_own(w, c, own.first + l.lane, own.last, 32);
      collect(w, c, o, l, 0, k - 1);
    }
    warp_barrier();
    if (k < l.rounds) tell(w, o, l, 0, k);
  }
}

// post puts a list into the memory of the peers if the kernel that made the list has not. The list has c.bytes
// entries, or as many as the word at c.recv says.
DEVICE void post(const world &w, const call &c) {
  const shared_lists *own = (const shared_lists *)c.send;
  const sharing others(own);
  const char *list = (const char *)own + own->list(w.rank) + 16;
  const u32 count = c.recv ? *(const u32 *)c.recv : (u32)c.bytes, n = (u32)least(least(count, c.bytes), others.room);
  for (u64 i = thread_index(); i < n; i += thread_count()) others.put((u32)i, ((const i32 *)list)[i], ((const float *)list)[own->room + i]);
  if (thread_index() == 0) others.tell(count, (u32)c.bytes);
}

// receive copies the lists of the peers from their places of arrival. It uses no place of other operations and so does
// not increment their epoch.
DEVICE void receive(const world &w, const call &c) {
  typedef sentinel64 W;
  const u32 U = 4;
  static SHARED u32 counts[max_ranks], notes[max_ranks];
  static SHARED bool here[max_ranks];
  start_behind();
  operation o = begin(w);
  shared_lists *own = (shared_lists *)c.send;
  const u64 epoch = load64(&own->epoch[block()]);
  const u32 peer = thread();
  if (peer < w.ranks) {
    u64 since = 0, count = 0, note = 0;
    here[peer] = o.alive;
    for (u32 tries = 1; peer != w.rank && here[peer]; tries++) {
      count = load64(&own->counts[epoch & 1][peer]), note = load64(&own->notes[epoch & 1][peer]);
      if (count >> 32 == (u32)epoch && note >> 32 == (u32)epoch) break;
      if (due(tries) && !patient(w, c, o, peer, tries, since)) here[peer] = false;
    }
    counts[peer] = (u32)count, notes[peer] = (u32)note;
  }
  barrier();
  for (u32 p = 0; p < w.ranks; p++) o.alive &= here[p];
  for (u32 b = block() + thread() * blocks(); b < max_share_blocks; b += threads() * blocks()) store64(&own->epoch[b], epoch + 1);
  const u64 step = thread_count();
#pragma unroll 1
  for (u32 p = 0; p < w.ranks; p++) {
    if (p == w.rank) continue;
    char *from = (char *)own + own->place(epoch, p), *to = (char *)own + own->list(p);
    if (thread_index() == 0) *(pack *)to = {{notes[p] & ~(1u << 31), notes[p] >> 31, 0, 0}};
    u64 *idx = (u64 *)(to + 16), *val = (u64 *)(to + 16 + 4 * own->room);
    const u64 n = (least(counts[p], own->room) + 1) / 2;
#pragma unroll 1
    for (u64 i = thread_index(); i < n && o.alive; i += U * step) {
      arrivals<W, U> a = {from + i * 16, step * 16, 0};
#pragma unroll
      for (u32 u = 0; u < U; u++)
        if (i + u * step < n) a.count = u + 1;
      await(w, c, o, a, [=](u32) { return p; });
      if (!o.alive) break;
#pragma unroll
      for (u32 u = 0; u < U; u++) {
        if (u >= a.count) continue;
        const pack v = a.take(a, u);
        idx[i + u * step] = (u64)v.word[2] << 32 | v.word[0], val[i + u * step] = (u64)v.word[3] << 32 | v.word[1];
      }
    }
  }
  if (!o.alive) store32(&own->closed, 1);
}

#include "rounded.cuh"

#define BOUNDED(name, run, width, blocks)                                                                            \
  KERNEL BOUNDS(width, blocks) name(launch l) {                                                                      \
    l.c.idle ? start_behind() : run(l.w, l.c);                                                                       \
  }
#define OPERATION(name, run) BOUNDED(name, run, max_width, 1)

OPERATION(pair_f64, (pair_up<f64_element, sentinel64>))
OPERATION(pair_f32, (pair_up<f32_element, sentinel32>))
OPERATION(pair_f16, (pair_up<f16_element, sentinel32>))
OPERATION(pair_bf16, (pair_up<bf16_element, sentinel32>))
OPERATION(add_f64, (add<f64_element, sentinel64>))
OPERATION(add_f32, (add<f32_element, sentinel32>))
OPERATION(add_f16, (add<f16_element, sentinel32>))
OPERATION(add_bf16, (add<bf16_element, sentinel32>))
OPERATION(move, move)

// Tells the peers of an abort when the host aborts between operations.
KERNEL leave_all(launch l) {
  if (!l.c.idle && thread_index() == 0) leave(l.w, begin(l.w).epoch, ~0u);
}

OPERATION(reduce_f64, (reduce<f64_element, sentinel64>))
OPERATION(reduce_f32, (reduce<f32_element, sentinel32>))
OPERATION(reduce_f16, (reduce<f16_element, sentinel32>))
OPERATION(reduce_bf16, (reduce<bf16_element, sentinel32>))
OPERATION(reduce_e4m3, (reduce<e4m3_element, tagged>))
OPERATION(reduce_e5m2, (reduce<e5m2_element, tagged>))
OPERATION(reduce_i64, (reduce<i64_element, tagged>))
OPERATION(reduce_i32, (reduce<i32_element, tagged>))
OPERATION(reduce_i16, (reduce<i16_element, tagged>))
OPERATION(reduce_i8, (reduce<i8_element, tagged>))

OPERATION(twice_f64, (twice<f64_element, sentinel64>))
OPERATION(twice_f32, (twice<f32_element, sentinel32>))
OPERATION(twice_f16, (twice<f16_element, sentinel32>))
OPERATION(twice_bf16, (twice<bf16_element, sentinel32>))

OPERATION(ring_f64, ring<f64_element>)
OPERATION(ring_f32, ring<f32_element>)
OPERATION(ring_f16, ring<f16_element>)
OPERATION(ring_bf16, ring<bf16_element>)
OPERATION(ring_e4m3, ring<e4m3_element>)
OPERATION(ring_e5m2, ring<e5m2_element>)
OPERATION(ring_i64, ring<i64_element>)
OPERATION(ring_i32, ring<i32_element>)
OPERATION(ring_i16, ring<i16_element>)
OPERATION(ring_i8, ring<i8_element>)

OPERATION(move_ring, move_ring)
OPERATION(post_list, post)
OPERATION(receive_lists, receive)
BOUNDED(rounded_i8, (round_pieces<i8_code, false>), rounded_width, 2)
BOUNDED(rounded_e4m3, (round_pieces<e4m3_code, false>), rounded_width, 2)
BOUNDED(ragged_i8, (round_pieces<i8_code, true>), rounded_width, 2)
BOUNDED(ragged_e4m3, (round_pieces<e4m3_code, true>), rounded_width, 2)
