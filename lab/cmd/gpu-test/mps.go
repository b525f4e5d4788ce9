package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/node/mps"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
)

// byGBWithMPS is byGB for clients of MPS.
var byGBWithMPS = config.Resource{Name: memory, Vendor: vendor, Mode: config.ModeMemory, MemoryUnit: "1",
	Isolation: config.IsolationCooperative}

// mpsPatience is how long the daemon and the service of MPS may take to see what the other has
// done: each makes a pass in 10 or 15 s.
const mpsPatience = time.Minute

// modesLeftAlone answers as if the compute mode had been set: the test changes no setting of
// a GPU.
type modesLeftAlone struct{}

func (modesLeftAlone) Exclusive(accel.DeviceID) (bool, error)  { return true, nil }
func (modesLeftAlone) SetExclusive(accel.DeviceID, bool) error { return nil }

// multiProcess runs the control daemon of MPS as divvy-node mps does, and CUDA programs in two
// containers with a quarter of a GPU each.
func (t containers) multiProcess(ctx context.Context) (err error) {
	t.title("MPS: two containers with a quarter of a GPU each")
	why := t.withoutContainers()
	if _, err := os.Stat(mps.Dir); why == "" && err == nil {
		why = mps.Dir + " exists: Divvy is in use here"
	}
	if why == "" && findProgram([]string{mps.Program, "/usr/local/nvidia/bin/" + mps.Program}) == "" {
		why = "there is no " + mps.Program
	}
	if why == "" && os.Getenv(ownMounts) == "" {
		why = "the program could not get a mount namespace of its own"
	}
	if why != "" {
		t.note("MPS was not started: %s.", why)
		return nil
	}
	t.note("The compute mode stays as it is, so that programs which look for other pipes run without MPS.")
	stop := t.serveMPS(ctx)
	defer func() { err = errors.Join(err, stop()) }()
	if err := t.node.offerBy(byCDI, byGBWithMPS); err != nil {
		return err
	}
	t.checks.NoError("the node states the isolation cooperative", poll.Until(ctx, mpsPatience, "the label", t.cooperative))
	t.offered(ctx, memory, t.units(), t.units())
	gb := int(t.units() / t.gpus() / 4)
	clients := map[accel.DeviceID][]int{}
	for _, request := range []struct {
		mib  int
		code int32
	}{
		{gb << 10, cudaOutOfMemory}, // its context has a part of it
		{gb<<10 - 1024, cudaSuccess},
	} {
		c, end, err := t.client(ctx, gb, request.mib)
		if err != nil {
			t.checks.NoError("a client of MPS creates a CUDA context", err)
			return nil
		}
		defer end() //nolint:gocritic // all of them are clients until the end
		t.allocated(c, request.mib, request.code)
		clients[c.gpu] = append(clients[c.gpu], c.pid)
	}
	for id, pids := range clients {
		what := fmt.Sprintf("one server of MPS is active and has the %d clients", len(pids))
		t.checks.NoError(what, poll.Until(ctx, mpsPatience, "the report", func(context.Context) error { return serves(id, pids) }))
	}
	return nil
}

// cooperative returns what is wrong unless the node states that tier.
func (t containers) cooperative(ctx context.Context) error {
	node, err := t.node.client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if got := node.Labels["divvy.dev/nvidia.isolation"]; got != string(accel.TierCooperative) {
		return fmt.Errorf("it is %q", got)
	}
	return nil
}

// client starts a container with so many GB, which allocates so many MiB, and checks its share
// of the multiprocessors.
func (t containers) client(ctx context.Context, gb, mib int) (c heldContext, end func(), err error) {
	pod, err := t.node.run(ctx, memory, int64(gb))
	if err != nil {
		return c, nil, err
	}
	if c, err = t.start(ctx, pod, mib); err != nil {
		t.node.kubelet.Remove(pod)
		return c, nil, err
	}
	now := t.inspected.gpu(string(c.gpu))
	most := t.multiprocessors * int32(mps.Percent(uint64(gb)<<30, now.Memory.Total)) / 100 //nolint:gosec // a GPU has less
	t.checks.True("the client has its share of the multiprocessors", 0 < c.answer.Multiprocessors && c.answer.Multiprocessors <= most,
		fmt.Sprintf("%d of %d, at most %d", c.answer.Multiprocessors, t.multiprocessors, most))
	end = func() { c.end(); t.node.kubelet.Remove(pod) }
	if err := t.listed(ctx, c); err != nil {
		end()
		return c, nil, err
	}
	return c, end, nil
}

// serves returns what is wrong unless the service reports that an active server has just these
// clients of a GPU.
func serves(gpu accel.DeviceID, clients []int) error {
	report, err := mps.ReadReport(mps.Dir, time.Now())
	if err != nil {
		return err
	}
	found := report.Devices[gpu]
	if found == nil || found.Problem != "" || len(found.Servers) != 1 {
		return fmt.Errorf("it has %+v", found)
	}
	server := found.Servers[0]
	slices.Sort(server.Clients)
	if slices.Sort(clients); server.State != "ACTIVE" || !slices.Equal(server.Clients, clients) {
		return fmt.Errorf("the server is %+v, the clients are %v", server, clients)
	}
	return nil
}

// serveMPS runs the service of MPS until stop is called, which returns what went wrong.
func (t containers) serveMPS(ctx context.Context) (stop func() error) {
	var mu sync.Mutex
	var problems []error
	host := mps.Host{Root: "/", Mount: unix.Mount}
	service := mps.Service{Dir: mps.Dir, Inside: mps.Dir, Prepare: host.Prepare, Now: time.Now,
		Open: func(string) (mps.Modes, func(), error) { return modesLeftAlone{}, func() {}, nil },
		Log: func(err error, message string, id accel.DeviceID) {
			klog.LoggerWithName(t.node.log, "divvy-mps").Info(message, "device", id, "err", err)
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				problems = append(problems, fmt.Errorf("%s: %w", strings.ToLower(message), err))
			}
		}}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	var ended error
	running.Go(func() { ended = service.Run(ctx) })
	return func() error {
		cancel()
		running.Wait()
		t.checks.NoError("the service of MPS had no problem", errors.Join(problems...))
		_ = unix.Unmount(mps.SharedMemoryDir(mps.Dir), 0) // it may not have come so far
		return errors.Join(ended, os.RemoveAll(mps.Dir))
	}
}
