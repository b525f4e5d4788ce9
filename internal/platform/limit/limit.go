package limit

import (
	"errors"
	"net/netip"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// What is counted for connections and requests besides bodies and answers, in bytes.
const (
	// connBytes is what a connection takes before it asks anything: goroutine, buffers and
	// an unfinished header. tlsBytes is added for a handshake and the buffers of TLS.
	connBytes = 24 << 10
	tlsBytes  = 24 << 10
	// usedBytes is added with its first request, for its buffers, and
	// http2Bytes where it speaks HTTP/2, for its receive buffers and frames: see
	// serve.NewServer.
	usedBytes  = 8 << 10
	http2Bytes = 320 << 10
	// requestBytes is the goroutine of a request, without its header.
	requestBytes = 16 << 10
)

// ErrBusy is in the error of what a bound rejects.
var ErrBusy = errors.New("the memory for requests is in use by other requests; try again")

// Config sets the budgets. The zero value has those of a small program: one that
// answers probes and metrics.
type Config struct {
	// Shared is how many bytes callers without a reserve may hold together.
	Shared int64
	// Reserved is the same for callers that have a reserve.
	Reserved int64
	// HasReserve reports whether connections from an address are such callers. It may
	// be nil, and is called for each connection.
	HasReserve func(netip.Addr) bool
}

// smallBudget is the default of Config.Shared.
const smallBudget = 8 << 20

// Limiter is the two budgets. It is safe for concurrent use; New makes one. It is a
// prometheus.Collector.
type Limiter struct {
	hasReserve func(netip.Addr) bool
	rejected   *prometheus.CounterVec

	mu               sync.Mutex // guards what follows and all that is reachable from it
	shared, reserved budget
	// moment counts changes of connections; it orders them by when they became idle.
	moment int64
}

// New returns a Limiter of which nothing is used.
func New(c Config) *Limiter {
	if c.Shared <= 0 {
		c.Shared = smallBudget
	}
	if c.HasReserve == nil {
		c.HasReserve = func(netip.Addr) bool { return false }
	}
	return &Limiter{
		hasReserve: c.HasReserve, rejected: metrics.HTTPRejected.NewCounters(),
		shared: budget{most: c.Shared, holders: map[any]*holder{}}, reserved: budget{most: c.Reserved, holders: map[any]*holder{}},
	}
}

var heldDesc = metrics.HTTPHeld.Desc()

// Describe implements prometheus.Collector.
func (l *Limiter) Describe(ch chan<- *prometheus.Desc) {
	l.rejected.Describe(ch)
	ch <- heldDesc
}

// Collect implements prometheus.Collector.
func (l *Limiter) Collect(ch chan<- prometheus.Metric) {
	l.rejected.Collect(ch)
	l.mu.Lock()
	shared, reserved := l.shared.held, l.reserved.held
	l.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(heldDesc, prometheus.GaugeValue, float64(shared), "shared")
	ch <- prometheus.MustNewConstMetric(heldDesc, prometheus.GaugeValue, float64(reserved), "reserved")
}

// budget is a number of bytes and their holders.
type budget struct {
	most, held int64
	// going is the part of held that is of connections that were closed for others;
	// it is free as soon as their handlers return.
	going   int64
	holders map[any]*holder
}

// holder is a remote address, or a connection with a reserve.
type holder struct {
	key         any
	held, going int64
	accounts    map[*account]struct{}
}

// account is what one connection or request holds. It belongs to one holder and is
// closed with its connection.
type account struct {
	budget *budget
	holder *holder
	conn   *conn
	bytes  int64
	going  bool
	// closed is true from close on. A request of HTTP/2 may begin after its connection was
	// closed, and what it adds to the connection's account would be held for good.
	closed bool
}

// open returns an account with so many bytes.
func (l *Limiter) open(b *budget, key any, c *conn, bytes int64) (*account, error) {
	l.mu.Lock()
	h := b.holders[key]
	if h == nil {
		h = &holder{key: key, accounts: map[*account]struct{}{}}
	}
	victims, ok := b.makeRoom(h, bytes)
	var a *account
	if ok {
		a = &account{budget: b, holder: h, conn: c}
		b.holders[key] = h
		h.accounts[a] = struct{}{}
		a.add(bytes)
	}
	l.mu.Unlock()
	l.cut(victims)
	if !ok {
		return nil, ErrBusy
	}
	return a, nil
}

// grow adds bytes to an account. An error leaves it as it was.
func (l *Limiter) grow(a *account, bytes int64) error {
	l.mu.Lock()
	var victims []*conn
	ok := false
	if !a.going && !a.closed {
		if victims, ok = a.budget.makeRoom(a.holder, bytes); ok {
			a.add(bytes)
		}
	}
	l.mu.Unlock()
	l.cut(victims)
	if !ok {
		return ErrBusy
	}
	return nil
}

func (l *Limiter) shrink(a *account, bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a.add(-bytes)
}

func (l *Limiter) close(a *account) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a.close()
}

