// Package handover passes a node from one divvy-node process to the next.
//
// A lock on a file in the state folder says which process decides for the node. The
// process that has it listens on a socket beside it, which only root can use.
// Another process of the same group asks there to take over:
//
//	successor                     predecessor
//	Seat.Ask: its identity  ->
//	                        <-    Request.Pass: its state, and the lock
//	starts to decide
//	Predecessor.Serving     ->
//	                        <-    Request.Left: it has ended its part
//
// The lock is passed as an open file. It is never free in between, and it is free
// once both processes have ended. From Pass on the successor decides. If the
// connection ends before Serving, the predecessor decides again. So either process
// may die at any point, and the other one goes on.
//
// The file lists the processes that have handed over, so that a container that is
// restarted does not take the node back from the pod that replaces its own.
package handover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

// The files in the state folder.
const (
	LockName   = "divvy-node.lock"
	SocketName = "divvy-node.sock"
)

// version is that of the messages.
const version = 1

// Limits of the protocol.
const (
	// maxMessage bounds a message. What a node remembers takes some kilobytes.
	maxMessage = 16 << 20
	// callTimeout is how long a message may take that the other side sends at once.
	callTimeout = 5 * time.Second
	// passTimeout is how long a predecessor may take to finish what it does.
	passTimeout = 30 * time.Second
	// leaveTimeout is how long it may take to end its part.
	leaveTimeout = 30 * time.Second
	// maxRetired is how many predecessors are remembered.
	maxRetired = 16
	// lockInterval is how often a process that waits tries the lock.
	lockInterval = 50 * time.Millisecond
)

// Identity is who a process is.
type Identity struct {
	// Group is shared by processes that may take over from each other. A process
	// without a group never hands over.
	Group string `json:"group,omitempty"`
	// ID is kept when the process is started again.
	ID string `json:"id,omitempty"`
}

// Errors of Ask.
var (
	// ErrRetired says that this process was taken over from before.
	ErrRetired = errors.New("another divvy-node has taken over from this one")
	// ErrSilent says that the process that has the lock does not listen: it belongs
	// to an earlier release, or another handover is under way.
	ErrSilent = errors.New("another divvy-node runs on this node, and does not hand over")
)

// ErrTaken says that another process has the lock.
var ErrTaken = errors.New("another divvy-node runs on this node")

// RejectedError says why the process that has the lock rejected a request.
type RejectedError struct{ Reason string }

func (e *RejectedError) Error() string { return "another divvy-node runs on this node: " + e.Reason }

// message is one line of JSON.
type message struct {
	Version  int             `json:"version,omitempty"`
	From     Identity        `json:"from,omitzero"`
	Rejected string          `json:"rejected,omitempty"`
	Content  json.RawMessage `json:"content,omitempty"`
}

// lockFile is the content of the lock's file.
type lockFile struct {
	Retired []string `json:"retired,omitempty"`
}

// Seat is the lock as one process sees it. It is not safe for concurrent use.
type Seat struct {
	dir  string
	self Identity
	file *os.File
	held bool

	requests chan *Request
	// unlisten ends what Listen began; nil while the process does not listen.
	unlisten func()
}

// Open opens the lock in the state folder without taking it.
func Open(dir string, self Identity) (*Seat, error) {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	f, err := openLock(dir)
	if err != nil {
		return nil, err
	}
	return &Seat{dir: dir, self: self, file: f, requests: make(chan *Request)}, nil
}

func openLock(dir string) (*os.File, error) {
	path := filepath.Join(dir, LockName)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if errors.Is(err, syscall.EROFS) {
		// The lock can be taken on a disk that has become read-only.
		f, err = os.Open(path)
	}
	if err != nil {
		return nil, fmt.Errorf("state folder: %w", err)
	}
	return f, nil
}

