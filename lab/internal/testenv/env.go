// Package testenv is the lab with Divvy installed, as the demo, the soak and the
// end-to-end tests use it: brought up and put back as it was, with the pods,
// commands and restarts that they have in common.
package testenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/build"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/hardware"
	"github.com/divvy-gpu/divvy/lab/internal/host"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// Guide is the topology of the user guide: 8 cards of 16 GB.
const Guide = "gcu-8x16.ini"

// startTimeout is how long Divvy may take to be ready after it was installed.
const startTimeout = 2 * time.Minute

// Options say what SetUp brings about. They are those of product.Options, but for paths.
type Options struct {
	// Topology is the name of a file in lab/topologies, and Values are names of files in
	// lab/values, which go over the lab's own.
	Topology string
	// MemoryUnit is the size of a unit in GB.
	MemoryUnit string
	// Values are names of files in lab/values, which go over the lab's own.
	Values []string
	// Label is the label that the daemon needs on the node, product.NodeLabel
	// when empty.
	Label string
	// Unlabelled leaves the node without it: no daemon runs after SetUp.
	Unlabelled bool
	// Namespace is for the pods of the caller; it is emptied first.
	Namespace string
	// Set holds more values of the chart, as helm's --set takes them.
	Set []string
	// Bare leaves Divvy out: SetUp brings up a lab without it, for Install.
	Bare bool
	// Undo takes a lab down again that SetUp itself brought up, when SetUp
	// fails.
	Undo bool
	// Out receives the progress.
	Out io.Writer
}

// Env is a lab with Divvy installed. It is safe for concurrent use, but not for
// two calls that restart or configure the same thing at once.
type Env struct {
	Cluster *cluster.Cluster
	Client  kubernetes.Interface
	CLI     CLI
	// Pods are those of the namespace of the caller.
	Pods  Pods
	Node  Node
	Divvy Divvy
	Pool  Pool

	unlock func() error
	stop   context.CancelFunc // of what runs beside
	before found
}

// found is what SetUp met, to be put back.
type found struct {
	up        bool
	installed bool
	topology  []byte // of the simulated cards
	values    []byte // of the release
	pool      bool   // the stand-in for the pool's servers
}

// SetUp brings the lab up and Divvy on it, with all of the checkout's present
// state, and keeps other commands of the lab waiting until Close.
func SetUp(ctx context.Context, o Options) (s *Env, err error) {
	if err := host.RequireRoot(os.Geteuid(), "this"); err != nil {
		return nil, err
	}
	unlock, err := cluster.Lock(ctx, o.Out)
	if err != nil {
		return nil, err
	}
	s = &Env{Pods: Pods{Namespace: o.Namespace}, unlock: unlock}
	brought := false
	hastening, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err == nil {
			return
		}
		stop()
		if brought && o.Undo {
			err = errors.Join(err, cluster.Down(context.WithoutCancel(ctx), o.Out))
		}
		err = errors.Join(err, unlock())
	}()
	if s.CLI.Repository, err = layout.RepositoryDir(); err != nil {
		return nil, err
	}
	if c, err := cluster.Open(); err == nil {
		s.before.up = true
		if err := s.adopt(c); err != nil {
			return nil, err
		}
	} else if !errors.Is(err, cluster.ErrDown) {
		return nil, err
	}
	brought = !s.before.up
	if err := s.bringUp(ctx, o.Out); err != nil {
		return nil, err
	}
	s.stop = stop
	go cluster.HastenScheduler(hastening, s.Client)
	if s.before.up {
		if err := s.remember(ctx); err != nil {
			return nil, err
		}
		if err := s.refuseWhereUsed(ctx); err != nil {
			return nil, err
		}
	}
	if o.Bare {
		if s.before.installed {
			return nil, errors.New("the lab must not have Divvy installed; take it down first (make lab-down)")
		}
		err = s.Pods.EnsureNamespace(ctx)
	} else {
		err = s.Install(ctx, o)
	}
	if err != nil {
		return nil, err
	}
	return s, nil
}

