//go:build e2e

package scheduling

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"path/filepath"
	"strconv"
	"sync"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
)

// replicas are two extenders, and the local proxy that kube-scheduler reaches them by.
type replicas struct {
	w     *world
	all   []*replica
	proxy *controlplane.Proxy
	// args are further flags of the extenders.
	args []string
}

// replica is an extender on a machine of its own: what it is asked and what it asks of
// the API server goes through cables that can be cut.
type replica struct {
	*controlplane.Extender
	in, api *cable
}

// cut cuts the machine off.
func (r *replica) cut() { r.in.cut(); r.api.cut() }

func newReplicas(w *world, args ...string) *replicas {
	w.Helper()
	r := &replicas{w: w, args: args, all: make([]*replica, 2)}
	if err := w.plane.Prepare(w.Context()); err != nil {
		w.Fatal(err)
	}
	// One that was released in order: the first replica need not wait, as where another
	// may lead whose Lease was deleted.
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: "divvy-extender"}}
	if _, err := w.client.CoordinationV1().Leases(controlplane.Namespace).Create(w.Context(), lease, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	for n := range r.all {
		r.start(n)
	}
	var err error
	if r.proxy, err = w.plane.StartProxy(w.Context(), programs.Control); err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { w.end(r.proxy.Process) })
	return r
}

// entry is what kube-scheduler is to be told of the extender.
func (r *replicas) entry() *schedconf.Extender {
	entry := r.all[0].Entry
	entry.URL = r.proxy.URL
	return &entry
}

// start starts a replica as its pod does. Nobody runs the pod; its object is there, and
// the EndpointSlice that the Service would have.
func (r *replicas) start(n int) {
	w := r.w
	w.Helper()
	ctx, name := w.Context(), fmt.Sprint("extender-", n)
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.Namespace, Name: name},
		Spec: corev1.PodSpec{SchedulerName: "nobody",
			Containers: []corev1.Container{{Name: "extender", Image: "example.com/divvy:1"}}},
	}
	if _, err := w.client.CoreV1().Pods(pod.Namespace).Get(ctx, name, metav1.GetOptions{}); err != nil {
		if _, err := w.client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			w.Fatal(err)
		}
	}
	address := hostAddress(w)
	api, kubeconfig := w.cableToServer(name)
	e, err := w.plane.StartExtender(ctx, controlplane.ExtenderOptions{
		Name: name, Program: programs.Control, Resources: []string{resource},
		Args: append([]string{"--leader-elect", "--leader-elect-namespace=" + controlplane.Namespace, "--kubeconfig=" + kubeconfig},
			r.args...),
		Env: []string{"POD_NAME=" + name, "POD_IP=" + address},
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() {
		if e.Running() {
			w.end(e.Process)
		}
	})
	own, err := url.Parse(e.Entry.URL)
	if err != nil {
		w.Fatal(err)
	}
	r.all[n] = &replica{Extender: e, in: newCable(w, net.JoinHostPort(address, own.Port()), own.Host), api: api}
	r.list(name, address, own.Port())
}

// list makes the EndpointSlice say where the replica is.
func (r *replicas) list(name, address, port string) {
	w := r.w
	w.Helper()
	number, err := strconv.ParseInt(port, 10, 32)
	if err != nil {
		w.Fatal(err)
	}
	slices := w.client.DiscoveryV1().EndpointSlices(controlplane.Namespace)
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: controlplane.Service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{address}}},
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("https"), Port: ptr.To(int32(number))}},
	}
	if _, err = slices.Create(w.Context(), slice, metav1.CreateOptions{}); err != nil {
		_, err = slices.Update(w.Context(), slice, metav1.UpdateOptions{})
	}
	if err != nil {
		w.Fatal(err)
	}
}

// restart starts a replica that ended.
func (r *replicas) restart(ended *replica) {
	r.w.Helper()
	for n, one := range r.all {
		if one == ended {
			r.start(n)
		}
	}
}

// leading returns the replica that leads, nil for none.
func (r *replicas) leading(ctx context.Context) *replica {
	for _, one := range r.all {
		if !one.Running() {
			continue
		}
		if leads, err := one.Leads(ctx); err == nil && leads {
			return one
		}
	}
	return nil
}

