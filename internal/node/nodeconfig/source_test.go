package nodeconfig

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

const thisNode = "node-1"

// soon is how long a change may take to be delivered; the machine may be busy. It
// is shorter than recheck, so that a change which nobody notices is not delivered
// after all.
const soon = recheck * 3 / 4

// calm is how long nothing must be delivered where nothing is to be: longer
// than a change takes on an idle machine.
const calm = quiet + 500*time.Millisecond

// follower runs a source and takes what it delivers.
type follower struct {
	t       *testing.T
	source  *Source
	updates chan Update
	ended   chan error
	client  *fake.Clientset
	// patience is how long a change may take to be delivered.
	patience time.Duration
}

func follow(t *testing.T, places Places, labels map[string]string) *follower {
	t.Helper()
	f := &follower{
		t: t, patience: soon, updates: make(chan Update, 100), ended: make(chan error, 1),
		client: kubetest.CopyWatched(fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode, Labels: labels}})),
	}
	source, err := NewSource(SourceOptions{Places: places, Vendors: vendors, Node: thisNode, Client: f.client,
		Resolve: func(_ context.Context, c config.NodeConfig, runtime string) config.NodeConfig {
			if runtime != "" {
				c.CDIDir = "/cdi/of/" + runtime
			}
			return c
		}})
	if err != nil {
		t.Fatal(err)
	}
	f.source = source
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.ended <- source.Run(ctx, func(u Update) { f.updates <- u })
	}()
	t.Cleanup(func() {
		stop()
		<-done
		if err := source.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

// next returns what is delivered next.
func (f *follower) next(what string) Update {
	f.t.Helper()
	select {
	case u := <-f.updates:
		return u
	case err := <-f.ended:
		f.t.Fatalf("%s: the source ended: %v", what, err)
	case <-time.After(f.patience):
		f.t.Fatalf("%s: nothing was delivered", what)
	}
	return Update{}
}

// level checks that a configuration with that log level is delivered next.
func (f *follower) level(what, want string) {
	f.t.Helper()
	if u := f.next(what); u.Err != nil || u.Config.LogLevel != want {
		f.t.Fatalf("%s: want log level %s, got %q and error %v", what, want, u.Config.LogLevel, u.Err)
	}
}

// refused checks that an error with all the texts is delivered next.
func (f *follower) refused(what string, texts ...string) {
	f.t.Helper()
	u := f.next(what)
	if u.Err == nil {
		f.t.Fatalf("%s: delivered %+v", what, u.Config)
	}
	hasAll(f.t, []string{u.Err.Error()}, texts...)
}

// nothing checks that there is calm.
func (f *follower) nothing(what string) {
	f.t.Helper()
	select {
	case u := <-f.updates:
		f.t.Fatalf("%s: delivered log level %q, error %v", what, u.Config.LogLevel, u.Err)
	case <-time.After(calm):
	}
}

// labels gives the node other labels.
func (f *follower) labels(labels map[string]string) {
	f.t.Helper()
	f.update(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode, Labels: labels}})
}