// FoundDivvy reports whether SetUp met a lab that Divvy was installed in.
func (s *Env) FoundDivvy() bool { return s.before.installed }

// FoundLab reports whether SetUp met a lab.
func (s *Env) FoundLab() bool { return s.before.up }

func (s *Env) adopt(c *cluster.Cluster) (err error) {
	s.Cluster, s.CLI.Cluster = c, c
	if s.Client, err = cluster.Client(); err != nil {
		return err
	}
	s.Pods = newPods(s.Client, &s.CLI, s.Pods.Namespace)
	s.Node = Node{client: s.Client, name: layout.NodeName}
	s.Divvy = Divvy{client: s.Client, cli: &s.CLI, node: &s.Node, values: s.Divvy.values}
	s.Pool = Pool{client: s.Client, node: &s.Node}
	return nil
}

// BuildPrograms makes sure that everything the lab runs is built, and returns the
// folder of the lab's module and that of the programs.
func BuildPrograms(ctx context.Context, out io.Writer) (labDir, binDir string, err error) {
	if labDir, err = layout.LabDir(); err != nil {
		return "", "", err
	}
	report := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
	if err := host.InstallPackages(ctx, host.Packages(), report); err != nil {
		return "", "", err
	}
	cache, err := layout.CacheDir()
	if err != nil {
		return "", "", err
	}
	builder := &build.Builder{Dir: labDir, CacheDir: cache, Components: build.Components(), Out: out}
	binDir, err = builder.Run(ctx)
	return labDir, binDir, err
}

// bringUp does what `lab up` does: nothing where all is up.
func (s *Env) bringUp(ctx context.Context, out io.Writer) error {
	labDir, binDir, err := BuildPrograms(ctx, out)
	if err != nil {
		return err
	}
	c, err := cluster.Up(ctx, cluster.UpOptions{LabDir: labDir, BinDir: binDir, Out: out})
	if err != nil {
		return err
	}
	return s.adopt(c)
}

// Install does what `lab install` does, and waits until Divvy is at work. Of the
// options it needs neither Bare nor Undo.
func (s *Env) Install(ctx context.Context, o Options) error {
	err := product.Install(ctx, s.productOptions(o))
	if err != nil {
		return err
	}
	values, err := s.CLI.Helm(ctx, "get", "values", product.Release, "--namespace", product.Namespace, "--output", "yaml")
	if err != nil {
		return err
	}
	s.Divvy.values = values
	if o.Unlabelled {
		return s.Pods.EnsureNamespace(ctx)
	}
	// Cards of another topology that an earlier daemon offered would be shown
	// as lost ones by the same process.
	if s.before.installed {
		if err := s.Divvy.DeletePods(ctx, NodeDaemon); err != nil {
			return err
		}
	}
	if err := s.Divvy.Wait(ctx, startTimeout); err != nil {
		return err
	}
	return s.Pods.EnsureNamespace(ctx)
}

// Prepare does what Install does before the images and the chart.
func (s *Env) Prepare(ctx context.Context, o Options) error {
	return product.Prepare(ctx, s.productOptions(o))
}

func (s *Env) productOptions(o Options) product.Options {
	return product.Options{
		Cluster:       s.Cluster,
		RepositoryDir: s.CLI.Repository,
		Topology:      s.topologyPath(o.Topology),
		MemoryUnit:    o.MemoryUnit,
		Values:        s.CLI.valuesPaths(o.Values),
		Label:         o.Label,
		Unlabelled:    o.Unlabelled,
		Set:           append([]string{"node.injection=deviceNodes"}, o.Set...),
		Out:           o.Out,
	}
}

func (s *Env) topologyPath(name string) string {
	return filepath.Join(s.CLI.Repository, "lab", "topologies", name)
}

// Topology returns the text of a file in lab/topologies.
func (s *Env) Topology(name string) (string, error) {
	data, err := os.ReadFile(s.topologyPath(name))
	if err != nil {
		return "", fmt.Errorf("read a topology: %w", err)
	}
	return string(data), nil
}

