package remotepool

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"
)

const token = "5ecre7"

// world is a pool with one server, and a client's files.
type world struct {
	pool   *Pool
	server *httptest.Server
	files  Files
}

func newWorld(t *testing.T) world {
	t.Helper()
	p := NewPool(fewGPUs)
	server := httptest.NewTLSServer(Handler(p, token))
	t.Cleanup(server.Close)
	w := world{pool: p, server: server}
	dir := t.TempDir()
	w.files = Files{Home: dir, Servers: filepath.Join(dir, "servers.conf"), Libraries: filepath.Join(dir, "opt"),
		LibraryPath: "/none:" + dir}
	ca := filepath.Join(dir, "ca.crt")
	write(t, ca, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	write(t, filepath.Join(dir, ".bitfusion", "client.yaml"), "cacertpath: "+ca+"\ntoken: "+token+"\ntimeout: 400ms\n")
	write(t, w.files.Servers, "servers:\n- addresses:\n  - "+server.Listener.Addr().String()+"\n")
	write(t, filepath.Join(w.files.Libraries, VersionFile), "1\n")
	write(t, filepath.Join(dir, LibraryName), "x")
	return w
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// run runs a command behind the client.
func (w world) run(ctx context.Context, r Request, command ...string) (code int, log, out string, err error) {
	var logs, outs bytes.Buffer
	c := &Client{Files: w.files, Log: &logs, Version: "4.5.0-4"}
	code, err = c.Run(ctx, r, command, strings.NewReader("given"), &outs, &outs)
	return code, logs.String(), outs.String(), err
}

var half = Request{Amount: 1, Fraction: 0.5}

// TestRunPrintsWhatTheGuideShows: the lines of the user guide, in their order,
// and the command with its streams, environment and exit code.
func TestRunPrintsWhatTheGuideShows(t *testing.T) {
	w := newWorld(t)
	code, log, out, err := w.run(t.Context(), half, "sh", "-c", "cat; echo; echo $BITFUSION_GPUS of $BITFUSION_SERVER; exit 7")
	if err != nil || code != 7 {
		t.Errorf("ended with %d, %v; want 7", code, err)
	}
	if want := "given\n0 of bf-server\n"; out != want {
		t.Errorf("printed %q, want %q", out, want)
	}
	const stamp = `\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`
	address := regexp.QuoteMeta(w.server.Listener.Addr().String())
	want := regexp.MustCompile(`^\[INFO\] ` + stamp + ` Query server ` + address + ` to claim host id: [0-9a-f-]{36}
\[INFO\] ` + stamp + ` Query server ` + address + ` gpu availability
\[INFO\] ` + stamp + ` Choosing GPUs from server list \[10\.1\.1\.1:56001 10\.1\.1\.2:56001\]
\[INFO\] ` + stamp + ` Requesting GPUs \[0\] with 8080 MiB of memory from server 0, with version 4\.5\.0-4\.\.\.
Requested resources:
Server List: 10\.1\.1\.1:56001
Client idle timeout: 0 min
\[INFO\] ` + stamp + ` Locked 1 GPUs with partial memory 0\.5, configuration saved to '[^']*/bitfusion\d+'
\[INFO\] ` + stamp + ` Running client command 'sh -c .*' on 1 GPUs, with the following servers:
\[INFO\] ` + stamp + ` 10\.1\.1\.1 55001 [0-9a-f-]{36} 56001 4\.5\.0-4

$`)
	if !want.MatchString(log) {
		t.Errorf("logged:\n%s\nwant:\n%s", log, want)
	}
	noLeases(t, w.pool)

	// The client has noted which server it reached.
	var servers ServersConfig
	data, err := os.ReadFile(w.files.Servers)
	if err == nil {
		err = yaml.Unmarshal(data, &servers)
	}
	if err != nil || servers.Servers[0].Reachable != w.server.Listener.Addr().String() {
		t.Errorf("servers.conf afterwards: %+v, %v", servers, err)
	}
}

func noLeases(t *testing.T, p *Pool) {
	t.Helper()
	eventually(t, "the GPUs to be given back", func() bool { return len(p.Books().Leases) == 0 })
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
		<-time.After(5 * time.Millisecond)
	}
}

func TestLeaseLastsAsLongAsTheCommand(t *testing.T) {
	w := newWorld(t)
	stop := filepath.Join(t.TempDir(), "stop")
	var group sync.WaitGroup
	group.Go(func() {
		if code, log, _, err := w.run(t.Context(), half, "sh", "-c", "while [ ! -e "+stop+" ]; do sleep 0.01; done"); code != 0 ||
			err != nil {
			t.Errorf("ended with %d, %v\n%s", code, err, log)
		}
	})
	eventually(t, "a lease", func() bool { return len(w.pool.Books().Leases) == 1 })
	// A second client gets what is left of the GPU, and a third what is not.
	for range 2 {
		if code, log, _, err := w.run(t.Context(), half, "true"); code != 0 || err != nil {
			t.Errorf("ended with %d, %v\n%s", code, err, log)
		}
	}
	if n := len(w.pool.Books().Leases); n == 0 {
		t.Error("the lease ended before its command")
	}
	write(t, stop, "")
	group.Wait()
	noLeases(t, w.pool)
}

func TestRefusal(t *testing.T) {
	w := newWorld(t)
	code, _, out, err := w.run(t.Context(), Request{Amount: 9, Fraction: 1}, "echo", "ran")
	if code != 1 || err == nil || !strings.Contains(err.Error(), "bf-server has 3 GPUs") || out != "" {
		t.Errorf("ended with %d, %v, printed %q; want a refusal and no command", code, err, out)
	}
}

// TestSignalsReachTheCommand sends one to this program, which is the client.
func TestSignalsReachTheCommand(t *testing.T) {
	w := newWorld(t)
	started := filepath.Join(t.TempDir(), "started")
	var group sync.WaitGroup
	group.Go(func() {
		code, _, out, err := w.run(t.Context(), half, "sh", "-c", "trap 'echo told; exit 5' USR1; touch "+started+
			"; while true; do sleep 0.01; done")
		if code != 5 || out != "told\n" || err != nil {
			t.Errorf("ended with %d, %v, printed %q; want 5 after the signal", code, err, out)
		}
	})
	eventually(t, "the command", func() bool { _, err := os.Stat(started); return err == nil })
	if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	group.Wait()
	if code, _, _, err := w.run(t.Context(), half, "sh", "-c", "kill -9 $$"); code != 137 || err != nil {
		t.Errorf("a killed command ended with %d, %v; want 137", code, err)
	}
}

func TestCommandEndsWhenItsGPUsAreLost(t *testing.T) {
	w := newWorld(t)
	started := filepath.Join(t.TempDir(), "started")
	var group sync.WaitGroup
	group.Go(func() {
		if code, _, _, err := w.run(t.Context(), half, "sh", "-c", "touch "+started+"; exec sleep 600"); code != 1 || err == nil ||
			!strings.Contains(err.Error(), "was lost") {
			t.Errorf("ended with %d, %v; want that the GPUs were lost", code, err)
		}
	})
	// Before the command starts, the answer that grants the lease may be on its way.
	eventually(t, "the command", func() bool { _, err := os.Stat(started); return err == nil })
	w.server.CloseClientConnections()
	group.Wait()
	noLeases(t, w.pool)
}

// TestTroubleshooting: the cases of section 6 of the user guide, and others in
// which no command runs.
func TestTroubleshooting(t *testing.T) {
	// A server that takes connections and does not answer.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = silent.Close() })
	const last = "none of the servers responded correctly to client id claim requests."
	tests := map[string]struct {
		harm      func(t *testing.T, w *world)
		log, last string
	}{
		"context deadline exceeded": {
			harm: func(t *testing.T, w *world) {
				t.Helper()
				write(t, w.files.Servers, "servers:\n- addresses: ["+silent.Addr().String()+"]\n")
			},
			log: "Error contacting server " + silent.Addr().String() + " to verify client id: Get https://" + silent.Addr().String() +
				"/claim_id: context deadline exceeded", last: last,
		},
		"servers.conf in a form that cannot be read": {
			harm: func(t *testing.T, w *world) {
				t.Helper()
				write(t, w.files.Servers, "servers:\n- reachable:10.202.122.248:56001\n  addresses:\n  - 10.202.122.248:56001\n")
			},
			log: "Failed to parse ", last: last,
		},
		"servers.conf cannot be written": {
			harm: func(t *testing.T, w *world) {
				t.Helper()
				if err := os.Remove(w.files.Servers); err != nil {
					t.Fatal(err)
				}
				if err := os.Mkdir(w.files.Servers, 0o700); err != nil {
					t.Fatal(err)
				}
			},
			log: "Failed to parse ", last: last,
		},
		"nobody listens": {
			harm: func(t *testing.T, w *world) { t.Helper(); w.server.Close() },
			log:  "connection refused", last: last,
		},
		"another token": {
			harm: func(t *testing.T, w *world) {
				t.Helper()
				write(t, filepath.Join(w.files.Home, ".bitfusion", "client.yaml"), "cacertpath: "+w.files.Home+"/ca.crt\ntoken: other\n")
			},
			log: "401 Unauthorized: the token is not valid", last: last,
		},
		"a server of another authority": {
			harm: func(t *testing.T, w *world) {
				t.Helper()
				other := httptest.NewUnstartedServer(http.NotFoundHandler())
				other.TLS = &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{stranger(t)}}
				other.StartTLS()
				t.Cleanup(other.Close)
				write(t, w.files.Servers, "servers:\n- addresses: ["+other.Listener.Addr().String()+"]\n")
			},
			log: "certificate", last: last,
		},
		"no client.yaml": {
			harm: func(t *testing.T, w *world) { t.Helper(); w.files.Home = "/nowhere" }, last: "/nowhere/.bitfusion/client.yaml",
		},
		"no certificate": {
			harm: func(t *testing.T, w *world) { t.Helper(); write(t, filepath.Join(w.files.Home, "ca.crt"), "none") },
			last: "no certificate",
		},
		"no libraries": {
			harm: func(t *testing.T, w *world) { t.Helper(); w.files.LibraryPath = "/usr/nowhere:" }, last: "libbitfusion.so",
		},
		"nothing in /opt": {
			harm: func(t *testing.T, w *world) { t.Helper(); w.files.Libraries = t.TempDir() }, last: "is empty",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			test.harm(t, &w)
			code, log, out, err := w.run(t.Context(), half, "echo", "ran")
			if code != 1 || out != "" {
				t.Errorf("ended with %d and printed %q; want 1 and nothing", code, out)
			}
			if err == nil || !strings.Contains(err.Error(), test.last) || !strings.Contains(log, test.log) {
				t.Errorf("%v after\n%s\nwant %q after %q", err, log, test.last, test.log)
			}
		})
	}
}

