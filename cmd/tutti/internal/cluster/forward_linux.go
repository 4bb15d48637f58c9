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

// A frame is what a TAP device reads and writes at once: a header of virtio, Ethernet, and up to
// 64 KiB of IP. Several segments of TCP are one frame, as between virtual Ethernet devices.
const (
	virtioHeader = 10
	ipOffset     = virtioHeader + 14
	maxFrame     = ipOffset + 65536
)

// forwarder is the cable from a host to the bridge. It delays and loses what comes from the
// host, and passes on at once what goes there. Its own thread carries everything, in which the
// kernel also receives for the host, and allocates only while more is in flight than ever before.
type forwarder struct {
	delay time.Duration  // from the host
	loss  float64        // the probability that a packet is lost
	ends  [2]unix.PollFd // the host's and the bridge's
	start time.Time      // of the clock
	queue []*block       // frames in flight, in order
	free  []*block       // where others were
	rng   *rand.Rand     // for losses
	spare int            // packets before the next one that is lost
	frame [maxFrame]byte // on the way to a host, or cut in two
	wait  unix.Timespec  // for the next frame that is due

	lost       atomic.Int64 // packets
	busy, late atomic.Int64 // nanoseconds: the time at work, and the longest by which a frame was late
}

// block holds frames in flight, each behind its head.
type block struct {
	data     [1 << 20]byte // frames with their heads
	from, to int           // where the first frame begins, and the last ends; equal: there is none
}

// frameHead is when a frame is due, on the forwarder's clock, its length and the file it goes to.
const frameHead = 8 + 4 + 4

// forwarders are the forwarders of all cables.
type forwarders []*forwarder

// forward makes the devices of all cables, of host i those named host(i), for the bridge, and
// cable(i), for the host, and carries what they have as long as the process lives.
func forward(c Config) (forwarders, error) {
	// A collection would have the threads wait for others that are not on time. They keep all of their memory.
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

// newForwarder returns a forwarder without devices, whose losses follow from a seed.
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

// tap makes a TAP device whose frames are a file's messages. The kernel leaves checksums and the
// segments of TCP to whom it passes them to, as it does with virtual Ethernet devices.
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

// run carries frames as long as the process lives.
func (f *forwarder) run() {
	runtime.LockOSThread()
	// Before the ranks, and on time to the microsecond, where that is permitted: report says what came of it.
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

// turn waits until there is something to do, and does it.
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
			end.Fd = -1 // the device is gone
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

// batch is how many frames are read from a device before it is the next one's turn.
const batch = 32

// pass passes frames on at once.
func (f *forwarder) pass(from, to int32) {
	for range batch {
		n, err := unix.Read(int(from), f.frame[:])
		if err != nil {
			return
		}
		_, _ = unix.Write(int(to), f.frame[:n]) // what goes to a device that is down is lost
	}
}

// take reads frames into the queue, without the packets that are lost.
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
			// Before the lost segment, and behind it.
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

// gap draws how many packets arrive before one is lost, from a geometric distribution.
func (f *forwarder) gap() int {
	return int(min(f.rng.ExpFloat64()/-math.Log1p(-f.loss), 1e18))
}

// room returns the memory for the next frame of the queue.
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

// push has the frame in the room leave after the delay. An empty one is none.
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

// head returns the first frame of the queue: when it is due, below 0 if there is none, and the
// file that it goes to.
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

// deliver writes the frames that are due.
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

// report says what was lost, and how well the busiest forwarder did: late frames have had more than the delay.
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

// segments returns of how many packets a frame is. One of several is IPv4 and TCP.
func segments(frame []byte) int {
	if len(frame) == 0 {
		return 0
	}
	if size := segmentSize(frame); size > 0 {
		return (len(frame[payload(frame):]) + size - 1) / size
	}
	return 1
}

// segmentSize is the payload of each packet of a frame but the last, 0 if the frame is one packet.
func segmentSize(frame []byte) int {
	return int(binary.NativeEndian.Uint16(frame[4:]))
}

// payload returns where the payload of a TCP frame begins.
func payload(frame []byte) int {
	tcp := ipOffset + int(frame[ipOffset]&15)*4
	return tcp + int(frame[tcp+12]>>4)*4
}

// cut makes of a frame one of only its packets from, from + 1, …, to − 1; of none of them an empty one.
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
	// The kernel has left its sum over the packet to the device: it covers the pseudo header alone.
	binary.BigEndian.PutUint16(tcp[16:], sum(
		uint32(ip[9])+uint32(len(tcp)),
		ip[12:20],
	))
	return frame
}

// sum is the ones' complement sum of 16-bit words (RFC 1071) and what was summed before.
func sum(s uint32, words []byte) uint16 {
	for i := 0; i < len(words); i += 2 {
		s += uint32(binary.BigEndian.Uint16(words[i:]))
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}
