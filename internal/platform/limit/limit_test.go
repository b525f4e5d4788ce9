package limit

import (
	"errors"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"testing"
)

// holding is what a holder of a case has: a number for each of its connections, the bytes of
// its request, 0 for an idle one.
type holding map[string][]int64

// fill makes a Limiter whose connections of 10 bytes each hold that, in the order of the
// names.
func fill(t *testing.T, most int64, held holding, order ...string) *Limiter {
	t.Helper()
	l := New(Config{Shared: most})
	for _, name := range order {
		for _, bytes := range held[name] {
			add(t, l, name, bytes)
		}
	}
	return l
}

func add(t *testing.T, l *Limiter, name string, bytes int64) *conn {
	t.Helper()
	c := &conn{Conn: &deaf{}, limiter: l, port: "test", address: netip.MustParseAddr(name), used: true}
	var err error
	if c.base, err = l.open(&l.shared, c.address, c, 10); err != nil {
		t.Fatal(err)
	}
	l.idle(c)
	if bytes > 0 {
		if _, err := l.begin(c, bytes, false); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// deaf is a connection that notes that it was closed.
type deaf struct {
	net.Conn
	closed bool
}

func (d *deaf) Close() error { d.closed = true; return nil }

// Which connection is closed for a new one of 10 bytes, and which is not served.
func TestVictim(t *testing.T) {
	const a, b, c, d = "10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"
	tests := map[string]struct {
		most  int64
		held  holding
		order []string
		// from is the address of the new connection.
		from string
		// want is the address of the one that is closed and what it had, "" for none.
		want string
		had  int64
		busy bool
	}{
		"there is room": {most: 100, held: holding{a: {0, 0}}, order: []string{a}, from: b},
		"the largest of the one that has most": {most: 100, held: holding{a: {10, 50}, b: {10}}, order: []string{a, b}, from: c,
			want: a, had: 60},
		"the oldest idle one of the one that has most": {most: 40, held: holding{a: {0, 0}, b: {0, 0}}, order: []string{a, b}, from: c,
			want: a, had: 10},
		"its own, where others have less": {most: 40, held: holding{a: {0, 0, 0}, b: {0}}, order: []string{a, b}, from: a,
			want: a, had: 10},
		"idle ones of equals, as all have one": {most: 30, held: holding{a: {0}, b: {0}, c: {0}}, order: []string{b, a, c},
			from: d, want: b, had: 10},
		"none where equals are at work": {most: 40, held: holding{a: {10}, b: {10}}, order: []string{a, b}, from: c,
			busy: true},
		"none for one that has most and works": {most: 60, held: holding{a: {30}, b: {10}}, order: []string{a, b}, from: a,
			busy: true},
		"none of one that would have less than the new": {most: 50, held: holding{a: {0}, b: {10, 10}}, order: []string{a, b}, from: b,
			busy: true},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			l := fill(t, tt.most, tt.held, tt.order...)
			h := l.shared.holders[any(netip.MustParseAddr(tt.from))]
			if h == nil {
				h = &holder{}
			}
			victims, ok := l.shared.makeRoom(h, 10)
			if ok == tt.busy || len(victims) > 1 {
				t.Fatalf("admitted: %t, %d closed", ok, len(victims))
			}
			got, had := "", int64(0)
			for _, v := range victims {
				got = v.address.String()
				for a := range l.shared.holders[any(v.address)].accounts {
					if a.conn == v {
						had += a.bytes
					}
				}
			}
			if got != tt.want || had != tt.had {
				t.Errorf("closed %q with %d bytes, want %q with %d", got, had, tt.want, tt.had)
			}
		})
	}
}