// stranger returns a certificate that no client here trusts.
func stranger(t *testing.T) tls.Certificate {
	t.Helper()
	a, err := newAuthority()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// A dial that takes too long is told as the user guide shows it.
func TestDialTimeoutIsTold(t *testing.T) {
	w := newWorld(t)
	address := deaf(t)
	write(t, w.files.Servers, "servers:\n- addresses: ['"+address+"']\n")
	_, log, _, err := w.run(t.Context(), half, "true")
	if want := "Get https://" + address + "/claim_id: dial tcp " + address + ": i/o timeout"; err == nil || !strings.Contains(log, want) {
		t.Errorf("%v after\n%s\nwant %s", err, log, want)
	}
}

// deaf returns the address of a socket whose queue of connections is full and is
// never taken from: the kernel leaves further ones without an answer, as a
// network without a way does.
func deaf(t *testing.T) string {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) }) //nolint:errcheck // nothing was written
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", name.(*unix.SockaddrInet4).Port)
	for range 8 {
		conn, err := net.DialTimeout("tcp", address, 200*time.Millisecond)
		if err != nil {
			return address
		}
		t.Cleanup(func() { conn.Close() }) //nolint:errcheck // as above
	}
	t.Fatal("the queue of a listening socket takes any number of connections")
	return ""
}

