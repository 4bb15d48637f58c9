package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/tutti-go/tutti/atomicfile"
	"github.com/tutti-go/tutti/cmd/tutti/internal/diagnose"
	"github.com/tutti-go/tutti/comm/store"
)

// takeDumps writes the flight records that the other machines sent. Any process that knows the job's secret can send
// any data under any name. Only names of flight records are therefore written, and no link is followed.
func (a *agent) takeDumps() error {
	pieces, err := a.kv.List(context.Background(), dumps)
	if err != nil || len(pieces) == 0 || a.Records == "" {
		return err
	}
	records, refused := joinDumps(pieces)
	if refused > 0 {
		fmt.Fprintf(a.notes, "tutti: not written: %d files of other machines, whose names no flight record has\n", refused)
	}
	if len(records) == 0 {
		return nil
	}
	if err := os.MkdirAll(a.Records, 0o777); err != nil {
		return err
	}
	root, err := os.OpenRoot(a.Records)
	if err != nil {
		return err
	}
	for name, text := range records {
		err = cmp.Or(err, writeDump(root, name, text))
	}
	return cmp.Or(err, root.Close())
}

// joinDumps joins the pieces of each file, by file name, and counts files that are no flight records.
func joinDumps(pieces []store.Entry) (records map[string][]byte, refused int) {
	records = map[string][]byte{}
	foreign := map[string]bool{}
	for _, piece := range pieces {
		name, _ := path.Split(strings.TrimPrefix(piece.Key, dumps))
		name = strings.TrimSuffix(name, "/")
		if diagnose.IsFile(name) {
			records[name] = append(records[name], piece.Value...)
		} else {
			foreign[name] = true
		}
	}
	return records, len(foreign)
}

// writeDump writes a flight record. A record of an epoch goes into the epoch's folder.
func writeDump(root *os.Root, name string, text []byte) error {
	folder, file := path.Split(name)
	if folder = strings.TrimSuffix(folder, "/"); folder != "" {
		if err := root.Mkdir(folder, 0o777); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		info, err := root.Lstat(folder)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			return fmt.Errorf("%s in %s is no folder", folder, root.Name())
		}
		inner, err := root.OpenRoot(folder)
		if err != nil {
			return err
		}
		defer inner.Close() //nolint:errcheck // nothing is lost
		root = inner
	}
	return atomicfile.ReplaceIn(root, file, func(f *os.File) error {
		_, err := f.Write(text)
		return err
	})
}
