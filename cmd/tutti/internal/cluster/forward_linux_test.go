package cluster

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// cables returns a forwarder whose devices are pairs of sockets, and the pairs' outer ends: a host's and the
// bridge's.
func cables(t *testing.T, c Config) (f *forwarder, host, bridge int) {
	f = newForwarder(c, 0)
	var outer [2]int
	for i := range outer {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		t.Cleanup(func() { _, _ = unix.Close(pair[0]), unix.Close(pair[1]) })
		outer[i] = pair[0]
		f.ends[i] = unix.PollFd{Fd: int32(pair[1]), Events: unix.POLLIN}
	}
	return f, outer[0], outer[1]
}

// packet makes a frame of one packet with a number in it.
func packet(n uint64) []byte {
	return binary.NativeEndian.AppendUint64(make([]byte, ipOffset), n)
}

func TestForwarderDelaysWhatHostsSend(t *testing.T) {
	const delay = 30 * time.Millisecond
	f, host, bridge := cables(t, Config{Delay: delay})
	read := make([]byte, 100)
	var sent []time.Time
	for n := range uint64(3) {
		sent = append(sent, time.Now())
		_, err := unix.Write(host, packet(n))
		require.NoError(t, err)
		f.turn() // takes the frame
	}
	for i := range sent {
		_, err := unix.Read(bridge, read)
		for ; err == unix.EAGAIN; _, err = unix.Read(bridge, read) {
			f.turn()
		}
		require.NoError(t, err)
		assert.Equal(t, packet(uint64(i)), read[:len(packet(0))], "in order")
		assert.GreaterOrEqual(t, time.Since(sent[i]), delay)
	}
	_, err := unix.Write(bridge, packet(7))
	require.NoError(t, err)
	f.turn()
	_, err = unix.Read(host, read)
	require.NoError(t, err, "what goes to a host passes in one turn")
	assert.Equal(t, packet(7), read[:len(packet(7))])
	assert.Zero(t, f.lost.Load())
	assert.Contains(t, forwarders{f}.report(), "; 0 packets were lost; the busiest forwarder worked for ")
}

// All packets arrive in order except the lost ones, whose number has a binomial distribution. Nothing is allocated on
// the way.
func TestForwarderLosesPacketsOfFrames(t *testing.T) {
	const frames, each, loss = 500, 10, 5.0
	f, host, bridge := cables(t, Config{Loss: loss})
	var sent, got []string
	read := make([]byte, maxFrame)
	forward := func(frame []byte) {
		_, err := unix.Write(host, frame)
		require.NoError(t, err)
		f.turn()
		for due, _, _ := f.head(); due >= 0; due, _, _ = f.head() {
			f.turn()
		}
	}
	for i := range frames {
		frame := tcpFrame(binary.NativeEndian.AppendUint64(make([]byte, each*100-10), uint64(i)), 100)
		sent = append(sent, packets(t, frame)...)
		forward(frame)
		for {
			n, err := unix.Read(bridge, read)
			if err != nil {
				break
			}
			got = append(got, packets(t, read[:n])...)
		}
	}
	for _, s := range sent {
		if len(got) > 0 && got[0] == s {
			got = got[1:]
		} else {
			f.lost.Add(-1)
		}
	}
	assert.Empty(t, got)
	assert.Zero(t, f.lost.Load(), "as many as are missing")
	frame := packet(1)
	assert.Zero(t, testing.AllocsPerRun(100, func() {
		forward(frame)
		_, _ = unix.Read(bridge, read)
	}))
}

func TestLossesAreOfTheProbability(t *testing.T) {
	for _, loss := range []float64{0.01, 1, 50} {
		f, _, _ := cables(t, Config{Loss: loss})
		const draws = 20000
		sum := 0.0
		for range draws {
			sum += float64(f.gap())
		}
		p := loss / 100 // of a geometric distribution
		assert.InDelta(t, (1-p)/p, sum/draws, 4*math.Sqrt((1-p)/draws)/p, "%v %%", loss)
	}
	f, _, _ := cables(t, Config{})
	assert.Greater(t, f.gap(), math.MaxInt/16, "none")
}

