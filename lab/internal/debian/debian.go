// Package debian fetches packages of a Debian release for any architecture, as
// apt does and with apt: signatures and checksums are verified. Nothing on the
// host changes, neither its list of packages nor its architectures: apt works in
// a folder of its own. It does not install packages and does not run their
// scripts; whoever uses the files of one knows what it needs of them.
package debian

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/gofrs/flock"
)

// Keyring holds the keys that Debian's archive is signed with.
const Keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"

// Archive is a Debian release at a mirror.
type Archive struct {
	// Dir is a folder for what apt keeps. It grows to some tens of MB for each
	// architecture, and saves downloads when it is used again.
	Dir string
	// Suite is the release, such as "bookworm".
	Suite string
	// Mirror and SecurityMirror are addresses; empty means those that this machine's
	// own apt uses.
	Mirror, SecurityMirror string
}

// Package is a package that was fetched.
type Package struct {
	Name, Version, Architecture string
	// Source is the name of the source package that it was made from.
	Source string
	// Control is its description as it stands in the package.
	Control string
	// Path is the file.
	Path string
}

// programs are what this package runs.
var programs = []string{"apt-get", "apt-config", "dpkg-deb"}

// Fetch downloads the newest versions of packages that the release has for an
// architecture, as Debian calls it, and returns them in the order of names. It
// fails unless everything that they depend on is among names.
func (a Archive) Fetch(ctx context.Context, architecture string, names ...string) ([]Package, error) {
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			return nil, fmt.Errorf("%w: packages can be fetched on Debian and its relatives alone", err)
		}
	}
	if _, err := os.Stat(Keyring); err != nil {
		return nil, fmt.Errorf("the keys of Debian's archive: %w: install the package debian-archive-keyring", err)
	}
	dir, err := filepath.Abs(filepath.Join(a.Dir, a.Suite+"-"+architecture))
	if err != nil {
		return nil, fmt.Errorf("fetch packages: %w", err)
	}
	// apt makes all but these itself.
	for _, sub := range []string{"state", "cache", "packages"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return nil, fmt.Errorf("fetch packages: %w", err)
		}
	}
	lock := flock.New(filepath.Join(dir, "lock"))
	if _, err := lock.TryLockContext(ctx, lockRetry); err != nil {
		return nil, fmt.Errorf("fetch packages: wait for another that does: %w", err)
	}
	defer lock.Unlock() //nolint:errcheck // the lock goes with the process anyway
	config, err := a.configure(ctx, dir, architecture)
	if err != nil {
		return nil, err
	}
	// The indexes are asked for each time, as a fix of a vulnerability is to be
	// in the next image; an index that is the same is not sent again.
	if err := run(ctx, dir, config, "apt-get", "--quiet", "--error-on=any", "update"); err != nil {
		return nil, fmt.Errorf("read what Debian %s has for %s: %w", a.Suite, architecture, err)
	}
	return a.download(ctx, filepath.Join(dir, "packages"), config, architecture, names)
}

func (a Archive) download(ctx context.Context, dir, config, architecture string, names []string) ([]Package, error) {
	// Older versions from earlier runs go, or nobody ever removes them.
	old, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return nil, fmt.Errorf("fetch packages: %w", err)
	}
	for _, path := range old {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("fetch packages: %w", err)
		}
	}
	if err := run(ctx, dir, config, "apt-get", append([]string{"--quiet", "download"}, names...)...); err != nil {
		return nil, fmt.Errorf("fetch %s for %s from Debian %s: %w", strings.Join(names, ", "), architecture, a.Suite, err)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return nil, fmt.Errorf("fetch packages: %w", err)
	}
	byName := map[string]Package{}
	for _, path := range files {
		p, err := Open(ctx, path)
		if err != nil {
			return nil, err
		}
		byName[p.Name] = p
	}
	packages := make([]Package, 0, len(names))
	for _, name := range names {
		p, found := byName[name]
		if !found {
			return nil, fmt.Errorf("apt did not fetch %s for %s, without saying why", name, architecture)
		}
		packages = append(packages, p)
	}
	return packages, complete(packages)
}

// complete returns an error that names what packages depend on and is not among
// them.
func complete(packages []Package) error {
	var errs []error
	for _, p := range packages {
		for dependency := range strings.SplitSeq(fields(p.Control)["Depends"], ",") {
			if strings.TrimSpace(dependency) == "" {
				continue
			}
			satisfied := false
			for alternative := range strings.SplitSeq(dependency, "|") {
				name := packageName.FindString(strings.TrimSpace(alternative))
				satisfied = satisfied || slices.ContainsFunc(packages, func(other Package) bool { return other.Name == name })
			}
			if !satisfied {
				errs = append(errs, fmt.Errorf("package %s %s depends on %s, which is not among those to fetch", p.Name, p.Version,
					strings.TrimSpace(dependency)))
			}
		}
	}
	return errors.Join(errs...)
}