func TestList(t *testing.T) {
	w := newWorld(t)
	l, err := w.pool.Lease(half)
	if err != nil {
		t.Fatal(err)
	}
	defer w.pool.Release(l)
	var log, out bytes.Buffer
	c := &Client{Files: w.files, Log: &log}
	if err := c.List(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"- server 0 [10.1.1.1:56001]: running 1 tasks", "|- GPU 0: free memory 8080 MiB / 16160 MiB",
		"|- GPU 0: free memory 15109 MiB / 15109 MiB, Tesla T4"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
}

func TestParseRun(t *testing.T) {
	for line, want := range map[string]string{
		"-n 1 -p 0.500000 -- python x.py --a=1":       "{ 1 0.5 0 []} [python x.py --a=1]",
		"-n 1 -p 0.500000 python x.py -n 2":           "{ 1 0.5 0 []} [python x.py -n 2]",
		"-n 2 -m 8000 --filter a=b --filter c=d -- x": "{ 2 0 8000 [a=b c=d]} [x]",
		"--num_gpus=2 --partial=0.25 -- -x":           "{ 2 0.25 0 []} [-x]",
		"-n 1 -- x":                                   "{ 1 1 0 []} [x]",
		"-n 1 -p 0.5":                                 "there is no command",
		"-n 1 -p 0.5 --":                              "there is no command",
		"-n x -- y":                                   `"x" is not a number`,
		"-n":                                          "needs a value",
		"-n 1 -z 3 -- x":                              "no option -z",
		"-n 0 -- x":                                   "must be 1 or more",
		"-n 1 -p 2 -- x":                              "at most 1",
		"-n 1 -p 0.1 -m 1 -- x":                       "both",
		"python x.py":                                 "must be 1 or more",
		"-n 1 -m 5001  --filter server.hostname=bf -- sh -c x":      "{ 1 0 5001 [server.hostname=bf]} [sh -c x]",
		"-n 3 -p 1.000000  --filter server.hostname=bf -- /bin/cat": "{ 3 1 0 [server.hostname=bf]} [/bin/cat]",
	} {
		r, command, err := ParseRun(strings.Fields(line))
		got := fmt.Sprint(r, " ", command)
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, want) {
			t.Errorf("%s: %s; want %s", line, got, want)
		}
	}
}
