package cluster

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A frame is the unit of a TAP device's reads and writes: a virtio header, an Ethernet header, and up to 64 KiB of
// IP. Several TCP segments form one frame, as between virtual Ethernet devices.
const (
	virtioHeader = 10
	ipOffset     = virtioHeader + 14
	maxFrame     = ipOffset + 65536
)

// forwarder is the cable from a host to the bridge. It delays and loses frames from the host, and passes frames to
// the host on at once. Its thread does all the work, including the kernel's receive processing for the host. It
// allocates only when more frames are in flight than ever before.
type forwarder struct {
	delay time.Duration  // from the host
	loss  float64        // probability that a packet is lost
	ends  [2]unix.PollFd // the host's and the bridge's end
	start time.Time      // of the clock
	queue []*block       // frames in flight, in order
	free  []*block       // emptied blocks
	rng   *rand.Rand     // for losses
	spare int            // packets before the next loss
	frame [maxFrame]byte // on the way to a host, or cut in two
	wait  unix.Timespec  // until the next frame is due

	lost       atomic.Int64 // packets
	busy, late atomic.Int64 // nanoseconds: time spent working, and the longest delay of a frame beyond its due time
}

// block holds frames in flight, each after its head.
type block struct {
	data     [1 << 20]byte // frames with their heads
	from, to int           // start of the first frame and end of the last; equal if there is none
}

// frameHead holds a frame's due time on the forwarder's clock, its length, and its destination file.
const frameHead = 8 + 4 + 4

// forwarders are the forwarders of all cables.
type forwarders []*forwarder

// forward makes the devices of all cables and carries their frames for the rest of the process. Host i's cable has
// the device host(i) at the bridge and cable(i) at the host.
func forward(c Config) (forwarders, error) {
	// A garbage collection would make the threads wait for late threads. The memory in use is bounded.
	debug.SetGCPercent(-1)
	fs := make(forwarders, c.Hosts)
	for i := range fs {
		fs[i] = newForwarder(c, uint64(i))
		for end, name := range []string{cable(i), host(i)} {
			fd, err := tap(name)
			if err != nil {
				return nil, fmt.Errorf(
					"--delay and --loss need TAP devices (/dev/net/tun, CONFIG_TUN, module tun), "+
						"which this kernel lacks or this user or container may not make; without them, --rate works: %w",
					err,
				)
			}
			fs[i].ends[end] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		}
	}
	for _, f := range fs {
		go f.run()
	}
	return fs, nil
}

// newForwarder returns a forwarder without devices. seed determines its losses.
func newForwarder(c Config, seed uint64) *forwarder {
	f := &forwarder{
		delay: c.Delay,
		loss:  c.Loss / 100,
		start: time.Now(),
		rng:   rand.New(rand.NewPCG(1, seed)),
	}
	f.spare = f.gap()
	return f
}

// tap makes a TAP device whose frames are messages of a file. The kernel leaves checksums and TCP segmentation to the
// receiver, as with virtual Ethernet devices.
func tap(name string) (fd int, err error) {
	if fd, err = unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0); err != nil {
		return 0, err
	}
	request, err := unix.NewIfreq(name)
	if err != nil {
		return 0, err
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return 0, err
	}
	return fd, unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4)
}

// run carries frames for the rest of the process.
func (f *forwarder) run() {
	runtime.LockOSThread()
	// Run before the ranks, on time to the microsecond, if that is permitted. report shows the result.
	_ = unix.SchedSetAttr(
		0,
		&unix.SchedAttr{
			Size:     unix.SizeofSchedAttr,
			Policy:   unix.SCHED_FIFO,
			Priority: 1,
		},
		0,
	)
	_ = unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0)
	for {
		f.turn()
	}
}

// turn waits for work and does it.
func (f *forwarder) turn() {
	var wait *unix.Timespec
	if due, _, _ := f.head(); due >= 0 {
		f.wait = unix.NsecToTimespec(int64(max(0, due-time.Since(f.start))))
		wait = &f.wait
	}
	if _, err := unix.Ppoll(f.ends[:], wait, nil); err != nil {
		return // interrupted
	}
	begin := time.Since(f.start)
	f.deliver(begin)
	host := &f.ends[0]
	outer := &f.ends[1]
	for _, end := range []*unix.PollFd{host, outer} {
		if end.Revents&unix.POLLERR != 0 {
			end.Fd = -1 // the device has been removed
		}
	}
	if host.Revents&unix.POLLIN != 0 {
		f.take(host.Fd, outer.Fd)
	}
	if outer.Revents&unix.POLLIN != 0 {
		f.pass(outer.Fd, host.Fd)
	}
	f.busy.Add(int64(time.Since(f.start) - begin))
}

// batch is the number of frames read from one device before the other device's turn.
const batch = 32

// pass forwards frames at once.
func (f *forwarder) pass(from, to int32) {
	for range batch {
		n, err := unix.Read(int(from), f.frame[:])
		if err != nil {
			return
		}
		_, _ = unix.Write(int(to), f.frame[:n]) // frames to a device that is down are lost
	}
}

// take reads frames into the queue, without lost packets.
func (f *forwarder) take(from, to int32) {
	for range batch {
		frame := f.room()
		n, err := unix.Read(int(from), frame)
		if err != nil {
			return
		}
		frame = frame[:n]
		packets := segments(frame)
		for ; f.spare < packets; packets = segments(frame) {
			f.lost.Add(1)
			// The part before the lost segment, and the part after it.
			n := copy(f.frame[:], frame)
			f.push(to, cut(frame, 0, f.spare))
			frame = f.room()
			frame = frame[:copy(frame, cut(f.frame[:n], f.spare+1, packets))]
			f.spare = f.gap()
		}
		f.spare -= packets
		f.push(to, frame)
	}
}

