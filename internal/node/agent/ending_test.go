package agent

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	kubetesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
)

const (
	goneUID  = "0a1b2c3d-0000-4000-8000-000000000001"
	otherUID = "0a1b2c3d-0000-4000-8000-000000000002"
)

// put writes files below root, with their folders.
func put(t *testing.T, root string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			t.Fatal(err)
		}
		writeFile(t, path, text)
	}
}

// endingStage is an agent's world with a pod that runs.
func endingStage(t *testing.T) (s *stage, pod *corev1.Pod, processes func(string)) {
	t.Helper()
	s = newStage(t)
	s.config.DriverRoot = t.TempDir()
	processes = func(n string) {
		put(t, s.config.DriverRoot, map[string]string{
			"sys/fs/cgroup/cgroup.controllers": "", "sys/fs/cgroup/kubepods/pod" + goneUID + "/cgroup.events": "populated " + n + "\n",
		})
	}
	processes("1")
	signer, err := wire.NewSigner([]byte("0123456789abcdef0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	grant, err := signer.EncodeGrant(goneUID, accel.Grant{Resource: "nvidia.com/gpu-memory", Node: thisNode, Device: "a", DeviceUnits: 16,
		Units: 8, At: time.Unix(1, 0)})
	if err != nil {
		t.Fatal(err)
	}
	amount := corev1.ResourceList{"nvidia.com/gpu-memory": *resource.NewQuantity(8, resource.DecimalSI)}
	c := corev1.Container{Name: "main", Resources: corev1.ResourceRequirements{Requests: amount, Limits: amount}}
	pod = &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", UID: goneUID,
			Annotations: map[string]string{wire.GrantAnnotation: grant}},
		Spec: corev1.PodSpec{NodeName: thisNode, Containers: []corev1.Container{c}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{
			Name: "main", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}},
		}}},
	}
	if _, err := s.client.CoreV1().Pods("team").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return s, pod, processes
}