// Keep makes the lock's file and the socket of the process that has the lock again where
// they were removed: another process would not see that the node is served. ErrTaken says
// that one has taken the lock of a file that is there in place of this one's.
func (s *Seat) Keep(ctx context.Context) error {
	if !s.isThere() {
		f, err := openLock(s.dir)
		if err != nil {
			return err
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			if errors.Is(err, syscall.EWOULDBLOCK) {
				err = ErrTaken
			}
			return errors.Join(fmt.Errorf("lock %s: %w", f.Name(), err), f.Close())
		}
		_ = s.file.Close()
		s.file = f
	}
	if s.unlisten == nil {
		return nil
	}
	if _, err := os.Lstat(filepath.Join(s.dir, SocketName)); !errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	s.stopListening()
	return s.Listen(ctx)
}

// isThere reports whether the file that other processes open is this one's. Of a folder
// that cannot be read it is believed.
func (s *Seat) isThere() bool {
	there, err := os.Stat(filepath.Join(s.dir, LockName))
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	own, err := s.file.Stat()
	return err == nil && os.SameFile(there, own)
}

// Take takes the lock if it is free, and reports whether this process has it.
func (s *Seat) Take() (bool, error) {
	err := syscall.Flock(int(s.file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	switch {
	case err == nil:
		s.held = true
	case !errors.Is(err, syscall.EWOULDBLOCK):
		return false, fmt.Errorf("lock %s: %w", s.file.Name(), err)
	}
	return s.held, nil
}

// Lock takes the lock of a file, which lasts until the file is closed. It waits
// until ctx ends.
func Lock(ctx context.Context, file *os.File) error {
	s := Seat{file: file}
	for {
		held, err := s.Take()
		if held || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ErrTaken
		case <-time.After(lockInterval):
		}
	}
}

// Close gives the lock back, unless it was passed on.
func (s *Seat) Close() {
	s.stopListening()
	_ = s.file.Close()
	s.held = false
}

// Listen accepts requests for the lock, which this process has. After an error other
// processes wait until this one ends.
func (s *Seat) Listen(ctx context.Context) error {
	if s.self.Group == "" || s.unlisten != nil {
		return nil
	}
	path := filepath.Join(s.dir, SocketName)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("listen for a successor: %w", err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return fmt.Errorf("listen for a successor: %w", err)
	}
	l.SetUnlinkOnClose(false) // a successor may have replaced it
	if err := os.Chmod(path, 0o600); err != nil {
		return errors.Join(fmt.Errorf("listen for a successor: %w", err), l.Close())
	}
	ctx, cancel := context.WithCancel(ctx)
	served := make(chan struct{})
	s.unlisten = func() {
		cancel()
		_ = l.Close()
		<-served
	}
	go func() {
		defer close(served)
		s.accept(ctx, l)
	}()
	return nil
}

func (s *Seat) stopListening() {
	if s.unlisten != nil {
		s.unlisten()
		s.unlisten = nil
	}
}

// Requests delivers the successors that ask, one at a time.
func (s *Seat) Requests() <-chan *Request { return s.requests }

// accept serves the listener until it is closed, or ctx ends.
func (s *Seat) accept(ctx context.Context, l *net.UnixListener) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return
		}
		r := &Request{seat: s, conn: conn}
		_ = conn.SetDeadline(time.Now().Add(callTimeout))
		m, err := receive(conn)
		switch {
		case err != nil:
			err = fmt.Errorf("read the request: %w", err)
		case m.Version != version:
			err = r.reject(fmt.Sprintf("it speaks version %d of the handover, this one version %d", version, m.Version))
		case m.From.Group != s.self.Group:
			err = r.reject(fmt.Sprintf("it belongs to %q", s.self.Group))
		case m.From.ID == s.self.ID:
			err = r.reject("it has the same identity")
		default:
			r.From = m.From
			select {
			case s.requests <- r:
				continue
			case <-ctx.Done():
				_ = conn.Close()
				return
			}
		}
		klog.FromContext(ctx).Info("Rejected a request to take over the node", "from", m.From, "reason", err)
		_ = conn.Close()
	}
}

