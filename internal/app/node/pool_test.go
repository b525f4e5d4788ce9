package node

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/divvy-gpu/divvy/internal/node/poolplugin"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
)

// poolKubelet is kubelet's device-plugins folder with kubelet in it. Unlike
// kubelet of the other tests it can be restarted.
type poolKubelet struct {
	pluginapi.UnimplementedRegistrationServer
	t      *testing.T
	folder string

	server *grpc.Server
	served chan error

	mu       sync.Mutex // guards what follows
	requests []*pluginapi.RegisterRequest
}

func newPoolKubelet(t *testing.T) *poolKubelet {
	t.Helper()
	dir, err := os.MkdirTemp("", "pool") //nolint:usetesting // t.TempDir has the test's name in it, too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	k := &poolKubelet{t: t, folder: filepath.Join(dir, "device-plugins")}
	if err := os.Mkdir(k.folder, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		k.stop()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return k
}

// start starts kubelet, which first removes all sockets in its folder.
func (k *poolKubelet) start() {
	k.t.Helper()
	entries, err := os.ReadDir(k.folder)
	if err != nil {
		k.t.Fatal(err)
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(k.folder, e.Name())); err != nil {
			k.t.Fatal(err)
		}
	}
	l, err := net.Listen("unix", filepath.Join(k.folder, "kubelet.sock"))
	if err != nil {
		k.t.Fatal(err)
	}
	k.mu.Lock()
	k.requests = nil
	k.mu.Unlock()
	k.server, k.served = grpc.NewServer(), make(chan error, 1)
	pluginapi.RegisterRegistrationServer(k.server, k)
	go func() { k.served <- k.server.Serve(l) }()
}

func (k *poolKubelet) stop() {
	if k.server != nil {
		k.server.Stop()
		<-k.served //nolint:errcheck // it was stopped
		k.server = nil
	}
}

func (k *poolKubelet) Register(_ context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.requests = append(k.requests, r)
	return &pluginapi.Empty{}, nil
}

// registration waits for the plugin and returns what it registered.
func (k *poolKubelet) registration() (r *pluginapi.RegisterRequest) {
	k.t.Helper()
	eventually(k.t, "it is registered", func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		if len(k.requests) > 0 {
			r = k.requests[len(k.requests)-1]
		}
		return r != nil
	})
	return r
}

// connect connects to the plugin that registered.
func (k *poolKubelet) connect() (client pluginapi.DevicePluginClient, hangUp func()) {
	k.t.Helper()
	conn, err := grpc.NewClient("unix://"+filepath.Join(k.folder, k.registration().GetEndpoint()),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		k.t.Fatal(err)
	}
	return pluginapi.NewDevicePluginClient(conn), func() { _ = conn.Close() }
}

// watch opens ListAndWatch and returns the first list, and what ends it. A plugin
// that saw kubelet's socket twice registers twice, and the first stream breaks.
func (k *poolKubelet) watch() (list *pluginapi.ListAndWatchResponse, end func()) {
	k.t.Helper()
	client, hangUp := k.connect()
	ctx, cancel := context.WithCancel(k.t.Context())
	eventually(k.t, "a list arrives", func() bool {
		stream, err := client.ListAndWatch(ctx, &pluginapi.Empty{})
		if err == nil {
			list, err = stream.Recv()
		}
		return err == nil
	})
	return list, func() { cancel(); hangUp() }
}

// poolDaemon is "divvy-node pool" as it runs.
type poolDaemon struct {
	t     *testing.T
	url   string
	stop  context.CancelFunc
	ended chan error
}