// SetCards changes the simulated cards under the running programs.
func (s *Env) SetCards(ctx context.Context, topology string) error {
	return hardware.Default.SetTopology(ctx, []byte(topology))
}

func (s *Env) remember(ctx context.Context) error {
	if err := s.Pods.EmptyNamespace(ctx); err != nil {
		return err
	}
	var err error
	if s.before.pool, err = product.HasPool(ctx, s.Client); err != nil {
		return err
	}
	releases, err := s.CLI.Helm(ctx, "list", "--namespace", product.Namespace, "--short", "--filter", "^"+product.Release+"$")
	if err != nil || releases == "" {
		return err
	}
	s.before.installed = true
	values, err := s.CLI.Helm(ctx, "get", "values", product.Release, "--namespace", product.Namespace, "--output", "yaml")
	if err != nil {
		return err
	}
	s.before.values = []byte(values)
	s.before.topology, err = os.ReadFile(hardware.Default.TopologyPath())
	if err != nil {
		return fmt.Errorf("read the topology in use: %w", err)
	}
	return nil
}

// refuseWhereUsed keeps from changing cards under somebody's pods.
func (s *Env) refuseWhereUsed(ctx context.Context) error {
	pods, err := s.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	var users []string
	for i := range pods.Items {
		if pod := &pods.Items[i]; !Ended(pod) && usesCards(pod) {
			users = append(users, pod.Namespace+"/"+pod.Name)
		}
	}
	if len(users) > 0 {
		return fmt.Errorf("these pods in the lab use cards, and what is to come changes them: delete the pods first: %s",
			strings.Join(users, ", "))
	}
	return nil
}

// Restore puts the lab back as SetUp met it.
func (s *Env) Restore(ctx context.Context, out io.Writer) error {
	if !s.before.up {
		return cluster.Down(ctx, out)
	}
	if err := s.Pods.RemoveNamespace(ctx); err != nil {
		return err
	}
	if err := s.Node.Label(ctx, ConfigLabel, ""); err != nil {
		return err
	}
	if !s.before.pool {
		if err := product.RemovePool(ctx); err != nil {
			return err
		}
	}
	if !s.before.installed {
		fmt.Fprintln(out, "Removing Divvy from the lab, where it was not before.")
		return s.Remove(ctx)
	}
	fmt.Fprintln(out, "Putting Divvy in the lab back to the settings that it had.")
	if err := s.SetCards(ctx, string(s.before.topology)); err != nil {
		return err
	}
	if err := s.Divvy.resetValues(ctx, string(s.before.values)); err != nil {
		return err
	}
	if err := s.Divvy.DeletePods(ctx, NodeDaemon); err != nil {
		return err
	}
	_, err := s.Client.AppsV1().DaemonSets(product.Namespace).Get(ctx, NodeDaemon, metav1.GetOptions{})
	if apierrors.IsNotFound(err) { // it shared no cards
		return nil
	}
	return s.Divvy.Wait(ctx, startTimeout)
}

// Remove takes Divvy out of the lab in a short way, and the simulated cards: it
// does not wait for kubelet, so that the node keeps entries in its status. It may
// be called where Divvy is not installed.
func (s *Env) Remove(ctx context.Context) error {
	_, err := s.CLI.Helm(ctx, "uninstall", product.Release, "--namespace", product.Namespace, "--ignore-not-found", "--wait", "--no-hooks")
	if err != nil {
		return errors.Join(err, hardware.Default.Remove())
	}
	return errors.Join(product.Unwire(ctx, s.Cluster), hardware.Default.Remove(), s.Node.forget(ctx))
}

// Close lets other commands of the lab go on.
func (s *Env) Close() error {
	s.stop()
	return s.unlock()
}

// In returns the lab with another namespace for pods. Both are the same lab; do
// not close them twice.
func (s *Env) In(namespace string) *Env {
	other := *s
	other.Pods = newPods(s.Client, &s.CLI, namespace)
	return &other
}

