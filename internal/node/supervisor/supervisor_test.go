package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/agent"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/backend/vendors"
	"github.com/divvy-gpu/divvy/internal/node/nodeconfig"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/platform/logging"
)

const head = "apiVersion: config.divvy.dev/v1alpha1\nkind: NodeConfig\n"

// soon is how long a change may take to arrive; the machine may be busy.
const soon = 2 * time.Minute

// eventually waits until ok.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(soon); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("in vain: ", what)
		}
	}
}

// hasAll fails the test for each part that the text lacks.
func hasAll(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("missing %q in:\n%s", p, text)
		}
	}
}

// fakeBackend has two cards.
type fakeBackend struct {
	closed atomic.Bool
	// sick, unless nil, says whether the first card is ill.
	sick *atomic.Bool
}

func (*fakeBackend) Vendor() string { return "enflame" }

func (b *fakeBackend) Close() error {
	if b.closed.Swap(true) {
		return errors.New("closed twice")
	}
	return nil
}

func (b *fakeBackend) Discover(context.Context) (backend.Found, error) {
	if b.closed.Load() {
		return backend.Found{}, backend.ErrClosed
	}
	found := backend.Found{Driver: "1.0"}
	for i := range 2 {
		h := accel.Health{}
		if i == 0 && b.sick != nil && b.sick.Load() {
			h = accel.Health{Unhealthy: true, Cause: "library", Reason: "the library says so"}
		}
		found.Devices = append(found.Devices, accel.Device{Health: h, Index: i, ID: accel.DeviceID(fmt.Sprintf("GCU-%d", i)),
			Model: "S60", MemoryBytes: 16 << 30, NUMANode: accel.NoNUMA})
	}
	return found, nil
}

func (*fakeBackend) Edits(ids ...accel.DeviceID) (backend.Edits, error) {
	e := backend.Edits{Env: map[string]string{}}
	for _, id := range ids {
		e.Env["ENFLAME_VISIBLE_DEVICES"] = string(id)
		e.DeviceNodes = append(e.DeviceNodes, backend.DeviceNode{Path: "/dev/" + string(id), HostPath: "/dev/" + string(id),
			Permissions: "rw"})
		e.CDIDevices = append(e.CDIDevices, backend.CDIDevice{Kind: "enflame.com/gcu", Name: string(id)})
	}
	return e, nil
}

// fakeAgent is an agent that notes the steps of a handover and does nothing else.
type fakeAgent struct {
	config   config.NodeConfig
	backends vendors.Set
	fail     chan error
	stopped  atomic.Bool
	left     chan struct{}
	// from is what it was given, and serving what it says of itself.
	from    agent.Handoff
	serving func() error

	mu    sync.Mutex // guards what follows
	steps []string
}

func (a *fakeAgent) Run(ctx context.Context) error {
	defer a.stopped.Store(true)
	select {
	case err := <-a.fail:
		return err
	case <-ctx.Done():
		return nil
	case <-a.left:
		return nil
	}
}

func (a *fakeAgent) note(step string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.steps = append(a.steps, step)
}

// did returns the steps of its handover.
func (a *fakeAgent) did() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return strings.Join(a.steps, ", ")
}

func (a *fakeAgent) Yield() agent.Handoff {
	a.note("yielded")
	return agent.Handoff{
		Sockets: map[accel.Resource]string{"enflame.com/gcu-memory": "a.sock"},
		Memory:  map[string]json.RawMessage{"of": []byte(`"what was before"`)},
	}
}

func (a *fakeAgent) Pass(sockets map[accel.Resource]string) error {
	a.note("passed to " + sockets["enflame.com/gcu-memory"])
	return nil
}

func (a *fakeAgent) Leave(context.Context) []accel.Resource {
	a.note("left")
	close(a.left)
	return []accel.Resource{"enflame.com/gcu-memory"}
}

func (a *fakeAgent) Serving() (map[accel.Resource]string, error) {
	if a.serving != nil {
		if err := a.serving(); err != nil {
			return nil, err
		}
	}
	return map[accel.Resource]string{"enflame.com/gcu-memory": "b.sock"}, nil
}

