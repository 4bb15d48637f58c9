package cli

import (
	"cmp"
	"fmt"
	"io"
	"strconv"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/tutti-go/tutti/cmd/tutti/internal/backend"
	"github.com/tutti-go/tutti/cmd/tutti/internal/console"
	"github.com/tutti-go/tutti/runtime/cuda"
)

// printGPUs prints the section about GPUs: libraries, devices and their links.
func printGPUs(out io.Writer, g backend.GPUs) {
	versions := console.NewTable()
	if len(g.Devices) == 0 {
		versions.AppendRow(table.Row{"GPU", "none: " + g.NoGPU})
	} else {
		versions.AppendRow(table.Row{"GPU driver", cmp.Or(g.Driver, "unknown")})
	}
	if len(g.Devices) > 0 || g.CUDA != "" {
		versions.AppendRow(table.Row{"CUDA", "up to " + cmp.Or(g.CUDA, "unknown")})
	}
	versions.AppendRow(table.Row{"NCCL", library(g.NCCL, g.NCCLLibrary, g.NoNCCL)})
	console.PrintTable(out, versions, nil, 2)
	if len(g.Devices) == 0 {
		return
	}
	fmt.Fprintln(out)

	devices := console.NewTable()
	devices.AppendHeader(table.Row{"GPU", "name", "memory", "compute\ncapability", "multi-\nprocessors", "PCI bus"})
	for _, d := range g.Devices {
		devices.AppendRow(table.Row{d.Index, d.Name, gibibytes(uint64(d.MemoryBytes)),
			fmt.Sprintf("%d.%d", d.Major, d.Minor), d.Multiprocessors, d.PCIBus})
	}
	console.PrintTable(out, devices, nil, 2)
	if len(g.Devices) > 1 {
		fmt.Fprintln(out)
		printLinks(out, g.Devices)
		fmt.Fprintf(out, "--p2p: %s\n", cmp.Or(g.NoPeerMemory, "all of them reach each other's memory"))
	}
}

// library describes a library that was found, or says why it was not.
func library(version, name, unavailable string) string {
	if unavailable != "" {
		return "none: " + unavailable
	}
	return version + ", " + name
}

// The links between two GPUs.
const (
	linkSelf   = "-"
	linkNVLink = "NVLink"
	linkPeer   = "peer"
	linkHost   = "host"
)

// link names the link from one GPU to another.
func link(from cuda.DeviceInfo, to int) string {
	switch {
	case from.Index == to:
		return linkSelf
	case from.PeerAtomics[to]:
		return linkNVLink
	case from.Peers[to]:
		return linkPeer
	}
	return linkHost
}

// printLinks prints the link between each pair of GPUs and explains the names.
func printLinks(out io.Writer, devices []cuda.DeviceInfo) {
	header := table.Row{"link"}
	columns := []table.ColumnConfig{{Number: 1, AlignHeader: text.AlignLeft}}
	for i, d := range devices {
		header = append(header, strconv.Itoa(d.Index))
		columns = append(columns, table.ColumnConfig{
			Number:      i + 2,
			Align:       text.AlignLeft,
			AlignHeader: text.AlignLeft,
		})
	}
	links := console.NewTable()
	links.AppendHeader(header)
	seen := map[string]bool{}
	for _, d := range devices {
		row := table.Row{d.Index}
		for to := range devices {
			l := link(d, to)
			seen[l] = true
			row = append(row, l)
		}
		links.AppendRow(row)
	}
	console.PrintTable(out, links, columns)
	for _, l := range []struct{ name, meaning string }{
		{linkNVLink, "direct access with native atomics"},
		{linkPeer, "direct access without native atomics (PCIe)"},
		{linkHost, "no direct access, through host memory"},
	} {
		if seen[l.name] {
			fmt.Fprintf(out, "%s: %s\n", l.name, l.meaning)
		}
	}
}