// A request takes connections of those that hold more than twice as much, and no idle ones that
// would not be enough.
func TestVictimsOfARequest(t *testing.T) {
	const a, b, c = "10.0.0.1", "10.0.0.2", "10.0.0.3"
	l := fill(t, 1000, holding{a: {290, 290, 290}, b: {0, 0}, c: {0}}, a, b, c)
	asking := add(t, l, "10.0.0.4", 0)
	mine, err := l.begin(asking, 10, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.grow(mine, 100); err != nil {
		t.Errorf("one that holds %d bytes is kept out by one that holds 900: %v", mine.bytes, err)
	}
	if got := l.shared.going; got != 300 {
		t.Errorf("%d bytes are going, want the 300 of one connection", got)
	}
	if err := l.grow(mine, 700); !errors.Is(err, ErrBusy) {
		t.Errorf("one gets nearly all: %v", err)
	}
	// What is going is memory until its handler has returned.
	l = fill(t, 1000, holding{a: {590, 390}}, a)
	other := add(t, l, b, 0)
	if got, err := l.begin(other, 10, false); err != nil {
		t.Fatal(err)
	} else if err := l.grow(got, 600); !errors.Is(err, ErrBusy) {
		t.Errorf("while 600 of 1000 bytes are going more of them go: %v", err)
	}
}

// A connection that was closed for another gets nothing more, and counts until its
// handler and its server are done with it.
func TestWhatIsGoingIsHeld(t *testing.T) {
	l := New(Config{Shared: 100})
	first := add(t, l, "10.0.0.1", 0)
	a, err := l.begin(first, 80, false)
	if err != nil {
		t.Fatal(err)
	}
	second := add(t, l, "10.0.0.2", 0)
	if _, err := l.begin(second, 5, false); err != nil {
		t.Fatal(err)
	}
	if inner, ok := first.Conn.(*deaf); !ok || !inner.closed {
		t.Fatal("nothing was closed")
	}
	if err := l.grow(a, 1); !errors.Is(err, ErrBusy) {
		t.Errorf("it gets more: %v", err)
	}
	if l.shared.held != 105 || l.shared.going != 90 {
		t.Errorf("%d held, %d of it going, want 105 and 90", l.shared.held, l.shared.going)
	}
	l.end(first, a)
	for range 2 { // net/http may close a connection twice
		if err := first.Close(); err != nil {
			t.Error(err)
		}
	}
	if l.shared.held != 15 || l.shared.going != 0 || len(l.shared.holders) != 1 {
		t.Errorf("%d held, %d of it going, by %d", l.shared.held, l.shared.going, len(l.shared.holders))
	}
}

// However connections and requests come and go, what a budget holds is the sum of its
// accounts and never far beyond its bound, and nothing stays.
func TestSums(t *testing.T) {
	l := New(Config{Shared: 10 << 10, Reserved: 10 << 10})
	var group sync.WaitGroup
	for worker := range 8 {
		group.Go(func() {
			r := rand.New(rand.NewPCG(uint64(worker), 1))
			address := netip.AddrFrom4([4]byte{10, 0, 0, byte(worker / 2)})
			for range 500 {
				c := &conn{Conn: &deaf{}, limiter: l, port: "test", address: address, used: true}
				base, err := l.open(&l.shared, address, c, 100)
				if err != nil {
					continue
				}
				l.mu.Lock()
				c.base = base
				l.idle(c)
				l.mu.Unlock()
				for range r.IntN(5) {
					a, err := l.begin(c, 50, false)
					if err != nil {
						continue
					}
					if bytes := int64(r.IntN(5000)); l.grow(a, bytes) == nil {
						l.shrink(a, bytes/2)
					}
					switch r.IntN(4) {
					case 0:
						l.move(c.base, &l.reserved, c)
					case 1:
						l.move(a, &l.reserved, c)
					case 2:
						l.move(a, &l.shared, address)
					}
					l.check(t)
					l.end(c, a)
				}
				_ = c.Close()
			}
		})
	}
	group.Wait()
	for _, b := range []*budget{&l.shared, &l.reserved} {
		if b.held != 0 || b.going != 0 || len(b.holders) != 0 {
			t.Errorf("at the end %d bytes are held, %d going, by %d holders", b.held, b.going, len(b.holders))
		}
	}
}

func (l *Limiter) check(t *testing.T) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range []*budget{&l.shared, &l.reserved} {
		var held, going int64
		for key, h := range b.holders {
			var of, off int64
			for a := range h.accounts {
				if a.holder != h || a.budget != b || h.key != key {
					t.Errorf("an account is with another holder")
				}
				of += a.bytes
				if a.going {
					off += a.bytes
				}
			}
			if of != h.held || off != h.going {
				t.Errorf("a holder has %d bytes, %d going; its accounts have %d and %d", h.held, h.going, of, off)
			}
			held, going = held+of, going+off
		}
		if held != b.held || going != b.going {
			t.Errorf("%d bytes are held, %d going; the holders have %d and %d", b.held, b.going, held, going)
		}
	}
	if l.shared.held > l.shared.most*2 {
		t.Errorf("%d bytes are held of %d", l.shared.held, l.shared.most)
	}
}