func (a *fakeAgent) Renew(resources []accel.Resource) { a.note(fmt.Sprint("renewed ", resources)) }

func (a *fakeAgent) Ready() error                { return fmt.Errorf("log level %s", a.config.LogLevel) }
func (a *fakeAgent) Alive(context.Context) error { return nil }

// daemon is a supervisor that runs on a file.
type daemon struct {
	t      *testing.T
	dir    string
	file   string
	listen string
	client *fake.Clientset
	s      *supervisor
	ended  chan error
	cancel context.CancelFunc

	// serving is what agents say of themselves, nil for nil.
	serving func(config.NodeConfig) error

	mu     sync.Mutex // guards what follows
	agents []*fakeAgent
	open   []*fakeBackend
}

// prepare makes a daemon with fakes for backends and agents, on a file with
// these keys.
func prepare(t *testing.T, keys string) *daemon {
	t.Helper()
	dir, err := os.MkdirTemp("", "dn") //nolint:usetesting // a socket's path has 107 characters at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{t: t, dir: dir, file: filepath.Join(dir, "node.yaml"), listen: l.Addr().String(), client: fake.NewClientset(),
		ended: make(chan error, 1)}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	d.write(keys)
	d.s = newSupervisor(Options{Node: "node-1", Clients: kube.Clients{Kubernetes: d.client},
		Log: Log{Output: logging.NewOutput(io.Discard), Level: new(slog.LevelVar)}})
	d.s.open = func(c config.NodeConfig) (vendors.Set, error) {
		if c.CDIDir == "/cannot/open" {
			return nil, errors.New("this cannot be opened")
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		b := &fakeBackend{}
		d.open = append(d.open, b)
		return vendors.Set{"enflame": b}, nil
	}
	d.s.build = func(_ context.Context, c config.NodeConfig, b vendors.Set, r prometheus.Registerer, h agent.Handoff) (nodeAgent, error) {
		if c.CDIDir == "/cannot/start" {
			return nil, errors.New("this cannot be started")
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		r.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "of_the_agent", Help: "Registered by each agent."}))
		a := &fakeAgent{config: c, backends: b, fail: make(chan error, 1), left: make(chan struct{}), from: h}
		if d.serving != nil {
			a.serving = func() error { return d.serving(c) }
		}
		d.agents = append(d.agents, a)
		return a, nil
	}
	return d
}

// write replaces the file.
func (d *daemon) write(keys string) {
	d.t.Helper()
	text := fmt.Sprintf("%sstateDir: %s/state\nkubeletDir: %[2]s\ngrantKeyFile: %[2]s/key\n", head, d.dir)
	if !strings.Contains(keys, "listen:") {
		text += "listen: " + d.listen + "\n"
	}
	if err := os.WriteFile(d.file+".new", []byte(text+keys), 0o600); err != nil {
		d.t.Fatal(err)
	}
	if err := os.Rename(d.file+".new", d.file); err != nil {
		d.t.Fatal(err)
	}
}

