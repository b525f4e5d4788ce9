package host

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// shown is what kubelet and the scheduler say from one look to the next; the last
// one goes on.
type shown struct {
	hash   string
	status corev1.ContainerStatus
	absent bool
	// unreported says that kubelet has reported no container yet.
	unreported bool
	err        error
	health     int // 0 for 200
	slow       time.Duration
}

func running(restarts int32) corev1.ContainerStatus {
	return corev1.ContainerStatus{Name: "kube-scheduler", RestartCount: restarts,
		State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
}

func waiting(reason, message string, last *corev1.ContainerStateTerminated) corev1.ContainerStatus {
	return corev1.ContainerStatus{
		Name: "kube-scheduler", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}},
		LastTerminationState: corev1.ContainerState{Terminated: last},
	}
}

// mirrorOf returns a Mirror that sees the looks, what is wanted, and a count of
// the looks.
func mirrorOf(t *testing.T, looks ...shown) (*Mirror, Want, func() int) {
	t.Helper()
	var mu sync.Mutex
	n := 0
	current := func() shown { return looks[min(max(n-1, 0), len(looks)-1)] }
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if code := current().health; code != 0 {
			http.Error(w, "[-]leaderElection failed", code)
		}
	}))
	t.Cleanup(server.Close)
	client := fake.NewClientset()
	client.PrependReactor("get", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		n++
		s := current()
		time.Sleep(s.slow)
		name := a.(clienttesting.GetAction).GetName()
		switch {
		case s.err != nil:
			return true, nil, s.err
		case s.absent || name != "kube-scheduler-node-a":
			return true, nil, apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, name)
		}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name,
			Annotations: map[string]string{schedconf.AnnotationHash: s.hash}}}
		if s.unreported {
			pod.Status.Phase = corev1.PodPending
		} else {
			pod.Status.ContainerStatuses = []corev1.ContainerStatus{s.status}
		}
		return true, pod, nil
	})
	// Many times what a look takes: on a busy machine it takes long.
	m := NewMirror(MirrorConfig{Client: client, Node: "node-a", Timeout: 1200 * time.Millisecond, Settle: 200 * time.Millisecond,
		LogDir: t.TempDir()})
	m.poll, m.stuck = 5*time.Millisecond, 120*time.Millisecond
	want := Want{Hash: "new", Name: "kube-scheduler", Namespace: "kube-system", Container: "kube-scheduler", Health: server.URL + "/livez"}
	return m, want, func() int {
		mu.Lock()
		defer mu.Unlock()
		return n
	}
}

func TestAwait(t *testing.T) {
	crash := &corev1.ContainerStateTerminated{ExitCode: 1, Reason: "Error", Message: "unknown field\n"}
	old, good := shown{hash: "old", status: running(1)}, shown{hash: "new", status: running(2)}
	unreported := shown{hash: "new", unreported: true}
	forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "kube-scheduler-node-a", errors.New("no rule"))
	backOff := shown{hash: "new", status: waiting("CrashLoopBackOff", "back-off 40s restarting failed container",
		&corev1.ContainerStateTerminated{Reason: "Completed"})}
	away := shown{err: errors.New("connection refused")}
	tests := map[string]struct {
		looks   []shown
		want    string // of the error; "" for none
		crashed bool
		unknown bool // the error is no *UnhealthyError
	}{
		"well after the old one": {looks: []shown{old, old, {absent: true},
			{hash: "new", status: waiting("ContainerCreating", "", nil)}, good}},
		"restarts once": {looks: []shown{good, {hash: "new", status: waiting("Terminated", "", nil)},
			{hash: "new", status: running(3)}}},
		"well after a while":                 {looks: []shown{{hash: "new", status: running(2), health: 500}, good}},
		"an API server that comes back late": {looks: append(slicesRepeat(away, 300), good)},

		// Each question is longer than the scheduler's time.
		"an API server that hangs": {looks: []shown{old, {err: errors.New("timeout"), slow: 1600 * time.Millisecond}, {absent: true},
			good}},

		"well before kubelet says so":  {looks: []shown{old, {absent: true}, {hash: "new", unreported: true, health: 500}, unreported}},
		"reported while it is watched": {looks: append(slicesRepeat(unreported, 10), shown{hash: "new", status: running(0)})},
		"ends before kubelet says so": {looks: append(slicesRepeat(unreported, 1),
			shown{hash: "new", status: waiting("CrashLoopBackOff", "", crash)}), want: "repeatedly", crashed: true},
		"never reported": {looks: []shown{{hash: "new", unreported: true, health: 500}}, want: "after 1.2s: kubelet has not started it"},

		"kubelet keeps the old one": {looks: []shown{old}, want: "after 1.2s: kubelet has not loaded the new manifest"},
		"no pod":                    {looks: []shown{{absent: true}}, want: "kubelet shows no pod kube-system/kube-scheduler-node-a"},
		"kubelet's back-off":        {looks: append(slicesRepeat(backOff, 300), good)},
		"never well": {looks: []shown{{hash: "new", status: running(2), health: 500}},
			want: "500 Internal Server Error: [-]leaderElection failed"},
		"ends again and again": {looks: []shown{good, {hash: "new", status: waiting("CrashLoopBackOff", "", crash)}},
			want: "it exited with code 1 (Error), repeatedly; its last message: unknown field", crashed: true},
		"cannot be made": {looks: []shown{{hash: "new", status: waiting("CreateContainerError", "no such file", nil)}},
			want: "CreateContainerError: no such file"},
		"may not look": {looks: []shown{{err: forbidden}}, want: "no rule", unknown: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, want, _ := mirrorOf(t, test.looks...)
			err := m.Await(t.Context(), want)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Fatalf("the error is %v, want %q", err, test.want)
			}
			var unhealthy *UnhealthyError
			if err != nil && errors.As(err, &unhealthy) == test.unknown {
				t.Errorf("the error is a %T", err)
			}
			if unhealthy != nil && unhealthy.Crashed != test.crashed {
				t.Errorf("crashed is %t", unhealthy.Crashed)
			}
		})
	}
}