var packageName = regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]*`)

// Open reads the description of a package's file.
func Open(ctx context.Context, path string) (Package, error) {
	control, err := output(ctx, "dpkg-deb", "--field", path)
	if err != nil {
		return Package{}, fmt.Errorf("read package %s: %w", filepath.Base(path), err)
	}
	f := fields(string(control))
	p := Package{Name: f["Package"], Version: f["Version"], Architecture: f["Architecture"], Control: string(control), Path: path}
	// "Source: glibc (2.36-9)" where the versions differ.
	p.Source = cmp.Or(strings.TrimSpace(packageName.FindString(f["Source"])), p.Name)
	if p.Name == "" || p.Version == "" || p.Architecture == "" {
		return Package{}, fmt.Errorf("read package %s: its description has no name, version or architecture", filepath.Base(path))
	}
	return p, nil
}

// fields reads a description; lines that go on are left out, as no field that is
// asked for has any.
func fields(control string) map[string]string {
	out := map[string]string{}
	for line := range strings.Lines(control) {
		if name, value, found := strings.Cut(line, ":"); found && !strings.HasPrefix(line, " ") {
			out[name] = strings.TrimSpace(value)
		}
	}
	return out
}

// carried are the host's settings of apt that hold here too: how to get out to
// the network, and how clocks and mirrors that lag behind are treated.
var carried = regexp.MustCompile(`^Acquire::(https?|ftp|tor|Retries|ForceIPv[46]|` +
	`Check-Date|Check-Valid-Until|Max-FutureTime|Max-ValidTime|Min-ValidTime|By-Hash)\b.*".+";$`)

// configure writes apt's configuration and returns its path. The host's own
// files are not read, since they may run commands after an update, pin versions,
// or name more repositories.
func (a Archive) configure(ctx context.Context, dir, architecture string) (string, error) {
	host, err := output(ctx, "apt-config", "dump")
	if err != nil {
		return "", fmt.Errorf("read the settings of apt: %w", err)
	}
	var b strings.Builder
	for line := range strings.Lines(string(host)) {
		if carried.MatchString(strings.TrimSpace(line)) {
			b.WriteString(line)
		}
	}
	for _, setting := range [][2]string{
		{"Dir::Etc::parts", "/dev/null"}, {"Dir::Etc::main", "/dev/null"},
		{"Dir::Etc::preferences", "/dev/null"}, {"Dir::Etc::preferencesparts", "/dev/null"},
		{"Dir::Etc::sourceparts", "/dev/null"}, {"Dir::Etc::sourcelist", filepath.Join(dir, "sources.list")},
		{"Dir::State", filepath.Join(dir, "state")}, {"Dir::State::status", filepath.Join(dir, "status")},
		{"Dir::Cache", filepath.Join(dir, "cache")},
		{"APT::Architecture", architecture}, {"APT::Architectures", architecture},
		{"Acquire::Languages", "none"},
		{"Acquire::AllowInsecureRepositories", "false"}, {"APT::Get::AllowUnauthenticated", "false"},
		// Otherwise apt as root gives itself less rights, with which it cannot
		// write below a folder that is root's own.
		{"APT::Sandbox::User", ""},
	} {
		fmt.Fprintf(&b, "%s %q;\n", setting[0], setting[1])
	}
	mirror, security, err := a.mirrors(ctx)
	if err != nil {
		return "", err
	}
	sources := fmt.Sprintf("deb [signed-by=%[1]s] %[2]s %[3]s main\ndeb [signed-by=%[1]s] %[2]s %[3]s-updates main\ndeb "+
		"[signed-by=%[1]s] %[4]s %[3]s-security main\n",
		Keyring, mirror, a.Suite, security)
	config := filepath.Join(dir, "apt.conf")
	for path, content := range map[string]string{config: b.String(), filepath.Join(dir, "sources.list"): sources,
		filepath.Join(dir, "status"): ""} {
		// The settings may hold a proxy's password.
		if err := os.WriteFile(path, []byte(content), fs.FileMode(0o600)); err != nil {
			return "", fmt.Errorf("write the settings of apt: %w", err)
		}
	}
	return config, nil
}

// mirrors returns the addresses of Debian and of its security updates.
func (a Archive) mirrors(ctx context.Context) (mirror, security string, err error) {
	if a.Mirror != "" && a.SecurityMirror != "" {
		return a.Mirror, a.SecurityMirror, nil
	}
	targets, err := output(ctx, "apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Created-By: Packages")
	if err != nil {
		return "", "", fmt.Errorf("read the sources of apt: %w", err)
	}
	mirror, security = hostMirrors(string(targets))
	mirror, security = cmp.Or(a.Mirror, mirror), cmp.Or(a.SecurityMirror, security)
	if mirror == "" || security == "" {
		return "", "", errors.New("apt on this machine knows no mirror of Debian and of its security updates: run \"apt-get update\", or " +
			"set --debian-mirror and --debian-security-mirror")
	}
	return mirror, security, nil
}

// hostMirrors finds the first of each among apt's index targets: lines of who made a
// repository, its label and its address.
func hostMirrors(targets string) (mirror, security string) {
	for line := range strings.Lines(targets) {
		f := strings.SplitN(strings.TrimSpace(line), "|", 3)
		if len(f) != 3 || f[0] != "Debian" {
			continue
		}
		switch address := strings.TrimSuffix(f[2], "/"); f[1] {
		case "Debian":
			mirror = cmp.Or(mirror, address)
		case "Debian-Security":
			security = cmp.Or(security, address)
		}
	}
	return mirror, security
}

// run runs apt with a configuration. Its output is in the error alone.
func run(ctx context.Context, dir, config, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "APT_CONFIG="+config, "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", program, args[len(args)-1], err, complaints(out))
	}
	return nil
}

// complaints are the lines of apt's output that say what is wrong, or all of it.
func complaints(out []byte) string {
	var lines []string
	for line := range strings.Lines(string(out)) {
		if strings.HasPrefix(line, "E: ") || strings.HasPrefix(line, "Err:") || strings.HasPrefix(line, "W: ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	if len(lines) == 0 {
		return strings.TrimSpace(string(out))
	}
	return strings.Join(lines, "; ")
}

func output(ctx context.Context, program string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", program, err, strings.TrimSpace(stderr.String()))
	}
	return out, nil
}