// gap draws the number of packets before the next loss from a geometric distribution.
func (f *forwarder) gap() int {
	return int(min(f.rng.ExpFloat64()/-math.Log1p(-f.loss), 1e18))
}

// room returns memory for the queue's next frame.
func (f *forwarder) room() []byte {
	if n := len(f.queue); n > 0 {
		if b := f.queue[n-1]; len(b.data)-b.to >= frameHead+maxFrame {
			return b.data[b.to+frameHead:]
		}
	}
	b := new(block)
	if n := len(f.free); n > 0 {
		b = f.free[n-1]
		f.free = f.free[:n-1]
	}
	b.from = 0
	b.to = 0
	f.queue = append(f.queue, b)
	return b.data[frameHead:]
}

// push queues the frame in the room to leave after the delay. An empty frame is ignored.
func (f *forwarder) push(to int32, frame []byte) {
	if len(frame) == 0 {
		return
	}
	b := f.queue[len(f.queue)-1]
	head := binary.NativeEndian.AppendUint64(
		b.data[b.to:b.to],
		uint64(time.Since(f.start)+f.delay),
	)
	head = binary.NativeEndian.AppendUint32(head, uint32(len(frame)))
	binary.NativeEndian.AppendUint32(head, uint32(to))
	b.to += frameHead + len(frame)
}

// head returns the first frame of the queue, its destination file, and its due time, which is negative if the queue
// is empty.
func (f *forwarder) head() (due time.Duration, to int32, frame []byte) {
	if len(f.queue) == 0 || f.queue[0].from == f.queue[0].to {
		return -1, 0, nil
	}
	b := f.queue[0].data[f.queue[0].from:]
	due = time.Duration(binary.NativeEndian.Uint64(b))
	bytes := binary.NativeEndian.Uint32(b[8:])
	to = int32(binary.NativeEndian.Uint32(b[12:]))
	return due, to, b[frameHead : frameHead+bytes]
}

// deliver writes the due frames.
func (f *forwarder) deliver(now time.Duration) {
	for {
		due, to, frame := f.head()
		if due < 0 || due > now {
			return
		}
		_, _ = unix.Write(int(to), frame)
		f.late.Store(max(f.late.Load(), int64(time.Since(f.start)-due)))
		b := f.queue[0]
		b.from += frameHead + len(frame)
		if b.from == b.to {
			f.free = append(f.free, b)
			f.queue = f.queue[:copy(f.queue, f.queue[1:])]
		}
	}
}

// report describes the losses and the performance of the busiest forwarder. Late frames had more than the configured
// delay.
func (fs forwarders) report() string {
	var lost int64
	var busy, late float64
	for _, f := range fs {
		lost += f.lost.Load()
		busy = max(busy, float64(f.busy.Load())/float64(time.Since(f.start)))
		late = max(late, float64(f.late.Load()))
	}
	return fmt.Sprintf(
		"; %d packets were lost; the busiest forwarder worked for %.0f %% of the time, "+
			"and frames were at most %.1f ms late",
		lost,
		100*busy,
		late/1e6,
	)
}

// segments returns the number of packets in a frame. A frame with several is IPv4 and TCP.
func segments(frame []byte) int {
	if len(frame) == 0 {
		return 0
	}
	if size := segmentSize(frame); size > 0 {
		return (len(frame[payload(frame):]) + size - 1) / size
	}
	return 1
}

// segmentSize is the payload of each packet of a frame except the last; 0 if the frame is one packet.
func segmentSize(frame []byte) int {
	return int(binary.NativeEndian.Uint16(frame[4:]))
}

// payload returns the offset of the payload in a TCP frame.
func payload(frame []byte) int {
	tcp := ipOffset + int(frame[ipOffset]&15)*4
	return tcp + int(frame[tcp+12]>>4)*4
}

// cut reduces a frame to its packets from, from + 1, …, to − 1. Without packets the result is empty.
func cut(frame []byte, from, to int) []byte {
	if from == to {
		return nil
	}
	size := segmentSize(frame)
	first := payload(frame)
	all := frame[first:]
	last := to*size >= len(all)
	n := copy(all, all[from*size:min(to*size, len(all))])
	frame = frame[:first+n]
	if n <= size {
		frame[1] = unix.VIRTIO_NET_HDR_GSO_NONE
		binary.NativeEndian.PutUint16(frame[4:], 0)
	}
	ip := frame[ipOffset:]
	tcp := ip[int(ip[0]&15)*4:]
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
	binary.BigEndian.PutUint16(ip[10:], 0)
	binary.BigEndian.PutUint16(ip[10:], ^sum(0, ip[:len(ip)-len(tcp)]))
	binary.BigEndian.PutUint32(tcp[4:], binary.BigEndian.Uint32(tcp[4:])+uint32(from*size))
	if !last {
		const fin, push = 1, 8
		tcp[13] &^= fin | push
	}
	// The kernel has left the packet's checksum to the device: it covers only the pseudo header.
	binary.BigEndian.PutUint16(tcp[16:], sum(
		uint32(ip[9])+uint32(len(tcp)),
		ip[12:20],
	))
	return frame
}

// sum continues s, the ones' complement sum of 16-bit words (RFC 1071), over words.
func sum(s uint32, words []byte) uint16 {
	for i := 0; i < len(words); i += 2 {
		s += uint32(binary.BigEndian.Uint16(words[i:]))
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}
