package diagnose

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/tutti-go/tutti/comm/record"
)

// WriteTorch writes the dumps of one job, sorted by rank, to a directory as
// PyTorch's analyser reads them (torch.distributed.flight_recorder.fr_trace): a
// pickle for each rank, named rank_0, rank_1, ….
//
// It puts in what no rank knows alone, the world's ranks of each communicator, and
// leaves out what that analyser would take for a fault: calls that were not made,
// calls that other ranks have forgotten, and messages, which it matches within
// groups of two ranks only. A collective that is done on one rank is done on all.
func WriteTorch(dir string, records []Record) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	for i, d := range forTorch(records) {
		content, err := pickle(d)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, fmt.Sprintf("rank_%d", records[i].Tutti.Rank)), content, 0o666)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func forTorch(records []Record) []record.Dump {
	members, first, done := map[string][]int{}, map[string]uint64{}, map[string]bool{}
	collective := func(e *record.Entry) string { return fmt.Sprint(e.ProcessGroup[0], " ", e.CollectiveSeq) }
	for _, d := range records {
		for name := range d.Tutti.Comms {
			members[name] = append(members[name], d.Tutti.Rank)
		}
		seen := map[string]bool{}
		for i := range d.Entries {
			e := &d.Entries[i]
			if e.P2P || e.Tutti.Left {
				continue
			}
			if name := e.ProcessGroup[0]; !seen[name] {
				seen[name], first[name] = true, max(first[name], e.CollectiveSeq)
			}
			if e.Completed != 0 {
				done[collective(e)] = true
			}
		}
	}
	out := make([]record.Dump, len(records))
	for i, d := range records {
		out[i] = *d.Dump
		out[i].Groups, out[i].Entries = map[string]record.Group{}, []record.Entry{}
		for name, g := range d.Groups {
			ranks := members[name]
			if name == "0" { // also of ranks without a dump
				ranks = make([]int, d.Tutti.Size)
				for r := range ranks {
					ranks[r] = r
				}
			}
			g.Ranks = strings.ReplaceAll(fmt.Sprint(ranks), " ", ", ")
			out[i].Groups[name] = g
		}
		for _, e := range d.Entries {
			if e.P2P || e.Tutti.Left || e.CollectiveSeq < first[e.ProcessGroup[0]] {
				continue
			}
			e.RecordID = uint64(len(out[i].Entries))
			if done[collective(&e)] {
				e.State, e.Retired = "completed", true
			}
			e.Frames = slices.Clone(e.Frames)
			out[i].Entries = append(out[i].Entries, e)
		}
	}
	return out
}
