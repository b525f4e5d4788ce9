package abuse

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// again is how long an attacker waits that was cut off: what is tried is to hold
// something, not to keep processors busy.
const again = time.Second

// attackers are how many pods attack at once, each from an address of its own.
const attackers = 16

// attack is one thing that is tried on a port.
type attack struct {
	name        string
	connections int
	// secure makes a TLS connection first, with these protocols.
	secure []string
	// send writes what the n-th connection sends; the connection is not read then.
	send func(n int, c net.Conn) error
	// read reads answers, and sends again on the same connection.
	read bool
	// within is true for an attack from the machine's own address, as of a pod on the node's
	// network.
	within bool
	// beside are attacks that go on at the same time, each on a port of its own and with a
	// part of its connections.
	beside []target
}

// tally counts what became of an attack's connections.
type tally struct {
	opened, ended atomic.Int64
}

// run keeps the attack up until the context ends. A connection that the server ends is
// made again.
func (a attack) run(ctx context.Context, from *outside, to string, t *tally) {
	var group sync.WaitGroup
	defer group.Wait()
	for _, other := range a.beside {
		for _, b := range other.attacks {
			b.connections = max(1, b.connections/len(a.beside))
			group.Go(func() { b.run(ctx, from, other.address, t) })
		}
	}
	for n := range a.connections {
		group.Go(func() {
			// Not all in one moment, in which the machine does nothing else.
			sleep(ctx, time.Duration(n)*time.Second/time.Duration(a.connections))
			for ctx.Err() == nil {
				if a.once(ctx, from, to, n, t) != nil && ctx.Err() == nil {
					t.ended.Add(1)
					sleep(ctx, again)
				}
			}
		})
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// once makes one connection and holds it until the server or the context ends it.
func (a attack) once(ctx context.Context, from *outside, to string, n int, t *tally) error {
	tcp, err := a.dial(ctx, from, to, n)
	if err != nil {
		return err
	}
	t.opened.Add(1)
	defer tcp.Close()                                      //nolint:errcheck // it may be closed already
	defer context.AfterFunc(ctx, func() { tcp.Close() })() //nolint:errcheck // either way it is over
	var c net.Conn = tcp
	if a.secure != nil {
		// Who the server is does not matter to who attacks it.
		secured := tls.Client(tcp, &tls.Config{InsecureSkipVerify: true, NextProtos: a.secure}) //nolint:gosec // see above
		if err := secured.HandshakeContext(ctx); err != nil {
			return err
		}
		c = secured
	}
	for {
		if err := a.send(n, c); err != nil {
			return err
		}
		if !a.read {
			break
		}
		if err := readAnswer(c); err != nil {
			return err
		}
	}
	for ctx.Err() == nil {
		if !established(tcp) {
			return errors.New("the server ended the connection")
		}
		sleep(ctx, 200*time.Millisecond)
	}
	return nil
}

func (a attack) dial(ctx context.Context, from *outside, to string, n int) (*net.TCPConn, error) {
	if !a.within {
		return from.dial(ctx, firstPod+n%attackers, to)
	}
	c, err := (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "tcp4", to)
	tcp, _ := c.(*net.TCPConn)
	return tcp, err
}

// fromNode makes an attack one from the node's own address.
func fromNode(a attack) attack {
	a.within, a.name = true, a.name+", from the node's network"
	return a
}

// established reports whether both sides have the connection open. It reads nothing.
func established(c *net.TCPConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	open := false
	err = raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		const tcpEstablished = 1
		open = err == nil && info.State == tcpEstablished
	})
	return err == nil && open
}

// readAnswer reads one answer, of any status.
func readAnswer(c net.Conn) error {
	if err := c.SetReadDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return errors.Join(err, resp.Body.Close())
}

// text sends the same to all.
func text(s string) func(int, net.Conn) error {
	return func(_ int, c net.Conn) error {
		_, err := io.WriteString(c, s)
		return err
	}
}

// post is a request with a body of which the end may be missing.
func post(path string, length int, body string) string {
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", path, length, body)
}

func get(path string) string { return "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n" }

// pod requests units; annotations is JSON.
func pod(annotations string) string {
	return fmt.Sprintf(`{"metadata":{"name":"p","namespace":"team","uid":"u","annotations":%s},"spec":{"containers":[{"name":"c",`+
		`"resources":{"limits":{%q:"4"},"requests":{%q:"4"}}}]}}`,
		annotations, resource, resource)
}

