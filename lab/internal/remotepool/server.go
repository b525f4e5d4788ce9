package remotepool

import (
	"context"
	"crypto/subtle"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
)

// Version is what servers and clients of this stand-in call themselves.
const Version = "stand-in"

// The paths of the server.
const (
	claimPath        = "/claim_id"
	availabilityPath = "/availability"
	leasePath        = "/lease"
	booksPath        = "/leases"
)

// clientHeader holds the client's identifier.
const clientHeader = "X-Client-Id"

// maxBody bounds a request.
const maxBody = 64 << 10

// Handler serves one server of the pool to clients that have the token.
func Handler(p *Pool, token string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+claimPath, func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get(clientHeader)
		if id == "" {
			http.Error(w, "no client id", http.StatusBadRequest)
			return
		}
		reply(w, map[string]string{"id": id, "version": Version})
	})
	mux.HandleFunc("GET "+availabilityPath, func(w http.ResponseWriter, _ *http.Request) { reply(w, p.Availability()) })
	mux.HandleFunc("GET "+booksPath, func(w http.ResponseWriter, _ *http.Request) { reply(w, p.Books()) })
	mux.HandleFunc("POST "+leasePath, func(w http.ResponseWriter, r *http.Request) { lease(p, w, r) })
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		given := r.Header.Get("Authorization")
		if subtle.ConstantTimeCompare([]byte(given), []byte("Bearer "+token)) != 1 {
			http.Error(w, "the token is not valid", http.StatusUnauthorized)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

func reply(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(value) //nolint:errchkjson // the client sees that it is cut off
}

// lease grants GPUs and holds them until the client goes away.
func lease(p *Pool, w http.ResponseWriter, r *http.Request) {
	var request Request
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	if err := decoder.Decode(&request); err != nil {
		http.Error(w, fmt.Sprintf("the request is not valid: %v", err), http.StatusBadRequest)
		return
	}
	l, err := p.Lease(request)
	if err != nil {
		status := http.StatusBadRequest
		if errors.Is(err, errRefused) {
			status = http.StatusConflict
		}
		log.Printf("client %s: refused: %v", request.Client, err)
		http.Error(w, err.Error(), status)
		return
	}
	defer p.Release(l)
	log.Printf("client %s: granted GPUs %v of %s with %d MB", request.Client, l.GPUs, l.Hostname, l.MemoryMB)
	reply(w, l)
	if err := http.NewResponseController(w).Flush(); err != nil {
		return
	}
	<-r.Context().Done()
	log.Printf("client %s: gave GPUs %v of %s back", request.Client, l.GPUs, l.Hostname)
}

// Serve serves every server of the inventory on its own address until the
// context ends. Leases end with it.
func Serve(ctx context.Context, i Inventory, certificate tls.Certificate, token string) error {
	if token == "" {
		return errors.New("the pool has no token: everybody would be let in")
	}
	p := NewPool(i)
	var listeners []net.Listener
	var config net.ListenConfig
	for _, s := range i.Servers {
		listener, err := config.Listen(ctx, "tcp", s.Listen)
		if err != nil {
			for _, l := range listeners {
				err = errors.Join(err, l.Close())
			}
			return fmt.Errorf("listen for server %s: %w", s.Hostname, err)
		}
		listeners = append(listeners, listener)
		log.Printf("server %s with %d GPUs listens on %s", s.Hostname, len(s.GPUs), listener.Addr())
	}
	group, ctx := errgroup.WithContext(ctx)
	for _, listener := range listeners {
		server := &http.Server{
			Handler:           Handler(p, token),
			ReadHeaderTimeout: 10 * time.Second,
			BaseContext:       func(net.Listener) context.Context { return ctx },
			TLSConfig:         &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{certificate}},
		}
		group.Go(func() error {
			<-ctx.Done()
			return server.Close()
		})
		group.Go(func() error {
			if err := server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
				return err
			}
			return nil
		})
	}
	return group.Wait()
}