// move makes an account one of another budget and holder. It moves also where that
// exceeds the budget: the bytes are held already.
func (l *Limiter) move(a *account, b *budget, key any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a.budget == b && a.holder.key == key || a.going || a.closed {
		return
	}
	bytes := a.bytes
	a.leave()
	h := b.holders[key]
	if h == nil {
		h = &holder{key: key, accounts: map[*account]struct{}{}}
		b.holders[key] = h
	}
	a.budget, a.holder = b, h
	h.accounts[a] = struct{}{}
	a.add(bytes)
}

// add changes what the account holds. The Limiter is locked.
func (a *account) add(bytes int64) {
	if a.closed {
		return
	}
	a.bytes += bytes
	a.holder.held += bytes
	a.budget.held += bytes
	if a.going {
		a.holder.going += bytes
		a.budget.going += bytes
	}
}

// close ends the account, which holds nothing any more. The Limiter is locked.
func (a *account) close() {
	if !a.closed {
		a.leave()
		a.closed = true
	}
}

// leave takes the account from its holder. The Limiter is locked.
func (a *account) leave() {
	a.add(-a.bytes)
	delete(a.holder.accounts, a)
	if len(a.holder.accounts) == 0 {
		delete(a.budget.holders, a.holder.key)
	}
}

// makeRoom reports whether the holder may have so many bytes more, after the
// connections were closed that it returns. What these hold is marked as going. The
// Limiter is locked.
func (b *budget) makeRoom(h *holder, bytes int64) (victims []*conn, ok bool) {
	for b.held-b.going+bytes > b.most {
		of, victim := b.victim(h, bytes)
		// What is going is still memory. While it is much, only holders of next to nothing get
		// more.
		if victim == nil || b.going > b.most/2 && h.net()+bytes > b.most/64 {
			return victims, false
		}
		victims = append(victims, victim)
		for a := range of.accounts {
			if a.conn == victim && !a.going {
				a.going = true
				of.going += a.bytes
				b.going += a.bytes
			}
		}
	}
	return victims, true
}

// victim returns the connection that is closed before the holder gets so many bytes
// more, and its holder; nil for none. It is the one that holds most of a holder that
// has more than twice as much as h would have. Where all have about the same it is a
// connection on which nothing is asked, of one that has at least as much: the one that
// is idle for the longest time.
func (b *budget) victim(h *holder, bytes int64) (*holder, *conn) {
	would := h.net() + bytes
	var heavy *holder
	for _, other := range b.holders {
		if other != h && other.net() > 2*would && (heavy == nil || other.net() > heavy.net()) {
			heavy = other
		}
	}
	if heavy != nil {
		return heavy, heavy.largest().conn
	}
	var of *holder
	var idle *conn
	for _, other := range b.holders {
		if other != h && other.net() < would || of != nil && other.net() < of.net() {
			continue
		}
		if c := other.idle(); c != nil && c.base.bytes >= bytes && (of == nil || other.net() > of.net() || c.idleSince < idle.idleSince) {
			of, idle = other, c
		}
	}
	return of, idle
}

// net is what the holder has without what is going.
func (h *holder) net() int64 { return h.held - h.going }

// largest returns the account with most bytes of those that are not going.
func (h *holder) largest() (largest *account) {
	for a := range h.accounts {
		if !a.going && (largest == nil || a.bytes > largest.bytes) {
			largest = a
		}
	}
	return largest
}

// idle returns the connection on which nothing was asked for the longest time, nil for
// none.
func (h *holder) idle() (oldest *conn) {
	for a := range h.accounts {
		if c := a.conn; a == c.base && !a.going && c.requests == 0 && (oldest == nil || c.idleSince < oldest.idleSince) {
			oldest = c
		}
	}
	return oldest
}

// cut closes connections, without the lock.
func (l *Limiter) cut(conns []*conn) {
	for _, c := range conns {
		l.rejected.WithLabelValues(c.port, "displaced").Inc()
		c.abort()
	}
}