// unreadFilters asks for 100 000 names that no node has: 400 KB, of which an answer of 5 MB
// is made.
func unreadFilters(secure []string) attack {
	body := `{"Pod":` + pod("{}") + `,"Nodes":null,"NodeNames":["a"` + strings.Repeat(`,"a"`, 99_999) + `]}`
	return attack{name: "unread answers of filter, 100 000 names", connections: 200, secure: secure,
		send: text(post(filter, len(body), body))}
}

const (
	filter  = "/gcushare-scheduler/filter"
	inspect = "/gcushare-scheduler/inspect?details=true"
)

// unread asks and does not read the answer.
func unread(what, path string, secure []string) attack {
	return attack{name: "unread answers of " + what, connections: 200, secure: secure, send: text(strings.Repeat(get(path), 20))}
}

// slow begins a header and does not end it.
func slow(secure []string) attack {
	return attack{name: "slow headers", connections: 500, secure: secure, send: text("GET /healthz HTTP/1.1\r\nHost: ")}
}

// slowHandshakes begin to speak TLS and go no further.
func slowHandshakes() attack {
	return attack{name: "slow handshakes", connections: 500, send: text("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")}
}

// stalled sends bodies of these lengths but for the last byte, of which at most a megabyte
// is sent.
func stalled(path string, secure []string, lengths ...int) attack {
	return attack{name: "stalled bodies", connections: 250, secure: secure, send: func(n int, c net.Conn) error {
		length := lengths[n%len(lengths)]
		_, err := io.WriteString(c, post(path, length, "{"+strings.Repeat(" ", min(length-2, 1<<20))))
		return err
	}}
}

// invented asks for all nodes with device ids that nobody has, each time with others.
func invented(nodes []string) attack {
	names := `"` + strings.Join(nodes, `","`) + `"`
	var asked atomic.Int64
	return attack{name: "invented annotations", connections: attackers, read: true, send: func(_ int, c net.Conn) error {
		annotations := fmt.Sprintf(`{"divvy.dev/avoid-devices":"made-up-%d"}`, asked.Add(1))
		body := `{"Pod":` + pod(annotations) + `,"Nodes":null,"NodeNames":[` + names + `]}`
		_, err := io.WriteString(c, post(filter, len(body), body))
		return err
	}}
}

// floods opens as many streams of HTTP/2 as a connection may have, gives the answers no
// window, and keeps on.
func floods(path string) attack {
	return attack{name: "stream floods of HTTP/2", connections: 100, secure: []string{"h2"}, send: func(_ int, c net.Conn) error {
		frame := func(kind, flags byte, stream uint32, payload ...byte) []byte {
			head := []byte{0, 0, byte(len(payload)), kind, flags} //nolint:gosec // some bytes
			return append(binary.BigEndian.AppendUint32(head, stream), payload...)
		}
		out := append([]byte(http2Preface), frame(4, 0, 0, 0, 4, 0, 0, 0, 0)...) // a window of 0
		for i := range 100 {
			// GET https://x by HPACK's static table, and the path as it is.
			header := append([]byte{0x82, 0x87, 0x41, 1, 'x', 0x04, byte(len(path))}, path...) //nolint:gosec // some bytes
			out = append(out, frame(1, 5, uint32(2*i+1), header...)...)
		}
		_, err := c.Write(out)
		return err
	}}
}

const http2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// bombs are reviews that a few bytes make large in memory.
func bombs(path string) attack {
	const most = 8<<20 - 1024
	head := `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u","kind":{"version":"v1","kind":"Pod"},` +
		`"resource":{"version":"v1","resource":"pods"},"operation":"CREATE","namespace":"team","object":{"apiVersion":"v1","kind":"Pod",` +
		`"metadata":{"name":"p"},"spec":{"containers":[{}`
	body := head + strings.Repeat(",{}", (most-len(head))/3) + `]}}}}`
	return attack{name: "reviews of 8 MB of containers", connections: 8, secure: []string{"http/1.1"}, read: true,
		send: text(post(path, len(body), body))}
}

// unreadReviews have a UID of a megabyte, with which they are answered.
func unreadReviews(path string) attack {
	body := `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"` + strings.Repeat("u", 1<<20-2048) + `"}}`
	return attack{name: "unread reviews of 1 MB", connections: 200, secure: []string{"http/1.1"}, send: text(post(path, len(body), body))}
}