// start runs the daemon until the test ends.
func (d *daemon) start() {
	d.t.Helper()
	source, err := nodeconfig.NewSource(nodeconfig.SourceOptions{
		Places: nodeconfig.Places{Files: []string{d.file}}, Vendors: []string{"enflame", "nvidia"}, Node: "node-1", Client: d.client,
	})
	if err != nil {
		d.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(d.t.Context())
	d.cancel = cancel
	go func() { d.ended <- follow(ctx, source, d.s) }()
	d.t.Cleanup(func() {
		cancel()
		select {
		case err := <-d.ended:
			if err != nil {
				d.t.Errorf("the daemon ended with: %v", err)
			}
		case <-time.After(soon):
			d.t.Error("the daemon does not end")
		}
		if err := source.Close(); err != nil {
			d.t.Error(err)
		}
		for i, b := range d.open {
			if !b.closed.Load() {
				d.t.Errorf("backend %d was not closed", i)
			}
		}
	})
}

// get asks the daemon's HTTP server.
func (d *daemon) get(path string) string {
	req, err := http.NewRequestWithContext(d.t.Context(), http.MethodGet, "http://"+d.listen+path, http.NoBody)
	if err != nil {
		d.t.Fatal(err)
	}
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		return err.Error()
	}
	defer r.Body.Close() //nolint:errcheck // read
	text, err := io.ReadAll(r.Body)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// event waits for an event with that reason and returns its message.
func (d *daemon) event(reason string) string {
	d.t.Helper()
	var message string
	eventually(d.t, "event "+reason, func() bool {
		for _, a := range d.client.Actions() {
			if c, ok := a.(clienttesting.CreateAction); ok {
				if e, ok := c.GetObject().(*corev1.Event); ok && e.Reason == reason {
					message = e.Message
					return e.InvolvedObject.Name == "node-1" && e.InvolvedObject.Kind == "Node"
				}
			}
		}
		return false
	})
	return message
}

func (d *daemon) agent(i int) *fakeAgent {
	d.t.Helper()
	eventually(d.t, fmt.Sprintf("agent %d", i), func() bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return len(d.agents) > i
	})
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.agents[i]
}

func (d *daemon) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.agents)
}

// Iluvatar's and NVIDIA's device plugins had to be restarted for a new
// configuration.
func TestAnEditTakesThePlaceOfTheAgent(t *testing.T) {
	d := prepare(t, "injection: deviceNodes\n")
	d.start()
	first := d.agent(0)
	eventually(t, "the first agent answers", func() bool { return strings.Contains(d.get("/readyz"), "log level info") })
	hasAll(t, d.get("/metrics"), "of_the_agent", `divvy_node_config_reloads_total{result="applied"} 0`, "go_goroutines")

	d.write("injection: environment\n")
	second := d.agent(1)
	if second.config.Injection != config.InjectEnvironment {
		t.Errorf("the second agent has %+v", second.config)
	}
	hasAll(t, d.event("ConfigurationReloaded"), d.file)
	if !first.stopped.Load() || !d.open[0].closed.Load() {
		t.Error("the first agent or its backend still runs")
	}
	hasAll(t, d.get("/metrics"), "of_the_agent", `divvy_node_config_reloads_total{result="applied"} 1`)
	if got := d.get("/healthz"); got != "ok\n" {
		t.Errorf("/healthz: %q", got)
	}
}

// Defect 15 of NVIDIA's device plugin: a mistake in a new configuration ended
// the process.
func TestABadEditKeepsTheLastGoodConfiguration(t *testing.T) {
	d := prepare(t, "")
	d.start()
	d.agent(0)
	d.write("colour: blue\nlogLevel: loud\n")
	hasAll(t, d.event("ConfigurationRejected"), "the new configuration is invalid, the previous one stays in use", `unknown key "colour"`,
		`logLevel: "loud"`)
	hasAll(t, d.get("/metrics"), `divvy_node_config_reloads_total{result="rejected"} 1`)
	if d.count() != 1 || d.agents[0].stopped.Load() {
		t.Error("the agent was touched")
	}
	d.write("injection: cdi\n")
	if got := d.agent(1).config.Injection; got != config.InjectCDI {
		t.Errorf("the mended configuration: %q", got)
	}
}

func TestAConfigurationThatCannotBeOpenedLeavesTheAgentAlone(t *testing.T) {
	d := prepare(t, "")
	d.start()
	d.agent(0)
	d.write("cdiDir: /cannot/open\n")
	hasAll(t, d.event("ConfigurationRejected"), "this cannot be opened")
	if d.count() != 1 || d.agents[0].stopped.Load() {
		t.Error("the agent was touched")
	}
}

func TestAConfigurationThatCannotBeStartedGivesWayToTheOneBefore(t *testing.T) {
	d := prepare(t, "injection: environment\n")
	d.start()
	d.agent(0)
	d.write("cdiDir: /cannot/start\n")
	hasAll(t, d.event("ConfigurationRejected"), "this cannot be started")
	if got := d.agent(1).config.Injection; got != config.InjectEnvironment {
		t.Errorf("it went back to %q", got)
	}
	hasAll(t, d.get("/metrics"), `divvy_node_config_reloads_total{result="applied"} 0`,
		`divvy_node_config_reloads_total{result="rejected"} 1`)
}

