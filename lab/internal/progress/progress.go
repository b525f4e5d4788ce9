// Package progress tells a person at a terminal, or a log, what a long list of
// tasks is doing: which task runs, for how long, and how many are left.
package progress

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"
)

// Heartbeat is how often a running task is mentioned again where lines cannot
// be rewritten, as in a log file.
const Heartbeat = 20 * time.Second

// Reporter writes the progress of a list of tasks. It is safe for concurrent
// use, but shows one task at a time: the one begun last.
type Reporter struct {
	out      io.Writer
	terminal bool
	now      func() time.Time

	mu       sync.Mutex
	total    int
	begun    int
	current  *Task
	lastLine time.Time
	drawn    bool
}

// New returns a Reporter for total tasks that writes to out, and rewrites the
// line of the running task where out is a terminal.
func New(out io.Writer, total int) *Reporter {
	file, ok := out.(*os.File)
	return newReporter(out, total, ok && term.IsTerminal(int(file.Fd())), time.Now)
}

func newReporter(out io.Writer, total int, terminal bool, now func() time.Time) *Reporter {
	return &Reporter{out: out, terminal: terminal, now: now, total: total}
}

// Printf writes a line of its own.
func (r *Reporter) Printf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.line(fmt.Sprintf(format, args...))
}

// Task is one task of the list.
type Task struct {
	reporter *Reporter
	name     string
	number   int
	started  time.Time
	detail   string
	stop     chan struct{}
	once     sync.Once
}

// Begin announces the next task and shows its elapsed time until Done or
// Failed is called.
func (r *Reporter) Begin(name string) *Task {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.begun++
	t := &Task{reporter: r, name: name, number: r.begun, started: r.now(), stop: make(chan struct{})}
	r.current = t
	r.draw(t)
	go t.tick()
	return t
}

func (t *Task) tick() {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-t.stop:
			return
		case <-ticker.C:
			r := t.reporter
			r.mu.Lock()
			if r.current == t && (r.terminal || r.now().Sub(r.lastLine) >= Heartbeat) {
				r.draw(t)
			}
			r.mu.Unlock()
		}
	}
}

// Detail sets the words shown behind the elapsed time of the running task.
func (t *Task) Detail(detail string) {
	t.reporter.mu.Lock()
	t.detail = detail
	t.reporter.mu.Unlock()
}

// Done announces the end of the task.
func (t *Task) Done() { t.end("done in") }

// Failed announces that the task ended without success; the caller reports why.
func (t *Task) Failed() { t.end("FAILED after") }

func (t *Task) end(how string) {
	t.once.Do(func() {
		close(t.stop)
		r := t.reporter
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.current == t {
			r.current = nil
		}
		left := r.total - t.number
		suffix := fmt.Sprintf("%d left", left)
		if left <= 0 {
			suffix = "none left"
		}
		r.line(fmt.Sprintf("%s %s %s, %s", r.prefix(t), how, Elapsed(r.now().Sub(t.started)), suffix))
	})
}

func (r *Reporter) prefix(t *Task) string {
	width := len(fmt.Sprint(r.total))
	return fmt.Sprintf("[%*d/%d] %-26s", width, t.number, r.total, t.name)
}

// draw shows the running task; the caller holds mu.
func (r *Reporter) draw(t *Task) {
	text := fmt.Sprintf("%s running %s", r.prefix(t), Elapsed(r.now().Sub(t.started)))
	if t.detail != "" {
		text += "  " + t.detail
	}
	if !r.terminal {
		r.line(text)
		return
	}
	fmt.Fprintf(r.out, "\r\x1b[K%s", text)
	r.drawn = true
}

// line ends whatever is drawn and writes one full line; the caller holds mu.
func (r *Reporter) line(text string) {
	if r.drawn {
		fmt.Fprint(r.out, "\r\x1b[K")
		r.drawn = false
	}
	fmt.Fprintln(r.out, strings.TrimRight(text, " "))
	r.lastLine = r.now()
}

// Elapsed formats a duration for people: tenths of a second below a minute,
// whole seconds above.
func Elapsed(d time.Duration) string {
	if d < time.Minute {
		return fmt.Sprintf("%.1fs", d.Seconds())
	}
	return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
}
