// Package host changes the machine that a lab runs on, and puts it back: what
// the lab may claim, kernel settings, mounts, control groups, network
// interfaces and packet filter tables.
package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// RequireRoot returns an error of one sentence where a user, by the effective
// user id, lacks the rights to run a Kubernetes.
func RequireRoot(euid int, command string) error {
	if euid != 0 {
		return fmt.Errorf("%s needs root: it starts a real Kubernetes with containers on this machine; run it with sudo", command)
	}
	return nil
}

// Package is a Debian package that the lab needs.
type Package struct {
	// Name is the name of the package.
	Name string
	// Probe is a file that shows that it is there, however it got there; "" where that is
	// known not to be so.
	Probe string
	// Purpose ends the sentence "needed for".
	Purpose string
}

// Packages returns what the lab needs from the distribution.
func Packages() []Package {
	return []Package{
		{Name: "gcc", Probe: "/usr/bin/gcc", Purpose: "building runc and the stand-in for the vendor's library"},
		{Name: "libc6-dev", Probe: "/usr/include/stdlib.h", Purpose: "building runc and the stand-in for the vendor's library"},
		{Name: "libseccomp-dev", Probe: "/usr/include/seccomp.h", Purpose: "building runc"},
		{Name: "pkg-config", Probe: "/usr/bin/pkg-config", Purpose: "building runc"},
		{Name: "busybox-static", Probe: "/bin/busybox", Purpose: "the image of the demo's pods"},
		{Name: "nftables", Probe: "/usr/sbin/nft", Purpose: "services and pod networking"},
		{Name: "iproute2", Probe: "/bin/ip", Purpose: "labs side by side"},
		{Name: "mount", Probe: "/bin/mount", Purpose: "volumes of pods"},
	}
}

// InstallPackages installs the packages that are missing, and says so through
// report. It changes nothing where all are there.
func InstallPackages(ctx context.Context, packages []Package, report func(format string, args ...any)) error {
	var names []string
	for _, p := range packages {
		if _, err := os.Stat(p.Probe); err == nil {
			continue
		}
		report("Package %s is missing; it is needed for %s.", p.Name, p.Purpose)
		names = append(names, p.Name)
	}
	if len(names) == 0 {
		return nil
	}
	list := strings.Join(names, " ")
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("this system has no apt-get: install the equivalents of these Debian packages yourself: %s", list)
	}
	report("Installing with apt-get: %s", list)
	install := append([]string{"install", "--yes", "--no-install-recommends"}, names...)
	if _, err := apt(ctx, install...); err == nil {
		return nil
	}
	// Fresh machines have no package lists, or old ones.
	if out, err := apt(ctx, "update"); err != nil {
		return fmt.Errorf("update the package lists: %w\n%s", err, out)
	}
	if out, err := apt(ctx, install...); err != nil {
		return fmt.Errorf("install %s: %w\n%s", list, err, out)
	}
	return nil
}

func apt(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "apt-get", args...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// PrimaryIP returns the machine's address on the interface of its default
// route: the address that other machines, and pods, reach it by.
func PrimaryIP() (string, error) {
	// Connecting a datagram socket sends nothing; it makes the kernel choose
	// the address that it would send from.
	conn, err := net.Dial("udp4", "198.18.0.1:9")
	if err != nil {
		return "", fmt.Errorf("this machine has no default route to take the node's address from: %w", err)
	}
	defer conn.Close() //nolint:errcheck // nothing was sent
	address, ok := conn.LocalAddr().(*net.UDPAddr)
	if !ok || address.IP.IsLoopback() {
		return "", errors.New("this machine has no address besides loopback to give to the node")
	}
	return address.IP.String(), nil
}

// HasAddress reports whether an interface of the machine has the address.
func HasAddress(ip string) bool {
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && n.IP.String() == ip {
			return true
		}
	}
	return false
}

// CheckNetworks returns an error when an interface's network overlaps one of
// the ranges that the cluster will use for pods and services.
func CheckNetworks(except string, cidrs ...string) error {
	interfaces, err := net.Interfaces()
	if err != nil {
		return fmt.Errorf("list network interfaces: %w", err)
	}
	for _, i := range interfaces {
		if i.Name == except {
			continue
		}
		addresses, err := i.Addrs()
		if err != nil {
			return fmt.Errorf("list addresses of %s: %w", i.Name, err)
		}
		for _, a := range addresses {
			existing, ok := a.(*net.IPNet)
			if !ok {
				continue
			}
			for _, cidr := range cidrs {
				_, wanted, err := net.ParseCIDR(cidr)
				if err != nil {
					return fmt.Errorf("range %s: %w", cidr, err)
				}
				if wanted.Contains(existing.IP) || existing.Contains(wanted.IP) {
					return fmt.Errorf("interface %s has %s, which overlaps %s of the lab's cluster", i.Name, existing, cidr)
				}
			}
		}
	}
	return nil
}

// CheckPortFree returns an error of one sentence when something listens on the
// address.
func CheckPortFree(address, purpose string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("%s of %s cannot be used, another program has it: %w", address, purpose, err)
	}
	return listener.Close()
}

// ReadSysctl and WriteSysctl access a kernel setting by its path below
// /proc/sys.
func ReadSysctl(name string) (string, error) {
	data, err := os.ReadFile(filepath.Join("/proc/sys", name))
	if err != nil {
		return "", fmt.Errorf("read kernel setting: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// WriteSysctl sets a kernel setting.
func WriteSysctl(name, value string) error {
	if err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0o644); err != nil {
		return fmt.Errorf("set kernel setting %s to %s: %w", name, value, err)
	}
	return nil
}