func slicesRepeat(s shown, n int) []shown {
	out := make([]shown, n)
	for i := range out {
		out[i] = s
	}
	return out
}

// TestAwaitOnce: a container that proved itself need not again, another one must.
func TestAwaitOnce(t *testing.T) {
	m, want, looks := mirrorOf(t, shown{hash: "new", status: running(2)})
	must(t, m.Await(t.Context(), want))
	first := looks()
	if first < 3 {
		t.Errorf("it was looked at %d times alone", first)
	}
	must(t, m.Await(t.Context(), want))
	if looks() != first+1 {
		t.Errorf("it was looked at %d times more", looks()-first)
	}
	must(t, m.Now(t.Context(), want))
	want.Hash = "another"
	if err := m.Now(t.Context(), want); err == nil {
		t.Error("another manifest is taken for this one")
	}
}

func TestAwaitStops(t *testing.T) {
	m, want, _ := mirrorOf(t, shown{absent: true})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.Await(ctx, want); !errors.Is(err, context.Canceled) {
		t.Errorf("the error is %v", err)
	}
}

// TestLogTail: what a scheduler said that did not leave a message.
func TestLogTail(t *testing.T) {
	m, want, _ := mirrorOf(t, shown{hash: "new", status: waiting("CrashLoopBackOff", "", nil)})
	write := func(pod, file, text string, at time.Time) {
		path := filepath.Join(m.config.LogDir, pod, "kube-scheduler", file)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(text), 0o600))
		must(t, os.Chtimes(path, at, at))
	}
	now := time.Now()
	write("kube-system_kube-scheduler-node-a_old", "7.log", "2026-01-01T00:00:00Z stderr F an old one\n", now.Add(-time.Hour))
	write("kube-system_kube-scheduler-node-a_new", "0.log", strings.Repeat("2026-01-01T00:00:00Z stderr F earlier\n", 3000)+
		"2026-01-01T00:00:00Z stderr F \n2026-01-01T00:00:00Z stderr F E1121 08:53:04.8 1 run.go:74] \"command failed\" err=\"no "+
		"plugin\"\n2026-01-01T00:00:00Z stderr F I1121 08:53:04.8 1 a.go:1] Bye\nhalf", now)
	write("kube-system_another_new", "0.log", "2026-01-01T00:00:00Z stderr F of another pod\n", now.Add(time.Hour))
	err := m.Await(t.Context(), want)
	if err == nil || !strings.HasSuffix(err.Error(), `its last message: E1121 08:53:04.8 1 run.go:74] "command failed" err="no plugin"`) ||
		strings.Contains(err.Error(), "old one") {
		t.Errorf("the error is %v", err)
	}
}