// other returns the replica that is not this one.
func (r *replicas) other(this *replica) *replica {
	if r.all[0] == this {
		return r.all[1]
	}
	return r.all[0]
}

// leader waits until one leads and returns it.
func (r *replicas) leader() (leader *replica) {
	r.w.Helper()
	r.w.eventually("a replica leads", func(ctx context.Context) error {
		if leader = r.leading(ctx); leader == nil {
			return errors.New("none does")
		}
		return nil
	})
	return leader
}

// hostAddress is an address of this machine that is not of the loopback interface:
// EndpointSlices may have no other.
func hostAddress(w *world) string {
	w.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		w.Fatal(err)
	}
	for _, one := range all {
		if network, ok := one.(*net.IPNet); ok && network.IP.To4() != nil && network.IP.IsGlobalUnicast() {
			return network.IP.String()
		}
	}
	w.Fatal("this machine has no IPv4 address but that of the loopback interface, and the test needs one")
	return ""
}

// cableToServer returns a cable to the API server, and the path of an administrator's
// kubeconfig file that goes by it.
func (w *world) cableToServer(name string) (*cable, string) {
	w.Helper()
	config, err := clientcmd.LoadFromFile(w.plane.Kubeconfig())
	if err != nil {
		w.Fatal(err)
	}
	var out *cable
	for _, cluster := range config.Clusters {
		server, err := url.Parse(cluster.Server)
		if err != nil {
			w.Fatal(err)
		}
		out = newCable(w, "127.0.0.1:0", server.Host)
		cluster.Server = "https://" + out.address
	}
	file := filepath.Join(w.plane.Dir(), name+"-api.conf")
	if err := clientcmd.WriteToFile(*config, file); err != nil {
		w.Fatal(err)
	}
	return out, file
}

// cable carries connections from an address to another. While it is cut nothing comes
// through, and nothing says so: as where a cable is pulled.
type cable struct {
	address string

	mu    sync.Mutex
	whole chan struct{} // closed while it is not cut
}

func newCable(w *world, from, to string) *cable {
	w.Helper()
	listener, err := new(net.ListenConfig).Listen(w.Context(), "tcp", from)
	if err != nil {
		w.Fatal(err)
	}
	out := &cable{address: listener.Addr().String(), whole: make(chan struct{})}
	close(out.whole)
	ctx, stop := context.WithCancel(context.WithoutCancel(w.Context()))
	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { out.carry(ctx, client, to) })
		}
	})
	w.Cleanup(func() {
		stop()
		_ = listener.Close() // it may be closed already
		running.Wait()
	})
	return out
}

func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.whole = make(chan struct{})
}

// wait waits until the cable is whole.
func (c *cable) wait(ctx context.Context) error {
	c.mu.Lock()
	whole := c.whole
	c.mu.Unlock()
	select {
	case <-whole:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *cable) carry(ctx context.Context, client net.Conn, to string) {
	defer client.Close() //nolint:errcheck // it may be closed already
	if c.wait(ctx) != nil {
		return
	}
	server, err := new(net.Dialer).DialContext(ctx, "tcp", to)
	if err != nil {
		return
	}
	closeBoth := func() { _ = client.Close(); _ = server.Close() }
	defer closeBoth()
	defer context.AfterFunc(ctx, closeBoth)()
	var copying sync.WaitGroup
	for _, way := range [][2]net.Conn{{server, client}, {client, server}} {
		copying.Go(func() {
			defer closeBoth()
			_, _ = io.Copy(gatedConn{way[0], c, ctx}, way[1]) // an end is an end
		})
	}
	copying.Wait()
}

// gatedConn is written to while the cable is whole.
type gatedConn struct {
	to    io.Writer
	cable *cable
	ctx   context.Context //nolint:containedctx // of the connection
}

func (g gatedConn) Write(b []byte) (int, error) {
	if err := g.cable.wait(g.ctx); err != nil {
		return 0, err
	}
	return g.to.Write(b)
}