// Request is a successor's request for the lock.
type Request struct {
	// From is the successor.
	From Identity
	seat *Seat
	conn *net.UnixConn
}

func (r *Request) reject(reason string) error {
	return errors.Join(errors.New(reason), send(r.conn, message{Rejected: reason}, nil))
}

// Pass passes on the lock and the state. This process decides nothing from then on,
// unless Await fails.
func (r *Request) Pass(content any) error {
	data, err := json.Marshal(content)
	if err != nil {
		return err
	}
	r.seat.stopListening()
	_ = r.conn.SetDeadline(time.Now().Add(callTimeout))
	if err := send(r.conn, message{Version: version, From: r.seat.self, Content: data}, r.seat.file); err != nil {
		return fmt.Errorf("pass on the lock: %w", err)
	}
	return nil
}

// Await waits until the successor serves and reads its message into content. If the
// successor has ended or given up, it returns an error and this process decides
// again. It also returns an error once ctx ends.
func (r *Request) Await(ctx context.Context, content any) error {
	_ = r.conn.SetDeadline(time.Time{})
	defer context.AfterFunc(ctx, func() { _ = r.conn.SetDeadline(time.Unix(1, 0)) })()
	m, err := receive(r.conn)
	if err == nil {
		err = json.Unmarshal(m.Content, content)
	}
	if err != nil {
		return fmt.Errorf("wait for the successor: %w", errors.Join(ctx.Err(), err))
	}
	return nil
}

// Left reports to the successor that this process has ended its part.
func (r *Request) Left(content any) error {
	data, err := json.Marshal(content)
	if err != nil {
		return err
	}
	_ = r.conn.SetDeadline(time.Now().Add(callTimeout))
	return send(r.conn, message{Content: data}, nil)
}

// Close ends the connection.
func (r *Request) Close() { _ = r.conn.Close() }

// Predecessor is the process that has passed the lock to this one.
type Predecessor struct {
	// Content is its state.
	Content json.RawMessage
	// From is its identity.
	From Identity
	seat *Seat
	conn *net.UnixConn
}

// Ask requests the lock from the process that has it. Without an error this process
// has it afterwards.
func (s *Seat) Ask(ctx context.Context) (_ *Predecessor, err error) {
	if s.self.Group == "" {
		return nil, &RejectedError{"this one belongs to no group"}
	}
	if slices.Contains(s.read().Retired, s.self.ID) {
		return nil, ErrRetired
	}
	dialer := net.Dialer{Timeout: callTimeout}
	connected, err := dialer.DialContext(ctx, "unix", filepath.Join(s.dir, SocketName))
	if err != nil {
		return nil, ErrSilent
	}
	conn, ok := connected.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(ErrSilent, connected.Close())
	}
	defer func() {
		if err != nil {
			_ = conn.Close()
		}
	}()
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	_ = conn.SetDeadline(time.Now().Add(passTimeout))
	if err := send(conn, message{Version: version, From: s.self}, nil); err != nil {
		return nil, fmt.Errorf("ask to take over: %w", err)
	}
	m, file, err := receiveFile(conn)
	switch {
	case err != nil:
		return nil, fmt.Errorf("ask to take over: %w", err)
	case m.Rejected != "":
		return nil, &RejectedError{m.Rejected}
	case file == nil:
		return nil, errors.New("ask to take over: the lock did not come with the answer")
	}
	_ = s.file.Close()
	s.file, s.held = file, true
	return &Predecessor{Content: m.Content, From: m.From, seat: s, conn: conn}, nil
}