func startPool(t *testing.T, k *poolKubelet, units int) *poolDaemon {
	t.Helper()
	o := defaultPoolOptions()
	o.KubeletDir, o.Units, o.Listen = filepath.Dir(k.folder), units, freeAddress(t)
	if _, err := o.validate(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	d := &poolDaemon{t: t, url: "http://" + o.Listen, stop: stop, ended: make(chan error, 1)}
	go func() { d.ended <- poolplugin.Run(ctx, o.Options) }()
	t.Cleanup(func() {
		if d.stop != nil {
			d.end()
		}
	})
	return d
}

// end stops the daemon and waits for it.
func (d *poolDaemon) end() {
	d.t.Helper()
	d.stop()
	d.stop = nil
	if err := <-d.ended; err != nil {
		d.t.Error(err)
	}
}

func (d *poolDaemon) get(path string) (status int, body string) {
	d.t.Helper()
	resp, err := http.Get(d.url + path) //nolint:noctx // a test
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		d.t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // nothing was accepted
	return l.Addr().String()
}

// The contract of the original's device plugin: resource, socket, version, ids.
func TestPoolOffersTheUnitsOfTheOriginal(t *testing.T) {
	k := newPoolKubelet(t)
	d := startPool(t, k, 1000)
	eventually(t, "it says that kubelet is not there", func() bool {
		status, body := d.get("/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, "kubelet is not listening")
	})
	if status, body := d.get("/healthz"); status != http.StatusOK {
		t.Errorf("/healthz without kubelet: %d %s", status, body)
	}
	k.start()
	r := k.registration()
	if r.GetVersion() != "v1beta1" || r.GetEndpoint() != "bitfusion.io" || r.GetResourceName() != "bitfusion.io/gpu" {
		t.Errorf("registered as %v", r)
	}
	list, end := k.watch()
	defer end()
	var got, want []string
	for i, u := range list.GetDevices() {
		got = append(got, u.GetID()+" "+u.GetHealth())
		want = append(want, strconv.Itoa(i)+" Healthy")
	}
	if diff := cmp.Diff(want, got); diff != "" || len(got) != 1000 {
		t.Errorf("%d units (-want +got):\n%s", len(got), diff)
	}
	eventually(t, "it is ready", func() bool { status, _ := d.get("/readyz"); return status == http.StatusOK })
	_, metrics := d.get("/metrics")
	hasAll(t, metrics, "divvy_pool_units 1000", "divvy_pool_registrations_total ", "divvy_pool_registered 1",
		"process_resident_memory_bytes")
	if status, body := d.get("/healthz"); status != http.StatusOK {
		t.Errorf("/healthz: %d %s", status, body)
	}
	d.end()
	if _, err := os.Lstat(filepath.Join(k.folder, "bitfusion.io")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket stays behind: %v", err)
	}
}

// Defect D1: kubelet that restarts empties its folder, and the original never
// registered again. Kubelet may be restarted any number of times.
func TestPoolRegistersAgainWithEachKubelet(t *testing.T) {
	k := newPoolKubelet(t)
	d := startPool(t, k, 10)
	for n := 1; n <= 3; n++ {
		k.start()
		list, end := k.watch()
		if len(list.GetDevices()) != 10 {
			t.Errorf("kubelet %d was told of %d units", n, len(list.GetDevices()))
		}
		eventually(t, "it is ready", func() bool { status, _ := d.get("/readyz"); return status == http.StatusOK })
		end()
		k.stop()
		eventually(t, "it is not ready without kubelet", func() bool { status, _ := d.get("/readyz"); return status != http.StatusOK })
	}
}

// Defect D6: the original said yes to any id, and gave one answer to all
// containers.
func TestPoolRefusesUnknownUnits(t *testing.T) {
	k := newPoolKubelet(t)
	k.start()
	startPool(t, k, 10)
	client, hangUp := k.connect()
	defer hangUp()
	allocate := func(containers ...[]string) (*pluginapi.AllocateResponse, error) {
		r := &pluginapi.AllocateRequest{}
		for _, ids := range containers {
			r.ContainerRequests = append(r.ContainerRequests, &pluginapi.ContainerAllocateRequest{DevicesIds: ids})
		}
		return client.Allocate(t.Context(), r)
	}
	answer, err := allocate([]string{"0", "9"}, []string{"5"})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(answer.GetContainerResponses()); n != 2 {
		t.Errorf("%d answers for 2 containers", n)
	}
	for _, c := range answer.GetContainerResponses() {
		if len(c.GetEnvs())+len(c.GetMounts())+len(c.GetDevices())+len(c.GetAnnotations())+len(c.GetCdiDevices()) > 0 {
			t.Errorf("a container gets %v, want nothing", c)
		}
	}
	for id, want := range map[string]string{
		"99999": `"99999" is none of the units 0 to 9`, "10": "none of the units", "-1": "none of the units",
		"01": "none of the units", "+1": "none of the units", "": "none of the units", "x": "none of the units",
	} {
		if _, err := allocate([]string{"0"}, []string{"1", id}); status.Code(err) != codes.ResourceExhausted ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("unit %q: %v, want %s", id, err, want)
		}
	}
	if _, err := allocate([]string{"1", "1"}); err == nil || !strings.Contains(err.Error(), `unit "1" is named twice`) {
		t.Errorf("a unit twice: %v", err)
	}

	prefer := func(size int32, available, must []string) ([]string, error) {
		r, err := client.GetPreferredAllocation(t.Context(),
			&pluginapi.PreferredAllocationRequest{ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{
				AvailableDeviceIDs: available, MustIncludeDeviceIDs: must, AllocationSize: size,
			}}})
		if err != nil {
			return nil, err
		}
		return r.GetContainerResponses()[0].GetDeviceIDs(), nil
	}
	got, err := prefer(3, []string{"7", "1", "4", "2"}, []string{"4"})
	if diff := cmp.Diff([]string{"4", "7", "1"}, got); err != nil || diff != "" {
		t.Errorf("preferred units: %v (-want +got):\n%s", err, diff)
	}
	if _, err := prefer(3, []string{"1", "2"}, []string{"1"}); err == nil ||
		!strings.Contains(err.Error(), "3 units are asked for, 1 must be among them, and 2 are free") {
		t.Errorf("too few units: %v", err)
	}
	if _, err := prefer(1, []string{"10"}, nil); err == nil {
		t.Error("an unknown unit is preferred")
	}
}

