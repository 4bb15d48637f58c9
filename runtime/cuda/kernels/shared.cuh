// Lists that the ranks of a machine write into each other's memory: backend.SharedLists.
// The kernel that makes a rank's list puts it into a place in the memory of each peer as well: words of an
// index and a value, which show that they are there by not being the sentinel, and a word that says how many.
// The peer takes them from there (receive in comm/p2p/kernels/p2p.cu), puts the sentinel back, and counts its epoch
// up. A rank that puts a list of epoch e has received those of e-1, which each peer has put after it had received
// those of e-2: so two places are enough. comm/p2p/model checks it.
#pragma once
#include "tutti.cuh"

enum { max_sharers = 8, max_share_blocks = 256 };
enum : u64 { shared_head = 4096 };

// What lies at the start of a rank's memory of lists.
struct shared_lists {
  u64 epoch[max_share_blocks]; // of the next lists; all the same between kernels
  u64 counts[2][max_sharers];  // by place and rank, as told: entries that are put
  u64 notes[2][max_sharers];   // the same: what the list is headed by
  u64 rank, ranks, room;       // entries that a list may have, a multiple of 4
  char *memory[max_sharers];   // of each rank, as this one reaches it
  u32 closed;                  // the rank has aborted, and may not write what a peer may be reading

  static METHOD u64 told(u64 epoch, u32 v) { return epoch << 32 | v; }
  // The length, which may be more than there is room for, and whether the list is marked.
  static METHOD u32 note(u32 length, bool marked) { return (u32)marked << 31 | length; }
  // Where in the memory of each rank a rank's list of an epoch arrives.
  METHOD u64 place(u64 epoch, u64 from) const { return shared_head + ((epoch & 1) * ranks + from) * room * 8; }
  // Where this rank has it then: 16 bytes, the indices and the values. The first word is the length, the second is not
  // zero if the list is marked.
  METHOD u64 list(u64 from) const { return shared_head + 16 * ranks * room + from * (16 + 8 * room); }
};

// sharing is for a kernel that makes a rank's list.
struct sharing {
  const shared_lists *own; // 0: no other rank gets the list
  u64 epoch, place;
  u32 room; // behind it are the places of other ranks; 0: no other rank gets the list
  METHOD sharing(const shared_lists *lists)
      : own(lists && !lists->closed ? lists : nullptr), epoch(own ? own->epoch[0] : 0), place(own ? own->place(epoch, own->rank) : 0),
        room(own ? (u32)own->room : 0) {}
  METHOD void put(u32 at, i32 index, float value) const {
    if (at >= room) return;
#pragma unroll 1
    for (u32 p = 0; p < own->ranks; p++)
      if (p != own->rank) store_system((u64 *)(own->memory[p] + place) + at, (u64)bits_of(value) << 32 | (u32)index);
  }
  // tell tells the peers how many entries there are, of which up to room are put, and is called by one thread. Two are
  // taken together.
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
