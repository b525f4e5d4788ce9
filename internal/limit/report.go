package limit

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
)

// gunzipBytes is what a client takes that reads a report uncompressed.
const gunzipBytes = 80 << 10

// maxReport bounds a report, compressed, in bytes. That of 5000 nodes with 8 devices
// each and 50 000 pods takes some 1.6 MB, a twentieth of its text.
const maxReport = 16 << 20

// Reports makes large answers, one at a time, into memory: a client that reads slowly
// holds up no other. Those who ask for the same while they wait get the same answer.
// The zero value is one that can be used.
type Reports[K comparable] struct {
	turn sync.Mutex   // one report is made at a time; guards gzip
	gzip *gzip.Writer // which takes a megabyte

	mu sync.Mutex // guards next
	// next are reports that nobody has begun to make.
	next map[K]*report
}

// report is a text that is made once, compressed.
type report struct {
	done chan struct{} // closed when it is made
	gzip []byte
	err  error
}

// Serve answers with what write writes for the key, as it is after Serve was called.
// After an error, which may be that of write, nothing was answered.
func (s *Reports[K]) Serve(w http.ResponseWriter, r *http.Request, key K, contentType string, write func(io.Writer) error) error {
	made, err := s.get(r.Context(), key, write)
	if err != nil {
		return err
	}
	compressed, held := acceptsGzip(r.Header), int64(len(made))
	if !compressed {
		held += gunzipBytes
	}
	if err := Hold(r.Context(), held); err != nil {
		return fmt.Errorf("the report needs %w", err)
	}
	header := w.Header()
	header.Set("Content-Type", contentType)
	header.Set("X-Content-Type-Options", "nosniff")
	header.Set("Vary", "Accept-Encoding")
	if compressed {
		header.Set("Content-Encoding", "gzip")
		_, _ = w.Write(made) // a client that went away
		return nil
	}
	text, err := gzip.NewReader(bytes.NewReader(made))
	if err == nil {
		_, _ = io.Copy(w, text) //nolint:gosec // this program has compressed it, and nothing but the client fails
	}
	return err
}

// get returns the report. The first of those who wait for it makes it.
func (s *Reports[K]) get(ctx context.Context, key K, write func(io.Writer) error) ([]byte, error) {
	s.mu.Lock()
	waiting := s.next[key]
	if waiting != nil {
		s.mu.Unlock()
		select {
		case <-waiting.done:
			return waiting.gzip, waiting.err
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	mine := &report{done: make(chan struct{}), err: errors.New("the report could not be made")} // which a panic leaves
	if s.next == nil {
		s.next = map[K]*report{}
	}
	s.next[key] = mine
	s.mu.Unlock()
	defer close(mine.done)

	s.turn.Lock()
	defer s.turn.Unlock()
	s.mu.Lock()
	delete(s.next, key) // who asks from now on gets a newer one
	s.mu.Unlock()
	mine.gzip, mine.err = s.compress(write)
	return mine.gzip, mine.err
}

// compress returns what write writes.
func (s *Reports[K]) compress(write func(io.Writer) error) ([]byte, error) {
	if s.gzip == nil {
		var err error
		if s.gzip, err = gzip.NewWriterLevel(io.Discard, gzip.BestSpeed); err != nil {
			return nil, err
		}
	}
	var into bytes.Buffer
	s.gzip.Reset(&bounded{&into})
	if err := write(s.gzip); err != nil {
		return nil, err
	}
	if err := s.gzip.Close(); err != nil {
		return nil, err
	}
	return bytes.Clone(into.Bytes()), nil
}

// bounded is a buffer that does not grow beyond maxReport.
type bounded struct{ into *bytes.Buffer }

func (b *bounded) Write(p []byte) (int, error) {
	if b.into.Len()+len(p) > maxReport {
		return 0, fmt.Errorf("the report is larger than %d bytes, compressed", maxReport)
	}
	return b.into.Write(p)
}

// acceptsGzip reports whether the client takes gzip.
func acceptsGzip(h http.Header) bool {
	for _, value := range h.Values("Accept-Encoding") {
		for name := range strings.SplitSeq(value, ",") {
			name, weight, _ := strings.Cut(name, ";")
			if strings.EqualFold(strings.TrimSpace(name), "gzip") {
				return strings.Trim(weight, " .0") != "q="
			}
		}
	}
	return false
}
