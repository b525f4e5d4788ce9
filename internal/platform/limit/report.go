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
	"time"
)

// gunzipBytes is what a client takes that reads a report uncompressed.
const gunzipBytes = 80 << 10

// maxRest bounds the pause between two reports.
const maxRest = 2 * time.Second

// maxReport bounds a report, compressed, in bytes. That of 5000 nodes with 8 devices
// each and 50 000 pods takes some 1.6 MB, a twentieth of its text.
const maxReport = 16 << 20

// Reports makes large answers in memory, one at a time: a client that reads slowly
// holds up no other. Requests for the same key that wait at the same time get the same
// answer. The zero value is ready for use.
type Reports[K comparable] struct {
	making sync.Mutex   // held while a report is made; guards what follows
	gzip   *gzip.Writer // kept, as it takes a megabyte
	// rest is until when no report is begun, so that reports take half of a processor at
	// most, however often they are requested.
	rest time.Time

	mu sync.Mutex // guards next
	// next are reports that are waited for and not begun.
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

// get returns the report. The first request that waits for it makes it.
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
	mine := &report{done: make(chan struct{}), err: errors.New("the report could not be created")} // which a panic leaves
	if s.next == nil {
		s.next = map[K]*report{}
	}
	s.next[key] = mine
	s.mu.Unlock()
	defer close(mine.done)

	s.making.Lock()
	defer s.making.Unlock()
	<-time.After(time.Until(s.rest)) // whoever else waits for the report needs it though this caller goes
	began := time.Now()
	defer func() { s.rest = time.Now().Add(min(time.Since(began), maxRest)) }()
	s.mu.Lock()
	delete(s.next, key) // requests from now on get a newer one
	s.mu.Unlock()
	mine.gzip, mine.err = s.compress(write)
	return mine.gzip, mine.err
}

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
