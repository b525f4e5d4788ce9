package cleanup

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/node/handover"
)

// spec is a CDI specification of a kind, as divvy-node writes it.
func spec(kind string) string {
	return "cdiVersion: 0.5.0\nkind: " + kind + "\ndevices:\n- name: GPU-1\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n"
}

// claimSpec is what the DRA driver writes for a claim.
func claimSpec(kind string) string {
	return `{"cdiVersion":"0.5.0","kind":"` + kind + `","devices":[{"name":"0f2d6c1a-r","containerEdits":{"env":["A=B"]}}]}`
}

// hostTree makes files below a folder: the content by path. A path with "/" at the
// end is a folder, "->" begins the target of a link, "socket" makes a socket that
// nobody serves.
func hostTree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for path, content := range files {
		full := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		switch target, link := strings.CutPrefix(content, "->"); {
		case strings.HasSuffix(path, "/"):
			err = os.MkdirAll(full, 0o755)
		case link:
			err = os.Symlink(target, full)
		case content == "socket":
			closeSocket(t, serveSocket(t, full))
		default:
			err = os.WriteFile(full, []byte(content), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// serveSocket listens on a path of any length.
func serveSocket(t *testing.T, path string) *net.UnixListener {
	t.Helper()
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close() //nolint:errcheck // it was opened to be named
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	return l
}

func closeSocket(t *testing.T, l *net.UnixListener) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// treeOf lists what is below a folder; folders end with "/".
func treeOf(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		name := strings.TrimPrefix(path, root)
		if e.IsDir() {
			name += "/"
		}
		out = append(out, name)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestUninstallRemovesWhatIsOursAlone(t *testing.T) {
	const plugins = "var/lib/kubelet/device-plugins/"
	tests := map[string]struct {
		files map[string]string
		set   func(*Leftovers)
		// left and removed are what there is afterwards, and what was printed as
		// removed.
		left, removed []string
		// told are other lines that were printed.
		told []string
	}{
		"a host that the daemon ran on": {
			files: map[string]string{
				plugins + "kubelet.sock": "socket", plugins + "enflame-gcu-memory.sock": "socket", plugins + "kubelet_internal_state": "{}",
				"var/lib/divvy/divvy-node.lock": "", "var/lib/divvy/divvy-node.sock": "",
				"var/lib/divvy/units-enflame.com_gcu-memory.json": "{}",
				"var/lib/divvy/slots-nvidia.com_gpu.json":         "{}", "var/lib/divvy/units-x.y_z.json.damaged": "{",
				"var/lib/divvy/slots-x.y_z.json.123": "", "var/lib/divvy/slots-x.y_z.json.new": "",
				"var/run": "->/run", "run/cdi/divvy-nvidia.com-gpu.yaml": spec("nvidia.com/gpu"), "run/other/": "",
				"var/lib/other": "", "var/log/other": "",
				"var/log/topscloud/gcushare/gcushare-device-plugin.log": "line",
			},
			left: []string{
				"/run/", "/run/other/", "/var/", "/var/lib/", "/var/lib/kubelet/", "/var/lib/kubelet/device-plugins/",
				"/var/lib/kubelet/device-plugins/kubelet.sock", "/var/lib/kubelet/device-plugins/kubelet_internal_state", "/var/lib/other",
				"/var/log/", "/var/log/other", "/var/log/topscloud/", "/var/log/topscloud/gcushare/",
				"/var/log/topscloud/gcushare/gcushare-device-plugin.log", "/var/run",
			},
			removed: []string{
				"/var/lib/kubelet/device-plugins/enflame-gcu-memory.sock", "/var/run/cdi/divvy-nvidia.com-gpu.yaml", "/var/run/cdi",
				"/var/lib/divvy/divvy-node.lock", "/var/lib/divvy/divvy-node.sock", "/var/lib/divvy/slots-nvidia.com_gpu.json",
				"/var/lib/divvy/slots-x.y_z.json.123",
				"/var/lib/divvy/slots-x.y_z.json.new", "/var/lib/divvy/units-enflame.com_gcu-memory.json",
				"/var/lib/divvy/units-x.y_z.json.damaged", "/var/lib/divvy",
			},
		},
		"the drivers of claims": {
			files: map[string]string{
				"var/lib/divvy/claims.json":                                    "{}",
				"var/lib/kubelet/plugins/enflame.divvy.dev/dra.sock":           "socket",
				"var/lib/kubelet/plugins/enflame.divvy.dev/dra-next.sock":      "socket",
				"var/lib/kubelet/plugins/nvidia.divvy.dev/mine":                "",
				"var/lib/kubelet/plugins/gpu.nvidia.com/dra.sock":              "socket",
				"var/lib/kubelet/plugins_registry/enflame.divvy.dev-reg.sock":  "socket",
				"var/lib/kubelet/plugins_registry/iluvatar.divvy.dev-reg.sock": "a file",
				"var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock":     "socket",
				"var/run/cdi/divvy-claim-enflame-0f2d6c1a.json":                claimSpec("enflame.divvy.dev/claim"),
				"var/run/cdi/divvy-claim-acme-0f2d6c1a.json":                   claimSpec("acme.com/claim"),
			},
			left: []string{
				"/var/", "/var/lib/", "/var/lib/kubelet/", "/var/lib/kubelet/plugins/", "/var/lib/kubelet/plugins/gpu.nvidia.com/",
				"/var/lib/kubelet/plugins/gpu.nvidia.com/dra.sock", "/var/lib/kubelet/plugins/nvidia.divvy.dev/",
				"/var/lib/kubelet/plugins/nvidia.divvy.dev/mine", "/var/lib/kubelet/plugins_registry/",
				"/var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock",
				"/var/lib/kubelet/plugins_registry/iluvatar.divvy.dev-reg.sock",
				"/var/run/", "/var/run/cdi/", "/var/run/cdi/divvy-claim-acme-0f2d6c1a.json",
			},
			removed: []string{
				"/var/lib/kubelet/plugins_registry/enflame.divvy.dev-reg.sock", "/var/lib/kubelet/plugins/enflame.divvy.dev/dra.sock",
				"/var/lib/kubelet/plugins/enflame.divvy.dev/dra-next.sock", "/var/lib/kubelet/plugins/enflame.divvy.dev",
				"/var/run/cdi/divvy-claim-enflame-0f2d6c1a.json", "/var/lib/divvy/claims.json", "/var/lib/divvy",
			},
			told: []string{"left /var/run/cdi/divvy-claim-acme-0f2d6c1a.json: it has the name of a specification of divvy-node, and " +
				"another content"},
		},
		"the hook": {
			files: map[string]string{
				"var/lib/divvy/divvy-node.lock": "", "var/lib/divvy/hook/divvy-hook-0123456789abcdef": "",
				"var/lib/divvy/hook/divvy-hook-00000000000000ff.new": "", "var/lib/other": "",
			},
			left: []string{"/var/", "/var/lib/", "/var/lib/other"},
			removed: []string{"/var/lib/divvy/hook/divvy-hook-00000000000000ff.new", "/var/lib/divvy/hook/divvy-hook-0123456789abcdef",
				"/var/lib/divvy/hook", "/var/lib/divvy/divvy-node.lock", "/var/lib/divvy"},
		},
		"another file beside the hook": {
			files:   map[string]string{"var/lib/divvy/hook/x": "", "var/lib/divvy/hook/divvy-hook-0123456789abcdef": ""},
			left:    []string{"/var/", "/var/lib/", "/var/lib/divvy/", "/var/lib/divvy/hook/", "/var/lib/divvy/hook/x"},
			removed: []string{"/var/lib/divvy/hook/divvy-hook-0123456789abcdef"},
			told: []string{"left /var/lib/divvy/hook/x: it is no program of divvy-node",
				"left /var/lib/divvy/hook: it is no file of divvy-node"},
		},
		"log files too": {
			files: map[string]string{
				"var/log/other": "",
				"var/log/topscloud/gcushare/gcushare-device-plugin.log":                             "",
				"var/log/topscloud/gcushare/gcushare-device-plugin-2026-11-02T08-00-00.123.log":     "",
				"var/log/topscloud/gcushare/gcushare-scheduler-extender.log":                        "",
				"var/log/topscloud/gcushare/gcushare-config-manager-2026-11-02T08-00-00.123.log.gz": "",
			},
			set:  func(l *Leftovers) { l.RemoveLogs = true },
			left: []string{"/var/", "/var/log/", "/var/log/other"},
			removed: []string{
				"/var/log/topscloud/gcushare/gcushare-config-manager-2026-11-02T08-00-00.123.log.gz",
				"/var/log/topscloud/gcushare/gcushare-device-plugin-2026-11-02T08-00-00.123.log",
				"/var/log/topscloud/gcushare/gcushare-device-plugin.log",
				"/var/log/topscloud/gcushare/gcushare-scheduler-extender.log", "/var/log/topscloud/gcushare", "/var/log/topscloud",
			},
		},
		"files that are not ours": {
			files: map[string]string{
				"var/lib/divvy/notes.txt": "mine", "var/lib/divvy/divvy-node.lock": "", "var/lib/divvy/units-a.b_c.json/": "",
				"var/run/cdi/divvy-acme.yaml": spec("nvidia.com/gpu"), "var/run/cdi/nvidia.yaml": spec("nvidia.com/gpu"),
				"var/run/cdi/divvy-broken.yaml":       "{",
				"var/log/topscloud/gcushare/mine.log": "",
			},
			set: func(l *Leftovers) { l.RemoveLogs = true },
			left: []string{
				"/var/", "/var/lib/", "/var/lib/divvy/", "/var/lib/divvy/notes.txt", "/var/lib/divvy/units-a.b_c.json/",
				"/var/log/", "/var/log/topscloud/", "/var/log/topscloud/gcushare/", "/var/log/topscloud/gcushare/mine.log",
				"/var/run/", "/var/run/cdi/", "/var/run/cdi/divvy-acme.yaml", "/var/run/cdi/divvy-broken.yaml", "/var/run/cdi/nvidia.yaml",
			},
			removed: []string{"/var/lib/divvy/divvy-node.lock"},
			told: []string{
				"left /var/run/cdi/divvy-acme.yaml: it has the name of a specification of divvy-node, and another content",
				"left /var/run/cdi/divvy-broken.yaml: it has the name of a specification of divvy-node, and another content",
				"left /var/log/topscloud/gcushare/mine.log: it is no log file of Divvy",
				"left /var/lib/divvy/notes.txt: it is no file of divvy-node", "left /var/lib/divvy/units-a.b_c.json: it is a folder",
			},
		},
		"links are not followed": {
			files: map[string]string{
				"etc/secret.json": "keep", "var/lib/divvy/units-a.b_c.json": "->/etc/secret.json",
				"var/lib/divvy/slots-a.b_c.json": "->../../../etc/secret.json",
				"var/lib/keep":                   "", "etc/cdi/divvy-a.b-c.yaml": spec("a.b/c"),
				"var/run/cdi/divvy-a.b-c.yaml": "->/etc/cdi/divvy-a.b-c.yaml",
			},
			left: []string{
				"/etc/", "/etc/cdi/", "/etc/cdi/divvy-a.b-c.yaml", "/etc/secret.json", "/var/", "/var/lib/", "/var/lib/keep", "/var/run/",
				"/var/run/cdi/", "/var/run/cdi/divvy-a.b-c.yaml",
			},
			removed: []string{"/var/lib/divvy/slots-a.b_c.json", "/var/lib/divvy/units-a.b_c.json", "/var/lib/divvy"},
		},
		"a folder that is elsewhere by a link": {
			files: map[string]string{
				"data/divvy/units-a.b_c.json": "{}", "data/keep": "", "var/lib/divvy": "->/data/divvy", plugins + "a-c.sock": "socket",
			},
			left: []string{"/data/", "/data/divvy/", "/data/keep", "/var/", "/var/lib/", "/var/lib/divvy", "/var/lib/kubelet/",
				"/var/lib/kubelet/device-plugins/"},
			removed: []string{"/var/lib/kubelet/device-plugins/a-c.sock", "/var/lib/divvy/units-a.b_c.json"},
		},
		"sockets by all their names": {
			files: map[string]string{
				plugins + "enflame-gcu-memory.sock": "socket", plugins + "enflame-gcu-memory~2.sock": "socket",
				plugins + "enflame.com_gcu-memory.sock": "socket",
				plugins + "bitfusion.io":                "socket", plugins + "bitfusion.io~3.sock": "socket",
				plugins + "nvidia-gpu.sock": "socket", plugins + "enflame-gcu-memory~x.sock": "socket",
				plugins + "enflame-gcu-memory": "a file",
			},
			set: func(l *Leftovers) { l.Resources = []string{"enflame.com/gcu-memory"} },
			left: []string{
				"/var/", "/var/lib/", "/var/lib/kubelet/", "/var/lib/kubelet/device-plugins/",
				"/var/lib/kubelet/device-plugins/enflame-gcu-memory",
				"/var/lib/kubelet/device-plugins/enflame-gcu-memory~x.sock", "/var/lib/kubelet/device-plugins/nvidia-gpu.sock",
			},
			removed: []string{
				"/var/lib/kubelet/device-plugins/bitfusion.io", "/var/lib/kubelet/device-plugins/bitfusion.io~3.sock",
				"/var/lib/kubelet/device-plugins/enflame-gcu-memory.sock", "/var/lib/kubelet/device-plugins/enflame-gcu-memory~2.sock",
				"/var/lib/kubelet/device-plugins/enflame.com_gcu-memory.sock",
			},
		},
		"folders that were there before": {
			files: map[string]string{"var/lib/divvy/divvy-node.lock": "", "var/lib/keep": "", "var/run/cdi/": "",
				"run/nvidia/validations/": ""},
			set: func(l *Leftovers) {
				l.Shared = []string{"/run/nvidia/validations"}
				l.born = func(path string, _ *os.File) time.Time {
					if path == "/var/lib/divvy" {
						return installed
					}
					return installed.Add(-time.Hour)
				}
			},
			left: []string{"/run/", "/run/nvidia/", "/run/nvidia/validations/", "/var/", "/var/lib/", "/var/lib/keep", "/var/run/",
				"/var/run/cdi/"},
			removed: []string{"/var/lib/divvy/divvy-node.lock", "/var/lib/divvy"},
		},
		"a folder that kubelet made in one that was there before": {
			files: map[string]string{"var/lib/divvy/divvy-node.lock": "", "var/lib/keep": "", "run/keep": "",
				"run/nvidia/validations/": ""},
			set: func(l *Leftovers) {
				l.Shared = []string{"/run/nvidia/validations"}
				l.born = func(path string, _ *os.File) time.Time {
					if path == "/run/nvidia" {
						return installed.Add(-time.Hour)
					}
					return installed
				}
			},
			left:    []string{"/run/", "/run/keep", "/run/nvidia/", "/var/", "/var/lib/", "/var/lib/keep"},
			removed: []string{"/run/nvidia/validations", "/var/lib/divvy/divvy-node.lock", "/var/lib/divvy"},
		},
		"folders that kubelet made": {
			files: map[string]string{"var/lib/divvy/divvy-node.lock": "", "var/lib/keep": "", "run/keep": "",
				"run/nvidia/validations/": ""},
			set:     func(l *Leftovers) { l.Shared = []string{"/run/nvidia/validations"} },
			left:    []string{"/run/", "/run/keep", "/var/", "/var/lib/", "/var/lib/keep"},
			removed: []string{"/run/nvidia/validations", "/run/nvidia", "/var/lib/divvy/divvy-node.lock", "/var/lib/divvy"},
		},
		"folders whose age is not known": {
			files:   map[string]string{"var/lib/divvy/divvy-node.lock": "", "var/lib/keep": "", "var/run/cdi/": ""},
			set:     func(l *Leftovers) { l.born = func(string, *os.File) time.Time { return time.Time{} } },
			left:    []string{"/var/", "/var/lib/", "/var/lib/keep", "/var/run/", "/var/run/cdi/"},
			removed: []string{"/var/lib/divvy/divvy-node.lock", "/var/lib/divvy"},
		},
		"a host that never saw Divvy": {
			files: map[string]string{"var/lib/keep": "", "var/run/cdi/": ""},
			left:  []string{"/var/", "/var/lib/", "/var/lib/keep", "/var/run/", "/var/run/cdi/"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			l := Default()
			l.Host, l.born = hostTree(t, tc.files), bornThen
			if tc.set != nil {
				tc.set(&l)
			}
			var out bytes.Buffer
			if err := l.Clean(t.Context(), &out); err != nil {
				t.Fatal(err)
			}
			if diff := gocmp.Diff(tc.left, treeOf(t, l.Host)); diff != "" {
				t.Errorf("what is left (-want +got):\n%s", diff)
			}
			removed, told := lines(out.String())
			if diff := gocmp.Diff(tc.removed, removed); diff != "" {
				t.Errorf("what was removed (-want +got):\n%s", diff)
			}
			if diff := gocmp.Diff(tc.told, told); diff != "" {
				t.Errorf("what was said (-want +got):\n%s", diff)
			}
			out.Reset()
			if err := l.Clean(t.Context(), &out); err != nil {
				t.Fatalf("again: %v", err)
			}
			if removed, _ := lines(out.String()); len(removed) > 0 {
				t.Errorf("again: it removed %q", removed)
			}
		})
	}
}

// lines are the paths that were removed, and what else was said.
func lines(out string) (removed, told []string) {
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		if path, ok := strings.CutPrefix(line, "removed "); ok {
			removed = append(removed, path)
		} else {
			told = append(told, line)
		}
	}
	return removed, told
}

func TestUninstallLeavesASocketThatIsServed(t *testing.T) {
	const path = "/var/lib/kubelet/device-plugins/nvidia-gpu.sock"
	l := Default()
	l.Resources = []string{"nvidia.com/gpu"}
	l.Host = hostTree(t, map[string]string{"var/lib/kubelet/device-plugins/": ""})
	other := serveSocket(t, filepath.Join(l.Host, path))
	defer closeSocket(t, other)
	var out bytes.Buffer
	if err := l.Clean(t.Context(), &out); err != nil {
		t.Fatal(err)
	}
	if want := "left " + path + ": a program that is not divvy-node serves it\n"; out.String() != want {
		t.Errorf("said %q, want %q", out.String(), want)
	}
	if _, err := os.Lstat(filepath.Join(l.Host, path)); err != nil {
		t.Error(err)
	}
}

func TestUninstallKnowsTheAgeOfFolders(t *testing.T) {
	l := Default()
	l.Host = hostTree(t, map[string]string{"var/lib/divvy/divvy-node.lock": "", "var/lib/keep": "", "var/run/cdi/": "", "var/run/keep": ""})
	if err := l.Clean(t.Context(), &bytes.Buffer{}); err != nil {
		t.Fatal(err)
	}
	// The file system of the test may not know ages; then the folder stays.
	known := func() bool {
		f, err := l.open("/var/run")
		if err != nil {
			t.Fatal(err)
		}
		defer f.close()
		return !l.age(f).IsZero()
	}()
	_, err := os.Lstat(filepath.Join(l.Host, "var/run/cdi"))
	if gone := errors.Is(err, fs.ErrNotExist); gone != known {
		t.Errorf("the folder is gone: %v, ages are known: %v", gone, known)
	}
}

var (
	installed = time.Date(2026, 11, 2, 8, 0, 0, 0, time.UTC)
	// bornThen are the ages of a host on which kubelet made all folders.
	bornThen = func(string, *os.File) time.Time { return installed }
)

func TestUninstallWaitsForTheDaemon(t *testing.T) {
	o := Options{Leftovers: Default()}
	o.Host = hostTree(t, map[string]string{"var/lib/divvy/units-a.b_c.json": "{}", "var/lib/keep": ""})
	seat, err := handover.Open(filepath.Join(o.Host, o.StateDir), handover.Identity{})
	if err != nil {
		t.Fatal(err)
	}
	if held, err := seat.Take(); !held || err != nil {
		t.Fatal(held, err)
	}
	before := treeOf(t, o.Host)
	o.LockTimeout = time.Millisecond
	if err := Run(t.Context(), o, &bytes.Buffer{}); !errors.Is(err, handover.ErrTaken) ||
		!strings.Contains(err.Error(), "/var/lib/divvy/divvy-node.lock") {
		t.Errorf("while the daemon runs: %v", err)
	}
	if after := treeOf(t, o.Host); !slices.Equal(before, after) {
		t.Errorf("while the daemon runs, there was %q and is %q", before, after)
	}

	// One that stays is ready once the daemon has ended.
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o.Listen = l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out bytes.Buffer
	var running sync.WaitGroup
	var failed error
	running.Go(func() { failed = Run(ctx, o, &out) })
	waitStatus(t, "http://"+o.Listen+"/readyz", http.StatusServiceUnavailable)
	waitStatus(t, "http://"+o.Listen+"/healthz", http.StatusOK)
	seat.Close()
	waitStatus(t, "http://"+o.Listen+"/readyz", http.StatusOK)
	cancel()
	running.Wait()
	if failed != nil {
		t.Error(failed)
	}
	if want := []string{"/var/", "/var/lib/", "/var/lib/keep"}; !slices.Equal(treeOf(t, o.Host), want) {
		t.Errorf("left %q, want %q", treeOf(t, o.Host), want)
	}
	if !strings.Contains(out.String(), "not done: lock /var/lib/divvy/divvy-node.lock") ||
		!strings.HasSuffix(out.String(), "done: nothing of divvy-node is left on this host\n") {
		t.Errorf("printed %q", out.String())
	}
}

func waitStatus(t *testing.T, url string, want int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	for last := errors.New("not asked"); ; {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			t.Fatal(err)
		}
		response, err := http.DefaultClient.Do(request)
		if err == nil {
			if err := response.Body.Close(); err != nil {
				t.Fatal(err)
			}
			if response.StatusCode == want {
				return
			}
			err = errors.New(response.Status)
		}
		if ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: want status %d, last: %v", url, want, last)
		case <-time.After(10 * time.Millisecond):
		}
	}
}