// ReleaseDevices releases all devices of the node from quarantine.
func (s *Env) ReleaseDevices(ctx context.Context) error {
	node, err := s.Node.Get(ctx)
	if err != nil {
		return err
	}
	q, err := wire.DecodeQuarantine(node.Annotations[wire.QuarantineAnnotation])
	if err != nil || len(q.Devices) == 0 {
		return err
	}
	args := []string{"divvy", "device", "release", node.Name}
	for _, d := range q.Devices {
		args = append(args, string(d.Device))
	}
	_, err = s.CLI.Kubectl(ctx, args...)
	return err
}

// Cards returns a topology of lab/topologies, to be changed and set.
func (s *Env) Cards(name string) (vendorsim.Topology, error) {
	text, err := s.Topology(name)
	if err != nil {
		return vendorsim.Topology{}, err
	}
	topology, err := vendorsim.Parse(name, []byte(text))
	if err != nil {
		return vendorsim.Topology{}, fmt.Errorf("topology: %w", err)
	}
	return topology, nil
}

// SetHardware changes the simulated cards under the running programs.
func (s *Env) SetHardware(ctx context.Context, topology vendorsim.Topology) error {
	text, err := topology.Encode()
	if err != nil {
		return err
	}
	return s.SetCards(ctx, string(text))
}

// Restart is one way to disturb the cluster. Do returns once everything says
// that it is ready again.
type Restart struct {
	Name string
	Do   func(context.Context) error
}

// Restarts are all ways in which a part of the cluster is restarted.
func (s *Env) Restarts() []Restart {
	part := func(verb, part string, end func(context.Context, string) error) Restart {
		return Restart{Name: part + " " + verb, Do: func(ctx context.Context) error {
			if err := end(ctx, part); err != nil {
				return err
			}
			return s.Divvy.Wait(ctx, restartTimeout)
		}}
	}
	return []Restart{
		s.restart("restarted", cluster.Kubelet, (*cluster.Cluster).Stop),
		s.restart("killed", cluster.Kubelet, (*cluster.Cluster).Kill),
		part("deleted", NodeDaemon, s.Divvy.DeletePods),
		part("killed", NodeDaemon, s.Divvy.Kill),
		{Name: NodeDaemon + " rolled", Do: func(ctx context.Context) error { return s.Divvy.Roll(ctx, restartTimeout) }},
		part("deleted", Extender, s.Divvy.DeletePods),
		part("killed", Extender, s.Divvy.Kill),
		part("deleted", Schedconf, s.Divvy.DeletePods),
		s.restart("killed", cluster.Scheduler, (*cluster.Cluster).Kill),
		s.restart("restarted", cluster.APIServer, (*cluster.Cluster).Stop),
		s.restart("killed", cluster.APIServer, (*cluster.Cluster).Kill),
	}
}

// ControllerManagerKilled restarts what creates the claims of templates, and takes devices back from
// claims that no pod uses. Pods without claims do not depend on it.
func (s *Env) ControllerManagerKilled() Restart {
	return s.restart("killed", cluster.ControllerManager, (*cluster.Cluster).Kill)
}

// restart ends a component, starts it, and waits until Divvy is at work.
func (s *Env) restart(verb string, c cluster.Component, end func(*cluster.Cluster, context.Context, cluster.Component) error) Restart {
	return Restart{Name: string(c) + " " + verb, Do: func(ctx context.Context) error {
		if err := s.startControllers(ctx); err != nil {
			return err
		}
		if err := end(s.Cluster, ctx, c); err != nil {
			return err
		}
		return errors.Join(s.Cluster.Start(ctx, c), s.startControllers(ctx), s.Divvy.Wait(ctx, restartTimeout))
	}}
}

// startControllers starts kube-controller-manager where it does not run, as kubelet would: one that
// starts while the API server does ends with an error.
func (s *Env) startControllers(ctx context.Context) error {
	if _, runs := s.Cluster.Running(cluster.ControllerManager); runs {
		return nil
	}
	return s.Cluster.Start(ctx, cluster.ControllerManager)
}
