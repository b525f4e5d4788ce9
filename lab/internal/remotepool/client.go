package remotepool

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/google/uuid"
)

// errNoServer is the client's last word when it reached no server, as the user guide shows it.
//
//nolint:revive,staticcheck // the guide's full stop
var errNoServer = errors.New("none of the servers responded correctly to client id claim requests.")

// Client talks to the pool as the real client's log tells it.
type Client struct {
	Files Files
	// Log receives the client's own lines.
	Log io.Writer
	// Version is what the client calls itself.
	Version string
}

func (c *Client) logf(level, format string, args ...any) {
	fmt.Fprintf(c.Log, "[%s] %s %s\n", level, time.Now().UTC().Format(time.RFC3339), fmt.Sprintf(format, args...))
}

// session is a server that knows the client.
type session struct {
	client  *Client
	id      string
	address string
	token   string
	timeout time.Duration
	http    *http.Client
	servers ServersConfig
}

// connect claims the client's identifier at the first server that answers.
func (c *Client) connect(ctx context.Context) (*session, error) {
	config, roots, timeout, err := c.Files.readClientConfig()
	if err != nil {
		return nil, err
	}
	path, servers, err := c.Files.readServers()
	if err != nil {
		c.logf("INFO", "Query server health status")
		c.logf("WARN", "Failed to parse %s: %v", path, plain(err, path))
		return nil, errNoServer
	}
	dialer := &net.Dialer{Timeout: timeout / 2}
	s := &session{
		client: c, id: uuid.NewString(), token: config.Token, timeout: timeout, servers: servers,
		http: &http.Client{Transport: &http.Transport{
			DialContext:     dialer.DialContext,
			TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots},
		}},
	}
	for n, server := range servers.Servers {
		for _, address := range server.Addresses {
			c.logf("INFO", "Query server %s to claim host id: %s", address, s.id)
			s.address = address
			var claimed struct{ Version string }
			if err := s.get(ctx, claimPath, &claimed); err != nil {
				c.logf("WARN", "Error contacting server %s to verify client id: Get %s: %v", address, s.url(claimPath), cause(err))
				continue
			}
			return s, noteReachable(path, servers, n, address)
		}
	}
	return nil, errNoServer
}

// plain puts the path that an error is about before it, once.
func plain(err error, path string) error {
	if strings.Contains(err.Error(), path) {
		return err
	}
	return fmt.Errorf("read %s: %w", path, err)
}

// cause takes the method and address off an error of an HTTP client.
func cause(err error) error {
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		return wrapped.Err
	}
	return err
}

func (s *session) url(path string) string { return "https://" + s.address + path }

// do sends a request with a time limit for the headers of the answer; the body
// is the caller's.
func (s *session) do(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, method, s.url(path), body)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+s.token)
	request.Header.Set(clientHeader, s.id)
	response, err := s.http.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		text, err := io.ReadAll(io.LimitReader(response.Body, maxBody))
		return nil, errors.Join(fmt.Errorf("%s: %s", response.Status, strings.TrimSpace(string(text))), err, response.Body.Close())
	}
	return response, nil
}

func (s *session) get(ctx context.Context, path string, value any) (err error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	response, err := s.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	return json.NewDecoder(io.LimitReader(response.Body, 1<<20)).Decode(value)
}

// held is a lease with the connection that keeps it.
type held struct {
	Lease

	// lost is closed when the server has gone away.
	lost chan struct{}
	give func()
}

// lease asks for GPUs. They are held until give is called.
func (s *session) lease(ctx context.Context, r Request) (*held, error) {
	r.Client = s.id
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	late := time.AfterFunc(s.timeout, cancel)
	//nolint:bodyclose // closed below, or by the goroutine that holds the lease
	response, err := s.do(ctx, http.MethodPost, leasePath, bytes.NewReader(body))
	if !late.Stop() && err == nil {
		err = errors.Join(context.DeadlineExceeded, response.Body.Close())
	}
	if err != nil {
		cancel()
		return nil, err
	}
	h := &held{lost: make(chan struct{}), give: cancel}
	reader := bufio.NewReader(response.Body)
	line, err := reader.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &h.Lease)
	}
	if err != nil {
		cancel()
		return nil, errors.Join(fmt.Errorf("the server's answer: %w", err), response.Body.Close())
	}
	go func() {
		defer close(h.lost)
		_, _ = io.Copy(io.Discard, reader)
		_ = response.Body.Close()
	}()
	return h, nil
}

// List prints the GPUs of all servers.
func (c *Client) List(ctx context.Context, out io.Writer) error {
	s, err := c.connect(ctx)
	if err != nil {
		return err
	}
	var servers []Availability
	if err := s.get(ctx, availabilityPath, &servers); err != nil {
		return fmt.Errorf("query server %s: %w", s.address, cause(err))
	}
	for n, server := range servers {
		fmt.Fprintf(out, "- server %d [%s]: running %d tasks\n", n, server.Address, server.Tasks)
		for id, gpu := range server.GPUs {
			fmt.Fprintf(out, "   |- GPU %d: free memory %d MiB / %d MiB, %s\n", id, gpu.FreeMB, gpu.GPU.MemoryMB, gpu.GPU.Name)
		}
	}
	return nil
}

// AskBooks asks a server at host:port what the pool has granted. authority is the
// certificate that the server is checked by, in PEM.
func AskBooks(ctx context.Context, address, token string, authority []byte) (Books, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(authority) {
		return Books{}, errors.New("ask the pool's servers: the authority is no certificate")
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}}
	defer transport.CloseIdleConnections()
	s := &session{id: "books", address: address, token: token, timeout: DefaultTimeout, http: &http.Client{Transport: transport}}
	var b Books
	if err := s.get(ctx, booksPath, &b); err != nil {
		return Books{}, fmt.Errorf("ask the pool's servers: %w", err)
	}
	return b, nil
}
