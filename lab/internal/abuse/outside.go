package abuse

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// Addresses of the network outside, by their last number.
const (
	here      = 1   // this machine's end of it
	firstPod  = 10  // the pods that attack
	bystander = 200 // a pod that attacks nothing: kubelet's probes, Prometheus
)

// outside is a network of pods beside this machine's own: a network namespace whose
// connections come from addresses that this machine does not have. It needs root, and
// the kernel removes it with the process.
type outside struct {
	link   netlink.Link
	own    netns.NsHandle
	prefix string
}

func newOutside() (_ *outside, err error) {
	var random [2]byte
	if _, err := rand.Read(random[:]); err != nil {
		return nil, err
	}
	// Of the networks for measurements, which no cluster uses.
	o := &outside{prefix: fmt.Sprintf("198.18.%d.", random[0]), own: -1}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make a network of pods: %w", err), o.close())
		}
	}()
	name := fmt.Sprintf("divvy%x", random)
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}
	if err := netlink.LinkAdd(veth); err != nil {
		return nil, err
	}
	o.link = veth
	peer, err := netlink.LinkByName(veth.PeerName)
	if err != nil {
		return nil, err
	}
	if err := o.up(veth, here); err != nil {
		return nil, err
	}
	if o.own, err = newNamespace(); err != nil {
		return nil, err
	}
	if err := netlink.LinkSetNsFd(peer, int(o.own)); err != nil {
		return nil, err
	}
	err = o.inside(func() error {
		peer, err := netlink.LinkByName(veth.PeerName)
		if err != nil {
			return err
		}
		for last := firstPod; last <= bystander; last++ {
			if err := o.up(peer, last); err != nil {
				return err
			}
		}
		return nil
	})
	return o, err
}

func (o *outside) up(link netlink.Link, last int) error {
	address, err := netlink.ParseAddr(o.address(last) + "/24")
	if err == nil {
		err = netlink.AddrAdd(link, address)
	}
	if err == nil {
		err = netlink.LinkSetUp(link)
	}
	return err
}

// newNamespace returns a network namespace without leaving this one.
func newNamespace() (netns.NsHandle, error) {
	made, done := netns.NsHandle(-1), make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlock it: the thread ends with the goroutine
		var err error
		made, err = netns.New()
		done <- err
	}()
	return made, errors.Join(<-done, nil)
}

// inside calls do in the namespace. What it dials has its addresses.
func (o *outside) inside(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		back, err := netns.Get()
		if err != nil {
			done <- err
			return
		}
		defer back.Close() //nolint:errcheck // a handle
		if err := netns.Set(o.own); err != nil {
			done <- err
			return
		}
		err = do()
		if netns.Set(back) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

func (o *outside) address(last int) string { return fmt.Sprint(o.prefix, last) }

func (o *outside) dial(ctx context.Context, last int, to string) (c *net.TCPConn, err error) {
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(o.address(last))}, Timeout: 10 * time.Second}
	err = o.inside(func() error {
		made, err := dialer.DialContext(ctx, "tcp4", to)
		if err != nil {
			return err
		}
		c, _ = made.(*net.TCPConn)
		return nil
	})
	return c, err
}

func (o *outside) close() error {
	var errs []error
	if o.link != nil {
		errs = append(errs, netlink.LinkDel(o.link)) // and its other end
	}
	if o.own >= 0 {
		errs = append(errs, o.own.Close())
	}
	return errors.Join(errs...)
}