// TestNoKeyIsTold: from -v=2 on, kube-scheduler logs its whole configuration, with
// the key in it, and what it says goes into events.
func TestNoKeyIsTold(t *testing.T) {
	key := base64.StdEncoding.EncodeToString([]byte(strings.Repeat(secret, 3)))
	const at = "2026-01-01T00:00:00Z stderr "
	klogged := at + "F I1121 08:53:04.8 1 configfile.go:102] \"Using component config\" config=<\n" +
		at + "F \t  tlsConfig:\n" + at + "F \t    certData: abc\n" + at + "F \t    keyData: " + key + "\n" + at + "F \t    serverName: a\n"
	for name, log := range map[string]string{
		"lines":      klogged,
		"one line":   at + `F {"msg":"Using component config","config":"tlsConfig:\n  keyData: ` + key + `\n  serverName: a\n"}` + "\n",
		"a JSON":     at + `F config={"keyData":"` + key + `"}` + "\n",
		"its rest":   at + "P " + key[:40] + "\n" + at + "F " + key[40:] + "\n",
		"long lines": at + "F first\n" + at + "P \t    key" + "\n" + at + "F Data: " + key[:60] + "\n",
		"window":     strings.Repeat("x", 100) + at + "F " + strings.Repeat("keyData: "+key+" ", 65<<10/len(key)) + "\n",
	} {
		m, want, _ := mirrorOf(t, shown{hash: "new", status: waiting("CrashLoopBackOff", "", nil)})
		path := filepath.Join(m.config.LogDir, "kube-system_kube-scheduler-node-a_1", "kube-scheduler", "0.log")
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, []byte(log), 0o600))
		err := m.Await(t.Context(), want)
		if err == nil {
			t.Fatalf("%s: no error", name)
		}
		for i := 0; i+30 < len(key); i++ {
			if strings.Contains(err.Error(), key[i:i+30]) {
				t.Errorf("%s: the key is told: %v", name, err)
				break
			}
		}
	}
	// What kubelet kept of the log begins anywhere.
	ended := &corev1.ContainerStateTerminated{ExitCode: 1, Reason: "Error", Message: key[100:] + "\n    serverName: a\n"}
	m, want, _ := mirrorOf(t, shown{hash: "new", status: waiting("CrashLoopBackOff", "", ended)})
	for _, err := range []error{m.Await(t.Context(), want), m.Now(t.Context(), want)} {
		if err == nil || strings.Contains(err.Error(), key[110:160]) || !strings.Contains(err.Error(), "serverName") {
			t.Errorf("the error is %v", err)
		}
	}
}

// defaultHealth is where a kube-scheduler answers whose flags do not say it.
const defaultHealth = "https://127.0.0.1:10259/healthz"

func TestWantOf(t *testing.T) {
	container := func(text string) string {
		return "kind: Pod\nmetadata: {name: kube-scheduler, namespace: kube-system}\nspec: {containers: [{name: side}, {name: " +
			"kube-scheduler, " + text + "}]}"
	}
	tests := map[string]struct{ manifest, health, want string }{
		"kubeadm's": {manifest: kubeadm, health: "https://127.0.0.1:10259/livez"},
		"no probe":  {manifest: container("command: [kube-scheduler]"), health: defaultHealth},
		"another port": {manifest: container("livenessProbe: {httpGet: {port: 10251, path: /healthz}}"),
			health: "http://127.0.0.1:10251/healthz"},
		"IPv6": {manifest: container("livenessProbe: {httpGet: {host: '::1', port: 10259, scheme: HTTPS}}"),
			health: "https://[::1]:10259/healthz"},
		"unknown port": {manifest: container("livenessProbe: {httpGet: {port: none}}"), health: defaultHealth},
		"no port":      {manifest: container("command: [kube-scheduler, --secure-port=0]"), health: ""},
		"an address": {manifest: container("command: [kube-scheduler, --bind-address=10.0.0.5], livenessProbe: {httpGet: {port: 10259, " +
			"scheme: HTTPS, path: /livez}}"), health: "https://10.0.0.5:10259/livez"},
		"all of them": {manifest: container("args: [--bind-address, '::'], livenessProbe: {httpGet: {port: 10259, scheme: HTTPS}}"),
			health: "https://127.0.0.1:10259/healthz"},
		"flags alone": {manifest: container("args: [--bind_address, 'fd00::5', --secure-port=10260]"),
			health: "https://[fd00::5]:10260/healthz"},
		"a variable": {manifest: container("args: [--bind-address=$(HOST_IP)]"), health: defaultHealth},
		"JSON":       {manifest: `{"kind":"Pod","metadata":{"name":"a"},"spec":{"containers":[{"name":"b"}]}}`, health: defaultHealth},
		"no pod":     {manifest: "a: b", want: "without a name"},
		"no YAML":    {manifest: "{", want: "not a pod"},
	}
	for name, test := range tests {
		w, err := WantOf([]byte(test.manifest))
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: the error is %v, want %q", name, err, test.want)
		}
		if w.Health != test.health {
			t.Errorf("%s: health is asked at %q, want %q", name, w.Health, test.health)
		}
	}
	if w, err := WantOf([]byte(kubeadm)); err != nil || w.Name != "kube-scheduler" || w.Namespace != "kube-system" ||
		w.Container != "kube-scheduler" || w.Hash != "" {
		t.Errorf("kubeadm's is %+v, %v", w, err)
	}
}
