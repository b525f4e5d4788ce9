package debian

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// makePackage makes a package with dpkg-deb and returns its path.
func makePackage(t *testing.T, name, more string, files map[string]string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	files["DEBIAN/control"] = "Package: " + name + "\nVersion: 1.0-1\nArchitecture: all\nMaintainer: Nobody <nobody@example.com>\n" + more +
		"Description: a test\n of this package\n"
	for path, content := range files {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if target, link := strings.CutPrefix(content, "-> "); link {
			if err := os.Symlink(target, path); err != nil {
				t.Fatal(err)
			}
		} else if err := os.WriteFile(path, []byte(content), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	// Whatever the umask of whoever tests is.
	for _, path := range []string{dir, filepath.Join(dir, "DEBIAN")} {
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	deb := dir + ".deb"
	if out, err := exec.Command("dpkg-deb", "--root-owner-group", "--build", dir, deb).CombinedOutput(); err != nil {
		t.Fatalf("dpkg-deb: %v: %s", err, out)
	}
	return deb
}

func TestOpenAndFiles(t *testing.T) {
	deb := makePackage(t, "libexample1", "Source: example (1.0)\n", map[string]string{
		"lib/x86_64-linux-gnu/libexample.so.1.0": "library", "lib/x86_64-linux-gnu/libexample.so.1": "-> libexample.so.1.0",
		"usr/share/doc/libexample1/copyright": "free", "usr/share/man/man3/example.3": "how",
	})
	p, err := Open(t.Context(), deb)
	if err != nil {
		t.Fatal(err)
	}
	if p.Name != "libexample1" || p.Version != "1.0-1" || p.Architecture != "all" || p.Source != "example" {
		t.Errorf("opened %+v", p)
	}
	files, err := p.Files(t.Context(), func(path string) bool { return !strings.Contains(path, "/man/") })
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, f := range files {
		got[f.Path] = string(f.Content)
		if f.Target != "" {
			got[f.Path] = "-> " + f.Target
		}
		if f.Target == "" && f.Mode != 0o644 {
			t.Errorf("%s has mode %v, want %v", f.Path, f.Mode, fs.FileMode(0o644))
		}
	}
	want := map[string]string{
		"/usr/lib/x86_64-linux-gnu/libexample.so.1.0": "library", "/usr/lib/x86_64-linux-gnu/libexample.so.1": "-> libexample.so.1.0",
		"/usr/share/doc/libexample1/copyright": "free", "/var/lib/dpkg/status.d/libexample1": p.Control,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestOpenRefusesWhatIsNoPackage(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.deb")
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), path); err == nil || !strings.Contains(err.Error(), "read package x.deb") {
		t.Errorf("got %v", err)
	}
}

func TestComplete(t *testing.T) {
	pkg := func(name, depends string) Package {
		return Package{Name: name, Version: "1", Control: "Package: " + name + "\nDepends: " + depends + "\n"}
	}
	tests := map[string]struct {
		packages []Package
		want     string
	}{
		"none needed":    {packages: []Package{{Name: "a", Control: "Package: a\n"}}},
		"all there":      {packages: []Package{pkg("a", "b (>= 1.2), gcc-12-base (= 12~3)"), pkg("b", "a"), pkg("gcc-12-base", "")}},
		"an alternative": {packages: []Package{pkg("a", "x | b"), pkg("b", "")}},
		"one is missing": {packages: []Package{pkg("a", "b, c (>= 2)"), pkg("b", "")},
			want: "package a 1 depends on c (>= 2), which is not among those to fetch"},
		"no alternative is": {packages: []Package{pkg("a", "x | y")}, want: "depends on x | y"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			err := complete(tt.packages)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// TestConfigureKeepsTheHostOut: apt reads no file of the host but keys, and runs
// nothing that the host wants run.
func TestConfigureKeepsTheHostOut(t *testing.T) {
	dir := t.TempDir()
	config, err := Archive{Suite: "bookworm", Mirror: "http://mirror.example/debian",
		SecurityMirror: "http://mirror.example/security"}.configure(t.Context(), dir, "arm64")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("apt-config", "dump")
	cmd.Env = append(os.Environ(), "APT_CONFIG="+config)
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	settings := string(out)
	for _, want := range []string{
		`APT::Architecture "arm64";`, `Dir::Etc::parts "/dev/null";`, `Dir::State::status "` + filepath.Join(dir, "status") + `";`,
		`Acquire::AllowInsecureRepositories "false";`, `APT::Get::AllowUnauthenticated "false";`,
	} {
		if !strings.Contains(settings, want+"\n") {
			t.Errorf("apt has no setting %s", want)
		}
	}
	for line := range strings.Lines(settings) {
		if strings.Contains(line, "Invoke") && !strings.HasSuffix(strings.TrimSpace(line), `"";`) {
			t.Errorf("apt would run something: %s", line)
		}
	}
	sources, err := os.ReadFile(filepath.Join(dir, "sources.list"))
	if err != nil {
		t.Fatal(err)
	}
	want := "deb [signed-by=" + Keyring + "] http://mirror.example/debian bookworm main\n" +
		"deb [signed-by=" + Keyring + "] http://mirror.example/debian bookworm-updates main\n" +
		"deb [signed-by=" + Keyring + "] http://mirror.example/security bookworm-security main\n"
	if diff := cmp.Diff(want, string(sources)); diff != "" {
		t.Errorf("sources (-want +got):\n%s", diff)
	}
}

// TestMirrorsOfThisMachine asks the real apt about sources that the test writes.
func TestMirrorsOfThisMachine(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	// As after "apt-get update"; other repositories are first, and have the same releases.
	repository := func(host, suite, origin, label string) string {
		name := "lists/" + host + "_debian_dists_" + suite + "_"
		write(name+"Release", "Origin: "+origin+"\nLabel: "+label+"\nCodename: "+suite+
			"\nComponents: main\nArchitectures: all amd64 arm64\n")
		for _, arch := range []string{"amd64", "arm64"} {
			write(name+"main_binary-"+arch+"_Packages", "")
		}
		return "deb http://" + host + "/debian/ " + suite + " main\n"
	}
	sources := write("sources.list", repository("third.example", "bookworm", "Third", "Debian")+
		repository("noble.example", "noble-security", "Ubuntu", "Ubuntu")+
		repository("backports.example", "bookworm-backports", "Debian", "Debian Backports")+
		repository("a.example", "bookworm", "Debian", "Debian")+
		repository("b.example", "bookworm-security", "Debian", "Debian-Security")+
		repository("c.example", "bookworm-updates", "Debian", "Debian"))
	t.Setenv("APT_CONFIG", write("apt.conf",
		`Dir::Etc::sourcelist "`+sources+`"; Dir::Etc::sourceparts "/dev/null"; Dir::State "`+dir+`"; Dir::Cache "`+dir+`";`))
	for _, tt := range []struct {
		archive          Archive
		mirror, security string
	}{
		{Archive{}, "http://a.example/debian", "http://b.example/debian"},
		{Archive{Mirror: "http://d.example"}, "http://d.example", "http://b.example/debian"},
		{Archive{Mirror: "http://d.example", SecurityMirror: "http://e.example"}, "http://d.example", "http://e.example"},
	} {
		if mirror, security, err := tt.archive.mirrors(t.Context()); err != nil || mirror != tt.mirror || security != tt.security {
			t.Errorf("%+v: got %q and %q, %v; want %q and %q", tt.archive, mirror, security, err, tt.mirror, tt.security)
		}
	}
	write("sources.list", repository("third.example", "bookworm", "Third", "Debian"))
	if _, _, err := (Archive{}).mirrors(t.Context()); err == nil ||
		!strings.Contains(err.Error(), `run "apt-get update", or set --debian-mirror`) {
		t.Errorf("without a mirror of Debian: %v, want it to say what to do", err)
	}
}

// TestFetchSaysWhatIsMissing: no mirror, as without a network.
func TestFetchSaysWhatIsMissing(t *testing.T) {
	a := Archive{Dir: t.TempDir(), Suite: "bookworm", Mirror: "file:///nowhere", SecurityMirror: "file:///nowhere"}
	_, err := a.Fetch(t.Context(), "arm64", "libc6")
	if err == nil || !strings.Contains(err.Error(), "read what Debian bookworm has for arm64") ||
		!strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("got %v", err)
	}
}
