// Lists that the ranks of a machine write into each other's memory (backend.SharedLists). The kernel that makes a
// rank's list also writes it to a place in the memory of each peer: words of an index and a value, which have arrived
// when they differ from the sentinel, and a word with the length. The peer reads them (receive in
// comm/p2p/kernels/p2p.cu), restores the sentinel, and increments its epoch. A rank that writes a list of epoch e has
// received the lists of e-1. Each peer wrote those after it had received the lists of e-2, so two places suffice.
// comm/p2p/model checks this.
#pragma once
#include "tutti.cuh"

enum { max_sharers = 8, max_share_blocks = 256 };
enum : u64 { shared_head = 4096 };

// The head of a rank's memory of lists.
struct shared_lists {
  u64 epoch[max_share_blocks]; // epoch of the next lists; all equal between kernels
  u64 counts[2][max_sharers];  // by place and rank, as told by it: the number of entries written
  u64 notes[2][max_sharers];   // by place and rank: length and mark of the list
  u64 rank, ranks, room;       // room: capacity of a list in entries, a multiple of 4
  char *memory[max_sharers];   // of each rank, as mapped on this one
  u32 closed;                  // 1 after an abort: the rank writes no more, since a peer may be reading

  static METHOD u64 told(u64 epoch, u32 v) { return epoch << 32 | v; }
  // The length, which may exceed the room, and whether the list is marked.
  static METHOD u32 note(u32 length, bool marked) { return (u32)marked << 31 | length; }
  // The offset in every rank's memory at which the list of rank `from` arrives in an epoch.
  METHOD u64 place(u64 epoch, u64 from) const { return shared_head + ((epoch & 1) * ranks + from) * room * 8; }
  // The offset at which this rank keeps the received list: 16 bytes of header, the indices and the values. The first
  // word is the length; the second is not zero if the list is marked.
  METHOD u64 list(u64 from) const { return shared_head + 16 * ranks * room + from * (16 + 8 * room); }
};

// sharing is used by a kernel that makes a rank's list.
struct sharing {
  const shared_lists *own; // 0: the list is not shared
  u64 epoch, place;
  u32 room; // the places of other ranks follow; 0: the list is not shared
  METHOD sharing(const shared_lists *lists)
      : own(lists && !lists->closed ? lists : nullptr), epoch(own ? own->epoch[0] : 0), place(own ? own->place(epoch, own->rank) : 0),
        room(own ? (u32)own->room : 0) {}
  METHOD void put(u32 at, i32 index, float value) const {
    if (at >= room) return;
#pragma unroll 1
    for (u32 p = 0; p < own->ranks; p++)
      if (p != own->rank) store_system((u64 *)(own->memory[p] + place) + at, (u64)bits_of(value) << 32 | (u32)index);
  }
  // tell announces the number of entries to the peers, of which up to `room` are written. One thread calls it. Peers
  // read entries in pairs, so an odd number is padded.
  METHOD void tell(u32 count, u32 room) const {
    if (!own) return;
    const u32 written = count < room ? count : room, n = written < this->room ? written : this->room;
    const bool marked = ((const u32 *)((const char *)own + own->list(own->rank)))[1] != 0;
    if (n % 2) put(n, 0, 0);
    for (u32 p = 0; p < own->ranks; p++) {
      if (p == own->rank) continue;
      shared_lists *theirs = (shared_lists *)own->memory[p];
      store_system(&theirs->notes[epoch & 1][own->rank], shared_lists::told(epoch, shared_lists::note(count, marked)));
      store_system(&theirs->counts[epoch & 1][own->rank], shared_lists::told(epoch, n));
    }
  }
};