// tcpFrame makes a frame of TCP over IPv4 as the kernel hands it to a device, with options in its header.
func tcpFrame(payload []byte, size int) []byte {
	f := make([]byte, ipOffset+20+32, ipOffset+20+32+len(payload))
	f[0], f[1] = unix.VIRTIO_NET_HDR_F_NEEDS_CSUM, unix.VIRTIO_NET_HDR_GSO_TCPV4
	binary.NativeEndian.PutUint16(f[4:], uint16(size))
	ip, tcp := f[ipOffset:], f[ipOffset+20:]
	ip[0], ip[9] = 0x45, unix.IPPROTO_TCP
	copy(ip[12:], []byte{10, 77, 0, 1, 10, 77, 0, 2})
	binary.BigEndian.PutUint32(tcp[4:], 0xfffffff0) // wraps
	tcp[12], tcp[13] = 8<<4, 0x10|8|1               // 32 bytes; ACK, PSH, FIN
	for i := range 12 {
		tcp[20+i] = byte(i)
	}
	f = append(f, payload...)
	binary.BigEndian.PutUint16(f[ipOffset+2:], uint16(len(f)-ipOffset))
	return f
}

// packets returns the packets of a frame as sequence number, flags and payload. It is independent of cut.
func packets(t *testing.T, frame []byte) (all []string) {
	ip := frame[ipOffset:]
	assert.EqualValues(t, len(ip), binary.BigEndian.Uint16(ip[2:]))
	tcp := ip[20:]
	data, size := tcp[32:], int(binary.NativeEndian.Uint16(frame[4:]))
	if frame[1] == unix.VIRTIO_NET_HDR_GSO_NONE {
		assert.Zero(t, size)
		size = len(data)
	}
	for at := 0; at < len(data); at += size {
		end, flags := min(at+size, len(data)), tcp[13]
		if end < len(data) {
			flags &^= 9
		}
		all = append(all, fmt.Sprint(binary.BigEndian.Uint32(tcp[4:])+uint32(at), flags, tcp[20:32], data[at:end]))
	}
	return all
}

// A frame that loses any one of its packets keeps the others, with checksums that receivers accept.
func TestLostSegmentsLeaveTheOthers(t *testing.T) {
	for _, length := range []int{1, 100, 101, 199, 200, 250, 1000} {
		data := make([]byte, length)
		for i := range data {
			data[i] = byte(i*7 + i/256)
		}
		whole := tcpFrame(data, 100)
		if length <= 100 {
			whole[1] = unix.VIRTIO_NET_HDR_GSO_NONE
			clear(whole[4:6])
		}
		all := packets(t, whole)
		require.Equal(t, len(all), segments(whole))
		for lost := range all {
			left := []string{}
			for _, part := range [][]byte{cut(slices.Clone(whole), 0, lost), cut(slices.Clone(whole), lost+1, len(all))} {
				if part == nil {
					continue
				}
				left = append(left, packets(t, part)...)
				assert.Equal(t, len(packets(t, part)), segments(part))
				ip := part[ipOffset:]
				assert.EqualValues(t, 0xffff, sum(0, ip[:20]), "of the header, with its own sum")
				var pseudo uint32
				for _, word := range []uint32{10<<8 + 77, 1, 10<<8 + 77, 2, unix.IPPROTO_TCP, uint32(len(ip) - 20)} {
					pseudo += word
				}
				assert.EqualValues(t, pseudo, binary.BigEndian.Uint16(ip[20+16:]))
			}
			assert.Equal(t, slices.Delete(slices.Clone(all), lost, lost+1), left, "%d of %d", lost, len(all))
		}
	}
}
