package ui

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"path"
	"time"

	"golang.org/x/net/netutil"

	"github.com/divvy-gpu/divvy/internal/platform/serve"
	"github.com/divvy-gpu/divvy/internal/report/ui/picture"
)

const (
	// maxStreams bounds the pages that are open at the same time. A browser has six connections to one
	// address, of which each page keeps one.
	maxStreams = 4
	// maxConnections bounds all connections: those of streams, and what pages ask besides.
	maxConnections = 64
	// gather is how long changes are collected before they are sent, and quiet after how long
	// without any a sign of life is.
	gather = 250 * time.Millisecond
	quiet  = 15 * time.Second
	// sendLimit is how long a page may take to read what was sent.
	sendLimit = 20 * time.Second
	// nodesPerMessage bounds a message, so that a page can draw the first before the last has come.
	nodesPerMessage = 250
	stopLimit       = 2 * time.Second
)

//go:embed static
var static embed.FS

// Server serves one person.
type Server struct {
	feed     *Feed
	files    fs.FS
	session  *session
	listener net.Listener
	streams  chan struct{}
}

// Listen returns a server on a port of the loopback address, any free one if 0. That the page was
// opened is written to notices.
func Listen(ctx context.Context, port int, feed *Feed, notices io.Writer) (*Server, error) {
	files, err := fs.Sub(static, "static")
	if err != nil {
		return nil, fmt.Errorf("read the files of the page: %w", err)
	}
	l, err := serve.Listen(ctx, "the page", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return nil, err
	}
	return &Server{feed: feed, files: files, session: newSession(l.Addr().String(), notices), listener: l,
		streams: make(chan struct{}, maxStreams)}, nil
}

// URL is what the person opens. It has the token, so it belongs in no log.
func (s *Server) URL() string { return s.at("?token=" + s.session.token) }

func (s *Server) at(path string) string { return "http://" + s.session.host + s.session.base + path }

// Run follows the cluster and serves until ctx ends, which is no error, or until ErrOpenedAgain.
func (s *Server) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	following := make(chan struct{})
	go func() {
		defer close(following)
		s.feed.Run(ctx)
	}()
	h := serve.NewServer(s.Handler())
	// What browsers do with connections is of no use to the person.
	h.ErrorLog = log.New(io.Discard, "", 0)
	h.BaseContext = func(net.Listener) context.Context { return ctx }
	ended := make(chan error, 1)
	go func() { ended <- h.Serve(netutil.LimitListener(s.listener, maxConnections)) }()
	var err error
	select {
	case <-s.session.again:
		err = ErrOpenedAgain
	case <-ctx.Done():
	case err = <-ended:
		stop()
		<-following
		return fmt.Errorf("serve the page: %w", err)
	}
	stop() // which ends the streams
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer cancel()
	if h.Shutdown(bounded) != nil {
		h.Close() //nolint:errcheck // nothing is left to do about it
	}
	<-ended //nolint:errcheck // it says that the server was shut down
	<-following
	return err
}

// kinds are the types of the files. Tables of the operating system may have others, with which no
// browser runs a script.
var kinds = map[string]string{".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}

// Handler answers all requests.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	served := http.FileServerFS(s.files)
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		if kind := kinds[path.Ext(r.URL.Path)]; kind != "" {
			w.Header().Set("Content-Type", kind)
		}
		served.ServeHTTP(w, r)
	})
	mux.HandleFunc("GET /api/stream", s.stream)
	mux.HandleFunc("GET /api/why", s.why)
	return s.session.guard(mux)
}

// why answers why a pod waits.
func (s *Server) why(w http.ResponseWriter, r *http.Request) {
	namespace, name := r.URL.Query().Get("namespace"), r.URL.Query().Get("name")
	e, err := s.feed.explain(r.Context(), namespace, name)
	var missing unknownPodError
	switch {
	case errors.As(err, &missing):
		answer(w, http.StatusNotFound, problem{err.Error()})
	case err != nil:
		answer(w, http.StatusServiceUnavailable, problem{err.Error()})
	default:
		answer(w, http.StatusOK, e)
	}
}

// problem is the answer to a request that fails.
type problem struct {
	Error string `json:"error"`
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the page may be closed
}

// stream sends what is known, once all has been read, and then what changes, as Server-Sent Events:
//
//	nodes    some nodes, as picture.Node
//	gone     names of nodes that do not exist any more
//	waiting  the pods that wait
//	status   what could be read
//	complete all that was known when the stream began has been sent: what was not in it is gone
func (s *Server) stream(w http.ResponseWriter, r *http.Request) {
	select {
	case s.streams <- struct{}{}:
		defer func() { <-s.streams }()
	default:
		answer(w, http.StatusServiceUnavailable, problem{fmt.Sprintf("This page is open %d times already.", maxStreams)})
		return
	}
	defer s.feed.watched()()
	to := http.NewResponseController(w)
	// The limits of the server are those of short requests.
	if err := to.SetReadDeadline(time.Time{}); err != nil {
		answer(w, http.StatusInternalServerError, problem{err.Error()})
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	sent := &sender{w: w, to: to}
	var revision uint64
	var status *Status
	complete := false
	timer := time.NewTimer(quiet)
	defer timer.Stop()
	for sent.err == nil {
		changed := s.feed.cluster.Changed()
		if now := s.feed.Status(); status == nil || !now.equal(status) {
			status = &now
			sent.event("status", status)
		}
		if status.Reading == "" {
			revision = sent.changes(s.feed.cluster, revision)
			if !complete {
				sent.event("complete", struct{}{})
				complete = true
			}
		}
		timer.Reset(quiet)
		select {
		case <-r.Context().Done():
			return
		case <-timer.C:
			sent.event("alive", struct{}{})
			continue
		case <-changed:
		}
		select {
		case <-r.Context().Done():
			return
		case <-time.After(gather):
		}
	}
}

// changes sends what has changed since a revision, and returns the one that it leads to.
func (s *sender) changes(c *picture.Cluster, revision uint64) uint64 {
	change, next := c.Since(revision)
	for nodes := change.Nodes; len(nodes) > 0 && s.err == nil; {
		n := min(len(nodes), nodesPerMessage)
		s.text("nodes", append(append([]byte("["), bytes.Join(nodes[:n], []byte(","))...), ']'))
		nodes = nodes[n:]
	}
	if len(change.Gone) > 0 {
		s.event("gone", change.Gone)
	}
	if change.Waiting != nil {
		s.event("waiting", waitingMessage{change.WaitingTotal, change.Waiting})
	}
	return next
}

// waitingMessage is the data of the event waiting.
type waitingMessage struct {
	Total int `json:"total"`
	Pods  any `json:"pods"`
}

// sender writes events until the first error.
type sender struct {
	w   io.Writer
	to  *http.ResponseController
	err error
}

func (s *sender) event(name string, data any) {
	text, err := json.Marshal(data)
	if s.err == nil {
		s.err = err
	}
	s.text(name, text)
}

// text sends JSON, which is on one line.
func (s *sender) text(name string, data []byte) {
	if s.err == nil {
		s.err = s.to.SetWriteDeadline(time.Now().Add(sendLimit))
	}
	if s.err == nil {
		_, s.err = fmt.Fprintf(s.w, "event: %s\ndata: %s\n\n", name, data)
	}
	if s.err == nil {
		s.err = s.to.Flush()
	}
}