// Defect D2: for each connection of kubelet the original left a goroutine behind
// that sent the list for ever.
func TestPoolLeavesNothingBehindAConnection(t *testing.T) {
	k := newPoolKubelet(t)
	k.start()
	d := startPool(t, k, 1000)
	_, end := k.watch()
	end()
	eventually(t, "kubelet's hanging up is noticed", func() bool { status, _ := d.get("/readyz"); return status != http.StatusOK })
	http.DefaultClient.CloseIdleConnections()
	before := runtime.NumGoroutine()
	const connections = 50
	for range connections {
		_, end := k.watch()
		end()
	}
	eventually(t, "the goroutines of all connections have ended", func() bool {
		return runtime.NumGoroutine() < before+connections/5
	})
}

// Defect D3: missing and bad arguments ended the original with a stack trace, or
// in a busy loop, or without any device.
func TestPoolRefusesBadArguments(t *testing.T) {
	long := "/" + strings.Repeat("k", 80)
	tests := map[string]struct {
		args []string
		env  map[string]string
		want []string
	}{
		"no units":              {[]string{"--units=0"}, nil, []string{"--units: 0: must be from 1 to 100000; 100 are one GPU"}},
		"too many units":        {[]string{"--units=100001"}, nil, []string{"--units: 100001: must be from 1 to 100000"}},
		"units in words":        {[]string{"--units=many"}, nil, []string{"--units", `"many"`}},
		"units of the original": {nil, map[string]string{"RESOURCE_NUMS": "1k"}, []string{"environment variable RESOURCE_NUMS", `"1k"`}},
		"own variable":          {nil, map[string]string{"DIVVY_UNITS": "-5"}, []string{"--units: -5: must be from 1"}},
		"several mistakes": {
			[]string{"--resource=gpu", "--units=-1", "--socket=a/b", "--kubelet-dir=kubelet", "--listen=9402", "--log-level=loud",
				"--log-format=xml"}, nil,
			[]string{`--resource: "gpu": must be an extended resource`, "--units: -1", `--socket: "a/b": must be the name of a file`,
				`--kubelet-dir: "kubelet": must be an absolute path`, "--listen: ", "--log-level: ", "--log-format: "},
		},
		"no socket":             {[]string{"--socket="}, nil, []string{"--socket: "}},
		"a folder as socket":    {[]string{"--socket=.."}, nil, []string{"--socket: "}},
		"kubelet's socket":      {nil, map[string]string{"SOCKET_NAME": "kubelet.sock"}, []string{"--socket: ", "kubelet's own"}},
		"kubelet's checkpoint":  {[]string{"--socket=kubelet_internal_checkpoint"}, nil, []string{"--socket: ", "kubelet's own"}},
		"a path of many bytes":  {[]string{"--kubelet-dir=" + long}, nil, []string{"--socket: ", "may have 99"}},
		"arguments by position": {[]string{"10", "bitfusion.io", "bitfusion.io/gpu", "1000"}, nil, []string{"unknown command"}},
		"an unknown flag":       {[]string{"--interval=10"}, nil, []string{"unknown flag: --interval"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			for name, value := range tt.env {
				t.Setenv(name, value)
			}
			cmd := Command("divvy-node")
			cmd.SetArgs(append([]string{"pool"}, tt.args...))
			err := cmd.ExecuteContext(t.Context())
			if err == nil {
				t.Fatal("accepted")
			}
			hasAll(t, err.Error(), tt.want...)
			if ExitCode(err) != ExitUsage {
				t.Errorf("exit code %d, want %d", ExitCode(err), ExitUsage)
			}
		})
	}
}

