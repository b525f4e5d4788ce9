package host_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/divvy-gpu/divvy/lab/internal/host"
)

// Interfaces of pods go when the kernel gets to it, while the lab looks which
// there are.
func TestLinksWhileOthersComeAndGo(t *testing.T) {
	const bridge = "testbridge0"
	begun, stop, done := make(chan error), make(chan struct{}), make(chan struct{})
	// Threads of their own: they stay in the test's network namespace and end
	// with their goroutines.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); errors.Is(err, unix.EPERM) {
		runtime.UnlockOSThread()
		t.Skip("network namespaces need root")
	} else if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridge}}); err != nil {
		t.Fatal(err)
	}
	attach := func(name string) error {
		master, err := netlink.LinkByName(bridge)
		if err != nil {
			return err
		}
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MasterIndex: master.Attrs().Index},
			PeerName: name + "p"})
	}
	for i := range 60 {
		if err := attach(fmt.Sprint("port", i)); err != nil {
			t.Fatal(err)
		}
	}
	namespace := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
	go func() {
		defer close(done)
		runtime.LockOSThread()
		fd, err := unix.Open(namespace, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			err = errors.Join(err, unix.Close(fd))
		}
		begun <- err
		for {
			select {
			case <-stop:
				return
			default:
			}
			link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "other"}, PeerName: "otherp"}
			if err := errors.Join(netlink.LinkAdd(link), netlink.LinkDel(link)); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	if err := <-begun; err != nil {
		t.Fatal(err)
	}
	for range 200 {
		if names, err := host.Links(bridge); err != nil || len(names) != 61 {
			t.Errorf("%d interfaces, want 61; %v", len(names), err)
			break
		}
	}
	if err := host.RemoveLinks(bridge); err != nil {
		t.Error(err)
	}
	if names, err := host.Links(bridge); err != nil || len(names) > 0 {
		t.Errorf("left after the removal: %v, %v", names, err)
	}
	close(stop)
	<-done
}
