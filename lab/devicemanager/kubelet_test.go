package devicemanager

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	lab "github.com/divvy-gpu/divvy/lab/internal/kubelet"
)

// kubelet is a real one whose own failures end the test.
type kubelet struct {
	*lab.Kubelet
	t *testing.T
}

// server is the API server as kubelet uses it.
type server struct{ *apiServer }

func (s server) Pods() []*corev1.Pod                            { return s.all() }
func (s server) Update(uid types.UID, change func(*corev1.Pod)) { s.update(uid, change) }
func (s server) Remove(uid types.UID)                           { s.remove(uid) }

func newKubelet(t *testing.T, log klog.Logger, dir string, api *apiServer) *kubelet {
	t.Helper()
	k, err := lab.New(lab.Options{Log: log, Dir: dir, Node: thisNode, Server: server{api}})
	if err != nil {
		t.Fatal(err)
	}
	return &kubelet{Kubelet: k, t: t}
}

// boot starts the process up to the point at which its sockets answer; it
// knows no pods yet.
func (k *kubelet) boot() { k.t.Helper(); k.must(k.Boot()) }

// start is boot, then readd.
func (k *kubelet) start() { k.t.Helper(); k.must(k.Start()) }

// readd admits all pods that the API server shows and that have not ended.
func (k *kubelet) readd() { k.Readd() }

// stop ends the process.
func (k *kubelet) stop() {
	k.t.Helper()
	if err := k.Stop(); err != nil {
		k.t.Error(err)
	}
}

func (k *kubelet) must(err error) {
	k.t.Helper()
	if err != nil {
		k.t.Fatal(err)
	}
}

func (k *kubelet) add(pod *corev1.Pod) error { return k.Add(pod) }
func (k *kubelet) run(pod *corev1.Pod) error { return k.Run(pod) }
func (k *kubelet) finish(pod *corev1.Pod)    { k.Finish(pod) }
func (k *kubelet) remove(pod *corev1.Pod)    { k.Remove(pod) }

// env returns the environment that a started container got from its devices.
func (k *kubelet) env(uid types.UID, name string) map[string]string {
	if c := k.Container(uid, name); c != nil {
		return c.Env
	}
	return nil
}

// capacity is what the node's status shows of the resource: all units and the
// healthy ones.
func (k *kubelet) capacity() (capacity, allocatable int64) {
	return k.Capacity(corev1.ResourceName(gcuMemory))
}

// ids returns the units that kubelet keeps for a container, those of plain init
// containers too.
func (k *kubelet) ids(uid types.UID, name string) []string {
	return k.IDs(uid, name, corev1.ResourceName(gcuMemory))
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}