// listed are the pods on the node's annotation, and how often it was changed. The
// watch may deliver a change only after the agent's next turn, which then writes the
// same once more: that changes nothing.
func (s *stage) listed() (uids []string, changes int) {
	s.t.Helper()
	node, err := s.client.CoreV1().Nodes().Get(s.t.Context(), thisNode, metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	all, err := wire.DecodeEnding(node.Annotations[wire.EndingAnnotation])
	if err != nil {
		s.t.Fatal(err)
	}
	for _, one := range all {
		uids = append(uids, one.Pod.UID)
	}
	before := ""
	for _, action := range s.client.Actions() {
		patch, ok := action.(kubetesting.PatchAction)
		if !ok || !strings.Contains(string(patch.GetPatch()), wire.EndingAnnotation) {
			continue
		}
		if now := string(patch.GetPatch()); now != before {
			changes++
			before = now
		}
	}
	return uids, changes
}

// playUntilSeen plays an agent until it has seen the pods.
func (s *stage) playUntilSeen() (*Agent, func()) {
	a, stop := s.play()
	round := 0
	seen := map[string]bool{}
	eventually(s.t, "changes of pods are seen", func() bool { // after its list the reflector takes a moment to watch
		pods, err := s.client.CoreV1().Pods("").List(s.t.Context(), metav1.ListOptions{})
		if err != nil {
			s.t.Fatal(err)
		}
		for _, pod := range pods.Items {
			round++
			pod.Labels = map[string]string{"round": strconv.Itoa(round)}
			if _, err := s.client.CoreV1().Pods(pod.Namespace).Update(s.t.Context(), &pod, metav1.UpdateOptions{}); err != nil {
				s.t.Fatal(err)
			}
		}
		cached := a.pods.Cached()
		if len(cached) > 0 && cached[0].Labels["round"] != "" {
			seen[cached[0].Labels["round"]] = true // the first may be of the list, the second is of the watch
		}
		return len(pods.Items) == 0 && a.pods.Synced() || len(seen) > 1
	})
	eventually(s.t, "the node is seen", func() bool { _, err := a.publisher.current(); return err == nil })
	return a, stop
}

func (s *stage) delete(pod *corev1.Pod) {
	s.t.Helper()
	if err := s.client.CoreV1().Pods(pod.Namespace).Delete(s.t.Context(), pod.Name, metav1.DeleteOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// TestPodsGoneBeforeTheirContainers are listed until these have ended, also by a
// daemon that starts meanwhile.
func TestPodsGoneBeforeTheirContainers(t *testing.T) {
	s, pod, processes := endingStage(t)
	a, stop := s.playUntilSeen()
	s.delete(pod)
	eventually(t, "the pod is listed", func() bool { uids, _ := s.listed(); return len(uids) == 1 && uids[0] == goneUID })
	node, err := s.client.CoreV1().Nodes().Get(t.Context(), thisNode, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	all, err := wire.DecodeEnding(node.Annotations[wire.EndingAnnotation])
	if err != nil {
		t.Fatal(err)
	}
	want := []wire.Ending{{
		Pod:      accel.PodRef{UID: goneUID, Namespace: "team", Name: "p"},
		Resource: "nvidia.com/gpu-memory", Units: 8, Devices: []accel.DeviceID{"a"},
	}}
	if diff := cmp.Diff(want, all); diff != "" {
		t.Errorf("listed (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]accel.DeviceID{"a"}, a.endings.held()["nvidia.com/gpu-memory"]); diff != "" {
		t.Errorf("devices that other resources do not offer (-want +got):\n%s", diff)
	}
	stop()
	_, stop = s.playUntilSeen()
	defer stop()
	time.Sleep(2 * endingInterval) // it looks, and finds that the containers run
	if uids, _ := s.listed(); len(uids) != 1 {
		t.Fatalf("a daemon that starts lists %v", uids)
	}
	processes("0")
	eventually(t, "the pod is listed no more", func() bool { uids, _ := s.listed(); return len(uids) == 0 })
	if uids, changes := s.listed(); changes != 2 {
		t.Errorf("the list was changed %d times, and is %v", changes, uids)
	}
}

// TestWordOnEveryPodThatMayRun: the extender waits for it, also where the containers
// have ended already.
func TestWordOnEveryPodThatMayRun(t *testing.T) {
	s, pod, processes := endingStage(t)
	processes("0")
	_, stop := s.playUntilSeen()
	defer stop()
	s.delete(pod)
	eventually(t, "the pod was listed, and is no more", func() bool {
		uids, changes := s.listed()
		return changes == 2 && len(uids) == 0
	})
}

// TestPodsThatKubeletLetsGo cost no write.
func TestPodsThatKubeletLetsGo(t *testing.T) {
	s, pod, _ := endingStage(t)
	a, stop := s.playUntilSeen()
	defer stop()
	pod.Status.ContainerStatuses[0].State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}
	if _, err := s.client.CoreV1().Pods("team").UpdateStatus(t.Context(), pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.delete(pod)
	eventually(t, "the pod is gone", func() bool { return len(a.pods.Cached()) == 0 })
	a.endings.mu.Lock()
	defer a.endings.mu.Unlock()
	if len(a.endings.went) != 0 || len(a.endings.pods) != 0 {
		t.Errorf("%d and %d pods are looked after", len(a.endings.went), len(a.endings.pods))
	}
}

// TestEndedBySomebodyElse: a pod that was called ended while its containers run is
// listed once, and not again while its object stays.
func TestEndedBySomebodyElse(t *testing.T) {
	root, clock := t.TempDir(), time.Unix(1000, 0)
	e := newEndings(root)
	e.now = func() time.Time { return clock }
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", UID: types.UID(goneUID)}, Spec: corev1.PodSpec{NodeName: thisNode},
		Status: corev1.PodStatus{Phase: corev1.PodFailed,
			ContainerStatuses: []corev1.ContainerStatus{{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}},
	}
	holds := func(*corev1.Pod) []wire.Ending {
		return []wire.Ending{{Pod: accel.PodRef{UID: goneUID, Namespace: "team", Name: "p"}, Resource: gcuMemory, Units: 1}}
	}
	turn := func() int { return len(e.turn(t.Context(), "", []*corev1.Pod{pod}, holds)) }
	put(t, root, map[string]string{"pids/kubepods/pod" + goneUID + "/pids.current": "1"})
	for range 3 {
		if n := turn(); n != 1 {
			t.Fatalf("%d pods are listed while its containers run", n)
		}
		e.told()
	}
	put(t, root, map[string]string{"pids/kubepods/pod" + goneUID + "/pids.current": "0"})
	for range 3 {
		if n := turn(); n != 0 {
			t.Fatalf("%d pods are listed when its containers have ended", n)
		}
		e.told()
	}

	// Where nobody can tell, a minute must do.
	e = newEndings(filepath.Join(root, "none"))
	e.now = func() time.Time { return clock }
	for _, want := range []int{1, 1, 0} {
		if n := turn(); n != want {
			t.Errorf("%d pods are listed where control groups cannot be read, want %d", n, want)
		}
		e.told()
		clock = clock.Add(unknownFor / 2)
	}
}

// TestEndingPodsKeepTheirCards from other resources.
func TestEndingPodsKeepTheirCards(t *testing.T) {
	w := newWorld(t, "1")
	w.engines(whole)
	devices := found(card(0, "a", 16), card(1, "b", 16))
	w.records.endings = newEndings("")
	w.records.endings.devices = map[accel.Resource][]accel.DeviceID{gcuMemory: {"b"}}
	w.update(t.Context(), devices, nil)
	e := w.records.owner.engine
	e.Discover(whole.ID, alloc.Discovery{Devices: devices.Devices})
	e.Derive(whole.ID, time.Now())
	shares := e.Inventory(whole.ID).Shares
	if shares[0].Health.Unhealthy {
		t.Error("a card that nobody has is withdrawn")
	}
	if got := shares[1].Health.Reason; got != "given out as enflame.com/gcu-memory" {
		t.Errorf("the card of a pod whose containers run is offered as another resource: %q", got)
	}
}