// Serving reports to the predecessor that this process serves the node, and waits
// until the predecessor has ended its part. Its message is read into left. After an
// error the predecessor has ended without one, or is not in the lock's file.
func (p *Predecessor) Serving(content, left any) error {
	data, err := json.Marshal(content)
	if err != nil {
		return err
	}
	file := p.seat.read()
	file.Retired = append(slices.DeleteFunc(file.Retired, func(id string) bool { return id == p.From.ID }), p.From.ID)
	file.Retired = file.Retired[max(0, len(file.Retired)-maxRetired):]
	// A full or read-only disk is no reason to return the node.
	noted := p.seat.write(file)
	_ = p.conn.SetDeadline(time.Now().Add(callTimeout))
	if err := send(p.conn, message{Content: data}, nil); err != nil {
		return errors.Join(noted, fmt.Errorf("report to the predecessor: %w", err))
	}
	_ = p.conn.SetDeadline(time.Now().Add(leaveTimeout))
	m, err := receive(p.conn)
	if err == nil {
		err = json.Unmarshal(m.Content, left)
	}
	if err != nil {
		err = fmt.Errorf("wait until the predecessor has left: %w", err)
	}
	return errors.Join(noted, err)
}

// Close ends the connection. Before Serving it returns the node to the predecessor.
func (p *Predecessor) Close() { _ = p.conn.Close() }

// read returns the content of the lock's file, the zero value if it cannot be read.
func (s *Seat) read() lockFile {
	var out lockFile
	data, err := io.ReadAll(io.NewSectionReader(s.file, 0, 1<<16))
	if err == nil {
		_ = json.Unmarshal(data, &out)
	}
	return out
}

// write replaces the content. The file itself stays, since the lock is on it.
func (s *Seat) write(content lockFile) error {
	data, err := json.Marshal(content)
	if err != nil {
		return err
	}
	if err := s.file.Truncate(0); err != nil {
		return fmt.Errorf("note the predecessor: %w", err)
	}
	if _, err := s.file.WriteAt(append(data, '\n'), 0); err != nil {
		return fmt.Errorf("note the predecessor: %w", err)
	}
	return nil
}

// send writes a message, with a file unless that is nil.
func send(conn *net.UnixConn, m message, file *os.File) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	data = append(data, '\n')
	if len(data) > maxMessage {
		return fmt.Errorf("a message of %d bytes", len(data))
	}
	if file != nil {
		// The file goes with the first byte.
		if _, _, err := conn.WriteMsgUnix(data[:1], syscall.UnixRights(int(file.Fd())), nil); err != nil {
			return err
		}
		data = data[1:]
	}
	_, err = conn.Write(data)
	return err
}

func receive(conn *net.UnixConn) (message, error) {
	m, file, err := receiveFile(conn)
	if file != nil {
		_ = file.Close()
	}
	return m, err
}

// receiveFile reads a message and the file that came with it, nil if none did. The
// other side waits for an answer before it sends the next message, so nothing of that
// is read.
func receiveFile(conn *net.UnixConn) (m message, file *os.File, err error) {
	defer func() {
		if err != nil && file != nil {
			_ = file.Close()
			file = nil
		}
	}()
	rights := make([]byte, syscall.CmsgSpace(4))
	buffer := make([]byte, 64<<10)
	var data []byte
	for len(data) == 0 || data[len(data)-1] != '\n' {
		n, rightsLen, _, _, err := conn.ReadMsgUnix(buffer, rights)
		if rightsLen > 0 && file == nil {
			file = fileOf(rights[:rightsLen])
		}
		if n == 0 && err == nil {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return message{}, file, err
		}
		if data = append(data, buffer[:n]...); len(data) > maxMessage {
			return message{}, file, fmt.Errorf("a message of more than %d bytes", maxMessage)
		}
	}
	err = json.Unmarshal(data, &m)
	return m, file, err
}

// fileOf returns the file in a control message, nil if there is none.
func fileOf(control []byte) *os.File {
	messages, err := syscall.ParseSocketControlMessage(control)
	if err != nil {
		return nil
	}
	for i := range messages {
		fds, err := syscall.ParseUnixRights(&messages[i])
		if err != nil || len(fds) == 0 {
			continue
		}
		syscall.CloseOnExec(fds[0])
		return os.NewFile(uintptr(fds[0]), LockName)
	}
	return nil
}