// The variables of the original's DaemonSet do what they did; INTERVAL does
// nothing, and is no error.
func TestPoolTakesTheVariablesOfTheOriginal(t *testing.T) {
	k := newPoolKubelet(t)
	k.start()
	for name, value := range map[string]string{
		"INTERVAL": "10", "SOCKET_NAME": "other.io", "RESOURCE_NAME": "other.io/gpu", "RESOURCE_NUMS": "3",
		"DIVVY_LISTEN": "127.0.0.1:0", "DIVVY_KUBELET_DIR": filepath.Dir(k.folder),
	} {
		t.Setenv(name, value)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		cmd := Command("divvy-node")
		cmd.SetArgs([]string{"pool", "--units=7"})
		ended <- cmd.ExecuteContext(ctx)
	}()
	if r := k.registration(); r.GetEndpoint() != "other.io" || r.GetResourceName() != "other.io/gpu" {
		t.Errorf("registered as %v", r)
	}
	list, end := k.watch()
	end()
	if n := len(list.GetDevices()); n != 7 {
		t.Errorf("%d units, want the 7 of the flag", n)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// Defects D4 and P8: what cannot be mended ends the program and says why.
func TestPoolEndsWhenItCannotListen(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // a test
	o := defaultPoolOptions()
	o.KubeletDir, o.Listen = t.TempDir(), l.Addr().String()
	if err := poolplugin.Run(t.Context(), o.Options); err == nil || !strings.HasPrefix(err.Error(), "listen for probes and metrics: ") {
		t.Errorf("error %v", err)
	}
}

// TestMetricsOfThePoolAreThoseOfTheTable, and keep Prometheus' rules for names.
func TestMetricsOfThePoolAreThoseOfTheTable(t *testing.T) {
	k := newPoolKubelet(t)
	k.start()
	d := startPool(t, k, 10)
	text := ""
	eventually(t, "the metrics are served", func() bool {
		status, body := d.get("/metrics")
		text = body
		return status == http.StatusOK
	})
	for _, difference := range metrics.Differences(metrics.PoolNode, text) {
		t.Error(difference)
	}
	if problems, err := promlint.New(strings.NewReader(text)).Lint(); err != nil || len(problems) > 0 {
		t.Errorf("%v, %v", problems, err)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}