func TestSIGHUPTriesARefusedConfigurationAgain(t *testing.T) {
	d := prepare(t, "")
	var broken atomic.Bool
	build := d.s.build
	d.s.build = func(ctx context.Context, c config.NodeConfig, b vendors.Set, r prometheus.Registerer, h agent.Handoff) (nodeAgent, error) {
		if broken.Load() && c.Injection == config.InjectCDI {
			return nil, errors.New("no space left on device")
		}
		return build(ctx, c, b, r, h)
	}
	d.start()
	d.agent(0)
	broken.Store(true)
	d.write("injection: cdi\n")
	hasAll(t, d.event("ConfigurationRejected"), "no space left on device")
	d.agent(1) // of the configuration before
	broken.Store(false)
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	if got := d.agent(2).config.Injection; got != config.InjectCDI {
		t.Errorf("tried again: %q", got)
	}
	d.event("ConfigurationReloaded")
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-d.ended:
		t.Fatalf("it ended: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	if d.count() != 3 {
		t.Error("the configuration in use was started anew")
	}
}

func TestTheLogChangesWithoutANewAgent(t *testing.T) {
	d := prepare(t, "")
	d.start()
	d.agent(0)
	d.write("logLevel: debug\nlogFile: " + d.dir + "/x.log\n")
	d.event("ConfigurationReloaded")
	if got := d.s.o.Log.Level.Level(); got != slog.LevelDebug {
		t.Errorf("the level is %v", got)
	}
	if d.count() != 1 {
		t.Error("there is a new agent")
	}
}

func TestTheAddressAndTheStateFolderStay(t *testing.T) {
	d := prepare(t, "")
	d.start()
	state := d.agent(0).config.StateDir
	d.write("listen: 127.0.0.1:1\ninjection: cdi\n")
	if got := d.agent(1).config; got.Listen != d.listen || got.StateDir != state || got.Injection != config.InjectCDI {
		t.Errorf("the second agent has %+v", got)
	}
	eventually(t, "the old address answers", func() bool { return d.get("/healthz") == "ok\n" })
}

// SIGHUP was subscribed to and ignored by Iluvatar's device plugin, and ended
// NVIDIA's where the configuration had a mistake.
func TestSIGHUPReadsTheConfigurationAgain(t *testing.T) {
	d := prepare(t, "")
	d.start()
	d.agent(0)
	eventually(t, "it serves", func() bool { return d.get("/healthz") == "ok\n" })
	d.write("colour: blue\n")
	d.event("ConfigurationRejected")
	if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the mistake is told again", func() bool {
		return strings.Contains(d.get("/metrics"), `divvy_node_config_reloads_total{result="rejected"} 2`)
	})
	if d.count() != 1 || d.agents[0].stopped.Load() {
		t.Error("the agent was touched")
	}
}

func TestAnAgentThatFailsEndsTheDaemon(t *testing.T) {
	d := prepare(t, "")
	d.start()
	d.agent(0).fail <- errors.New("disk on fire")
	select {
	case err := <-d.ended:
		if err == nil || !strings.Contains(err.Error(), "disk on fire") {
			t.Errorf("it ended with %v", err)
		}
		d.ended <- nil
	case <-time.After(soon):
		t.Fatal("the daemon goes on")
	}
}

func TestAnAddressInUseEndsTheDaemon(t *testing.T) {
	d := prepare(t, "")
	l, err := net.Listen("tcp", d.listen)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // closed by the test's end
	d.start()
	select {
	case err := <-d.ended:
		if err == nil || !strings.Contains(err.Error(), "listen for probes and metrics") {
			t.Errorf("it ended with %v", err)
		}
		d.ended <- nil
	case <-time.After(soon):
		t.Fatal("the daemon goes on")
	}
}