func (f *follower) update(node *corev1.Node) {
	f.t.Helper()
	// The fake does not tell a watch what happened before it began.
	for end := time.Now().Add(soon); ; time.Sleep(10 * time.Millisecond) {
		if slices.ContainsFunc(f.client.Actions(), func(a clienttesting.Action) bool { return a.GetVerb() == "watch" }) {
			break
		}
		if time.Now().After(end) {
			f.t.Fatal("the node is not watched")
		}
	}
	if _, err := f.client.CoreV1().Nodes().Update(f.t.Context(), node, metav1.UpdateOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

func level(l string) string { return head + "logLevel: " + l + "\n" }

func put(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestEditsOfAFileAreDelivered(t *testing.T) {
	t.Parallel()
	path := write(t, "node.yaml", level("info"))
	f := follow(t, Places{Files: []string{path}}, nil)
	f.level("at the start", "info")

	put(t, path, level("warn"))
	f.level("written in place", "warn")

	put(t, path+".new", level("error"))
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	f.level("replaced, as editors do", "error")

	put(t, path, "# a comment\n"+level("error"))
	f.nothing("an edit that means the same")

	put(t, path, level("loud"))
	f.refused("a bad edit", path, `logLevel: "loud" is not known`)
	put(t, path, level("loud")+"# still\n")
	f.nothing("the same mistake again")
	put(t, path, level("error"))
	f.nothing("mended to what is in use")

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	f.refused("removed", "no such file")
	put(t, path, level("debug"))
	f.level("there again", "debug")
}

func TestReloadReadsAndTellsAgain(t *testing.T) {
	t.Parallel()
	path := write(t, "node.yaml", level("info"))
	f := follow(t, Places{Files: []string{path}}, nil)
	f.level("at the start", "info")
	f.source.Reload()
	if u := f.next("nothing changed"); u.Err != nil || !u.Asked || u.Config.LogLevel != "info" {
		t.Errorf("asked to read the same: %+v", u)
	}
	put(t, path, "colour: blue\n")
	f.refused("a bad edit", `unknown key "colour"`)
	f.source.Reload()
	f.refused("asked to read the same again", `unknown key "colour"`)
}

// mount makes a folder as kubelet mounts a ConfigMap: files are links into the
// folder that the link ..data leads to.
func mount(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	swap(t, dir, files)
	for name := range files {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// swap changes the content of a mount in one step.
func swap(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	data, err := os.MkdirTemp(dir, "..2026_") //nolint:usetesting // inside of the mount
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		put(t, filepath.Join(data, name), content)
	}
	if err := errors.Join(os.Symlink(filepath.Base(data), filepath.Join(dir, "..data_tmp")), os.Rename(filepath.Join(dir, "..data_tmp"),
		filepath.Join(dir, "..data"))); err != nil {
		t.Fatal(err)
	}
}

// Defect 17 of NVIDIA's device plugin: its config manager did not notice edits
// of the ConfigMap.
func TestAChangedConfigMapIsDelivered(t *testing.T) {
	t.Parallel()
	dir := mount(t, map[string]string{"config.yaml": level("info")})
	f := follow(t, Places{Files: []string{filepath.Join(dir, "config.yaml")}}, nil)
	f.level("at the start", "info")
	swap(t, dir, map[string]string{"config.yaml": level("warn")})
	f.level("swapped", "warn")
	swap(t, dir, map[string]string{"config.yaml": level("debug")})
	f.level("swapped again", "debug")

	dir = mount(t, map[string]string{"default": level("info"), "a100": level("warn")})
	f = follow(t, Places{Dir: dir}, map[string]string{"divvy.dev/config": "a100"})
	f.level("at the start", "warn")
	swap(t, dir, map[string]string{"default": level("error"), "a100": level("warn")})
	f.nothing("another node's configuration changed")
	swap(t, dir, map[string]string{"default": level("error"), "a100": level("debug")})
	f.level("swapped", "debug")
}

func TestTheLabelOfTheNodeChooses(t *testing.T) {
	t.Parallel()
	dir := mount(t, map[string]string{"default": level("info"), "ours": level("warn"), "theirs": level("debug")})
	f := follow(t, Places{Dir: dir}, nil)
	f.level("without a label", "info")
	f.labels(map[string]string{"nvidia.com/device-plugin.config": "theirs"})
	f.level("NVIDIA's label", "debug")
	f.labels(map[string]string{"nvidia.com/device-plugin.config": "theirs", "divvy.dev/config": "ours"})
	f.level("both labels", "warn")
	f.labels(map[string]string{"divvy.dev/config": "ours", "other": "label"})
	f.nothing("another label")
	f.labels(nil)
	f.level("label removed", "info")
}

// What a container runtime does by itself depends on its version, which only the node tells.
func TestTheRuntimeOfTheNodeIsKnown(t *testing.T) {
	t.Parallel()
	f := follow(t, Places{Dir: mount(t, map[string]string{"default": level("info")})}, nil)
	f.level("no runtime", "info")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: thisNode}}
	node.Status.NodeInfo.ContainerRuntimeVersion = "containerd://2.1.4"
	f.update(node)
	if u := f.next("another runtime"); u.Config.CDIDir != "/cdi/of/containerd://2.1.4" {
		t.Errorf("resolved to %q, error %v", u.Config.CDIDir, u.Err)
	}
}

// Defect 17 of NVIDIA's device plugin: an unknown value of the label ended its
// config manager, and the error named the empty label instead of the default.
func TestAnUnknownNameKeepsTheLastGoodConfiguration(t *testing.T) {
	t.Parallel()
	dir := mount(t, map[string]string{"default": level("info"), "ours": level("warn")})
	f := follow(t, Places{Dir: dir}, map[string]string{"divvy.dev/config": "ours"})
	f.level("at the start", "warn")
	f.labels(map[string]string{"divvy.dev/config": "nobodys"})
	f.refused("unknown", "label divvy.dev/config", `no configuration "nobodys"`, "there are: default, ours")
	f.labels(map[string]string{"divvy.dev/config": "..data"})
	f.refused("not a name", `no configuration "..data"`)
	f.labels(map[string]string{"divvy.dev/config": "ours"})
	f.nothing("back to the one in use")
	swap(t, dir, map[string]string{"default": level("info")})
	f.refused("its file is gone", `no configuration "ours"`)
	f.labels(nil)
	f.level("without label", "info")
	swap(t, dir, map[string]string{"other": level("debug")})
	f.refused("the default is gone", `no configuration "default"`, "there are: none")
}

func TestAnUnknownNameAtTheStartGetsTheDefault(t *testing.T) {
	t.Parallel()
	dir := mount(t, map[string]string{"default": level("info")})
	f := follow(t, Places{Dir: dir}, map[string]string{"divvy.dev/config": "nobodys"})
	u := f.next("at the start")
	if u.Err != nil || u.Config.LogLevel != "info" {
		t.Fatalf("%+v", u)
	}
	hasAll(t, u.Warnings, `no configuration "nobodys"`, "that of nodes without a label is used")
	f.nothing("the label is still unknown")
	f.source.Reload()
	f.refused("asked again", `no configuration "nobodys"`)
}

func TestNamedConfigurationsGoOverTheFiles(t *testing.T) {
	t.Parallel()
	base := write(t, "base.yaml", head+"stateDir: /base\nlogLevel: debug\n")
	dir := mount(t, map[string]string{"default": fourSlices, "loud": level("error")})
	f := follow(t, Places{Files: []string{base}, Dir: dir}, nil)
	u := f.next("at the start")
	if u.Config.StateDir != "/base" || u.Config.LogLevel != "debug" || u.Config.Resources[0].Replicas != 4 {
		t.Errorf("%+v", u.Config)
	}
	f.labels(map[string]string{"divvy.dev/config": "loud"})
	u = f.next("another")
	if u.Config.StateDir != "/base" || u.Config.LogLevel != "error" || u.Config.Resources[0].Vendor != "enflame" {
		t.Errorf("%+v", u.Config)
	}
}

// The administrator of a few special nodes need not write a configuration for all
// the others.
func TestWithoutADefaultTheFilesAloneHold(t *testing.T) {
	t.Parallel()
	base := write(t, "base.yaml", head+"stateDir: /base\nlogLevel: debug\n")
	dir := mount(t, map[string]string{"loud": level("error")})
	f := follow(t, Places{Files: []string{base}, Dir: dir}, nil)
	if u := f.next("at the start"); u.Config.StateDir != "/base" || u.Config.LogLevel != "debug" {
		t.Errorf("%+v", u)
	}
	f.labels(map[string]string{"divvy.dev/config": "loud"})
	f.level("chosen", "error")
	f.labels(nil)
	f.level("without label", "debug")
}

func TestWithoutAnyGoodConfigurationTheSourceEnds(t *testing.T) {
	t.Parallel()
	tests := map[string]struct {
		places Places
		want   string
	}{
		"no file":     {Places{Files: []string{"/nowhere/node.yaml"}}, "/nowhere/node.yaml"},
		"mistakes":    {Places{Files: []string{write(t, "node.yaml", level("loud"))}}, `logLevel: "loud"`},
		"no default":  {Places{Dir: mount(t, map[string]string{"ours": level("info")})}, `no configuration "default"`},
		"no folder":   {Places{Dir: "/nowhere"}, `no configuration "default" in /nowhere`},
		"bad default": {Places{Dir: mount(t, map[string]string{"default": "colour: blue"})}, `unknown key "colour"`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			f := follow(t, tt.places, nil)
			select {
			case err := <-f.ended:
				f.ended <- err
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("want %q, got %v", tt.want, err)
				}
			case u := <-f.updates:
				t.Errorf("delivered %+v", u)
			case <-time.After(soon):
				t.Error("it waits")
			}
		})
	}
}

// Defect 20 of the IX device plugin: errors of the file watch were not looked at.
func TestLostEventsAreMadeUpFor(t *testing.T) {
	t.Parallel()
	path := write(t, "node.yaml", level("info"))
	f := follow(t, Places{Files: []string{path}}, nil)
	f.level("at the start", "info")
	if err := f.source.events.Remove(filepath.Dir(path)); err != nil {
		t.Fatal(err)
	}
	put(t, path, level("warn"))
	f.source.events.Errors <- fsnotify.ErrEventOverflow
	f.level("after the watch said that it lost events", "warn")
	put(t, path, level("error"))
	f.level("watched again", "error")
}

func TestAFolderThatComesLaterIsWatched(t *testing.T) {
	t.Parallel()
	parent := t.TempDir()
	dir := filepath.Join(parent, "config")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "node.yaml")
	put(t, path, level("info"))
	f := follow(t, Places{Files: []string{path}}, nil)
	f.level("at the start", "info")
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	f.refused("the folder is gone", "no such file")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	put(t, path, level("warn"))
	f.patience = 2 * recheck // nothing tells that a folder is there
	f.level("the folder is back", "warn")
	f.patience = soon
	put(t, path, level("error"))
	f.level("and edited", "error")
}
