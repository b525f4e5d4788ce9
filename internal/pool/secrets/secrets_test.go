package secrets

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/informers"
	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/internal/testing/kubetest"
)

// token is in every source; it must never be in a log.
const token = "f00dfeed-the-token"

var (
	three   = []string{pool.CASecret, pool.ClientSecret, pool.ServersSecret}
	allowed = map[string]string{"divvy.dev/pool": "allowed"}
)

func TestMain(m *testing.M) {
	// The handler after the one that logs slows errors down by the time since the
	// last one, which began outside of any test's own clock.
	utilruntime.ErrorHandlers = utilruntime.ErrorHandlers[:1] //nolint:reassign // it is there to be set
	os.Exit(m.Run())
}

// world is an API server with the log of the keepers on it.
type world struct {
	t      *testing.T
	server *kubetest.Server
	admin  kubernetes.Interface
	log    *lockedBuffer
}

type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func ns(name string, labels map[string]string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
}

func source(name string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name}, Type: corev1.SecretTypeOpaque,
		Data: map[string][]byte{"key": []byte(token + " in " + name)},
	}
}

func sources() []runtime.Object {
	var out []runtime.Object
	for _, name := range three {
		out = append(out, source(name))
	}
	return out
}

// user is a pod that mounts secrets.
func user(namespace, name string, secrets ...string) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{pool.ConvertedLabel: "true"}},
		Status:     corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, s := range secrets {
		p.Spec.Volumes = append(p.Spec.Volumes,
			corev1.Volume{Name: s, VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: s}}})
	}
	return p
}

// inBubble runs a test with its own clock. What keepers log is looked through
// for the token at the end.
func inBubble(t *testing.T, objects []runtime.Object, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		server, err := kubetest.New(objects...)
		if err != nil {
			t.Fatal(err)
		}
		w := &world{t: t, server: server, admin: server.Client(nil), log: &lockedBuffer{}}
		f(w)
		if log := w.log.String(); strings.Contains(log, token) || strings.Contains(log, "Zm9vZGZlZWQ") {
			t.Errorf("the token is in the log:\n%s", log)
		}
	})
}

// keeper starts a Keeper over a client and waits until it is at rest.
func (w *world) keeper(client kubernetes.Interface, change func(*Config)) (k *Keeper, stop func()) {
	w.t.Helper()
	c := Config{Client: client, Selector: labels.SelectorFromSet(allowed)}
	if change != nil {
		change(&c)
	}
	k = New(c)
	logger := logr.FromSlogHandler(slog.NewTextHandler(w.log, &slog.HandlerOptions{Level: slog.Level(-10)}))
	ctx, cancel := context.WithCancel(klog.NewContext(w.t.Context(), logger))
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("Run: %v", err)
		}
	})
	w.t.Cleanup(stop)
	time.Sleep(time.Second)
	return k, stop
}

// both starts two keepers.
func (w *world) both() (a, b *Keeper) {
	a, _ = w.keeper(w.server.Client(nil), nil)
	b, _ = w.keeper(w.server.Client(nil), nil)
	return a, b
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) createPod(p *corev1.Pod) {
	w.t.Helper()
	_, err := w.admin.CoreV1().Pods(p.Namespace).Create(w.t.Context(), p, metav1.CreateOptions{})
	w.must(err)
	time.Sleep(time.Second)
}

func (w *world) deletePod(namespace, name string) {
	w.t.Helper()
	w.must(w.admin.CoreV1().Pods(namespace).Delete(w.t.Context(), name, metav1.DeleteOptions{}))
	time.Sleep(time.Second)
}

func (w *world) setPhase(namespace, name string, phase corev1.PodPhase) {
	w.t.Helper()
	p, err := w.admin.CoreV1().Pods(namespace).Get(w.t.Context(), name, metav1.GetOptions{})
	w.must(err)
	p.Status.Phase = phase
	_, err = w.admin.CoreV1().Pods(namespace).Update(w.t.Context(), p, metav1.UpdateOptions{})
	w.must(err)
	time.Sleep(time.Second)
}

func (w *world) label(name string, labels map[string]string) {
	w.t.Helper()
	_, err := w.admin.CoreV1().Namespaces().Update(w.t.Context(), ns(name, labels), metav1.UpdateOptions{})
	w.must(err)
	time.Sleep(time.Second)
}

// get returns a secret; nil when it is not there.
func (w *world) get(namespace, name string) *corev1.Secret {
	w.t.Helper()
	s, err := w.admin.CoreV1().Secrets(namespace).Get(w.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	w.must(err)
	return s
}

func (w *world) put(s *corev1.Secret) {
	w.t.Helper()
	var err error
	if w.get(s.Namespace, s.Name) == nil {
		_, err = w.admin.CoreV1().Secrets(s.Namespace).Create(w.t.Context(), s, metav1.CreateOptions{})
	} else {
		_, err = w.admin.CoreV1().Secrets(s.Namespace).Update(w.t.Context(), s, metav1.UpdateOptions{})
	}
	w.must(err)
	time.Sleep(time.Second)
}

func (w *world) delete(namespace, name string) {
	w.t.Helper()
	w.must(w.admin.CoreV1().Secrets(namespace).Delete(w.t.Context(), name, metav1.DeleteOptions{}))
	time.Sleep(time.Second)
}

// want checks which of the four secrets are in a namespace.
func (w *world) want(namespace string, names ...string) {
	w.t.Helper()
	for _, name := range secretNames {
		if got := w.get(namespace, name) != nil; got != slices.Contains(names, name) {
			w.t.Errorf("%s/%s is there: %v", namespace, name, got)
		}
	}
}

// told are the reasons of the events on a pod.
func (w *world) told(namespace, name string) []string {
	w.t.Helper()
	list, err := w.admin.CoreV1().Events(namespace).List(w.t.Context(), metav1.ListOptions{})
	w.must(err)
	var out []string
	for _, e := range list.Items {
		if e.InvolvedObject.Name == name {
			out = append(out, e.Reason)
		}
	}
	return out
}

// Guards S4: pods get exactly what they mount, without a part in admission.
func TestPodsGetWhatTheyMount(t *testing.T) {
	inBubble(t, append(sources(), ns("a", allowed), ns("b", allowed), source(pool.SingleSecret)), func(w *world) {
		w.both()
		w.want("a")
		w.createPod(user("a", "p", three...))
		w.createPod(user("b", "p", pool.SingleSecret))
		w.want("a", three...)
		w.want("b", pool.SingleSecret)
		got := w.get("a", pool.CASecret)
		if string(got.Data["key"]) != token+" in "+pool.CASecret || got.Labels[ManagedByLabel] != ManagedBy ||
			got.Annotations[SourceAnnotation] != "kube-system/"+pool.CASecret || got.Annotations[SourceHashAnnotation] == "" ||
			got.Annotations[SourceVersionAnnotation] != w.get("kube-system", pool.CASecret).ResourceVersion {
			t.Errorf("the copy is %v", got.ObjectMeta)
		}
		// A pod without our label, and one in the source's namespace, change nothing.
		w.want("kube-system", append(three, pool.SingleSecret)...)
		w.createPod(user("kube-system", "p", three...))
		w.want("kube-system", append(three, pool.SingleSecret)...)
	})
}

// Guards S1: nothing is brought where nobody allowed it.
func TestANamespaceThatIsNotAllowedGetsNothing(t *testing.T) {
	inBubble(t, append(sources(), ns("a", nil)), func(w *world) {
		k, _ := w.both()
		w.createPod(user("a", "p", three...))
		w.want("a")
		if got := w.told("a", "p"); len(got) != 3 || got[0] != events.PoolNotAllowed.Reason {
			t.Errorf("the pod was told %v", got)
		}
		err := k.Allowed("a", three)
		if err == nil || !strings.Contains(err.Error(), "kubectl label namespace a divvy.dev/pool=allowed") {
			t.Errorf("Allowed: %v", err)
		}

		w.label("a", allowed)
		w.want("a", three...)
		if err := k.Allowed("a", three); err != nil {
			t.Error(err)
		}

		// Withdrawn: the copies go at once, whatever runs.
		w.setPhase("a", "p", corev1.PodRunning)
		w.label("a", map[string]string{"divvy.dev/pool": "no"})
		w.want("a")
		if err := k.Allowed("a", three); err == nil {
			t.Error("Allowed after it was withdrawn")
		}
	})
}

// Guards S2: copies follow their source.
func TestCopiesFollowTheirSource(t *testing.T) {
	inBubble(t, append(sources(), ns("a", allowed)), func(w *world) {
		w.both()
		w.createPod(user("a", "p", three...))
		changed := source(pool.CASecret)
		changed.Data = map[string][]byte{"new": []byte(token + "2")}
		w.put(changed)
		if got := w.get("a", pool.CASecret); string(got.Data["new"]) != token+"2" || len(got.Data) != 1 {
			t.Errorf("the copy has %d entries", len(got.Data))
		}

		// Somebody changes a copy: it is put right, and what else is on it stays.
		copied := w.get("a", pool.CASecret)
		copied.Data = map[string][]byte{"bad": []byte("x")}
		copied.Labels["team"] = "a"
		w.put(copied)
		if got := w.get("a", pool.CASecret); string(got.Data["new"]) != token+"2" || got.Labels["team"] != "a" {
			t.Errorf("the copy is %v with %d entries", got.Labels, len(got.Data))
		}

		// Another type cannot be written into a secret: the copy is made anew.
		changed.Type = "example.com/token"
		w.put(changed)
		if got := w.get("a", pool.CASecret); got == nil || got.Type != "example.com/token" {
			t.Errorf("the copy is %v", got)
		}

		// Types of Kubernetes mean something, and are not copied.
		changed.Type = corev1.SecretTypeTLS
		w.put(changed)
		before := w.server.Calls()["update secrets"]
		time.Sleep(time.Minute)
		if got := w.get("a", pool.CASecret); got == nil || got.Type != corev1.SecretTypeOpaque {
			t.Errorf("the copy is %v", got)
		}
		if got := w.server.Calls()["update secrets"] - before; got != 0 {
			t.Errorf("%d updates of what is as it should be", got)
		}

		// Deleted and made again, as the guide does it: the copy never goes.
		w.delete("kube-system", pool.CASecret)
		time.Sleep(time.Minute)
		w.want("a", three...)
		changed.Data["new"] = []byte(token + "3")
		w.put(changed)
		if got := w.get("a", pool.CASecret); string(got.Data["new"]) != token+"3" {
			t.Error("the copy was not updated")
		}

		// A change of the source's labels is no change.
		before = w.server.Calls()["update secrets"]
		changed.Labels = map[string]string{"x": "y"}
		w.put(changed)
		if got := w.server.Calls()["update secrets"] - before; got != 1 {
			t.Errorf("%d updates, want only the administrator's", got)
		}
	})
}

func TestASourceThatComesLateIsToldAndBrought(t *testing.T) {
	inBubble(t, []runtime.Object{ns("a", allowed)}, func(w *world) {
		w.both()
		w.createPod(user("a", "p", three...))
		time.Sleep(time.Minute)
		if got := w.told("a", "p"); len(got) != 3 || got[0] != events.PoolCredentialsMissing.Reason {
			t.Errorf("the pod was told %v", got)
		}
		w.want("a")
		for _, name := range three {
			w.put(source(name))
		}
		w.want("a", three...)
	})
}

func TestASecretOfAnotherOwnerIsNeverTouched(t *testing.T) {
	foreign := func(name string) *corev1.Secret {
		return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name}, Data: map[string][]byte{"key": []byte("theirs")}}
	}
	labelled := foreign(pool.ClientSecret) // Our label alone does not make it ours.
	labelled.Labels = map[string]string{ManagedByLabel: ManagedBy}
	inBubble(t, append(sources(), ns("a", allowed), foreign(pool.CASecret), labelled), func(w *world) {
		k, _ := w.both()
		w.createPod(user("a", "p", three...))
		changed := source(pool.CASecret)
		changed.Data["more"] = []byte(token)
		w.put(changed)
		w.label("a", nil)
		w.deletePod("a", "p")
		time.Sleep(time.Minute)
		w.want("a", pool.CASecret, pool.ClientSecret)
		for _, name := range []string{pool.CASecret, pool.ClientSecret} {
			if got := w.get("a", name); string(got.Data["key"]) != "theirs" {
				t.Errorf("%s was changed", name)
			}
		}
		// What is there already is allowed, with or without the label.
		if err := k.Allowed("a", []string{pool.CASecret, pool.ClientSecret}); err != nil {
			t.Error(err)
		}
		if err := k.Allowed("a", three); err == nil || strings.Contains(err.Error(), pool.CASecret) {
			t.Errorf("Allowed: %v", err)
		}

		// Once theirs is gone, ours takes its place.
		w.label("a", allowed)
		w.createPod(user("a", "q", three...))
		w.delete("a", pool.CASecret)
		if got := w.get("a", pool.CASecret); got == nil || string(got.Data["key"]) == "theirs" {
			t.Error("no copy in the place of theirs")
		}
	})
}

func TestCopiesGoAfterTheLastUser(t *testing.T) {
	for name, end := range map[string]func(w *world, pod string){
		"deleted":   func(w *world, pod string) { w.deletePod("a", pod) },
		"succeeded": func(w *world, pod string) { w.setPhase("a", pod, corev1.PodSucceeded) },
		"failed":    func(w *world, pod string) { w.setPhase("a", pod, corev1.PodFailed) },
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, append(sources(), ns("a", allowed)), func(w *world) {
				w.both()
				w.createPod(user("a", "p", three...))
				w.createPod(user("a", "q", three...))
				end(w, "p")
				time.Sleep(time.Minute)
				w.want("a", three...)
				end(w, "q")
				time.Sleep(25 * time.Second)
				w.want("a", three...)
				// A new pod in time begins the wait anew.
				w.createPod(user("a", "r", pool.CASecret))
				time.Sleep(time.Minute)
				w.want("a", pool.CASecret)
				end(w, "r")
				time.Sleep(40 * time.Second)
				w.want("a")
			})
		})
	}
}

func TestLeftOversOfAnEarlierLifeGoAfterTheWait(t *testing.T) {
	inBubble(t, append(sources(), ns("a", allowed)), func(w *world) {
		_, stop := w.keeper(w.server.Client(nil), nil)
		w.createPod(user("a", "p", three...))
		stop()
		w.deletePod("a", "p")
		time.Sleep(time.Hour)
		w.keeper(w.server.Client(nil), nil)
		time.Sleep(20 * time.Second)
		w.want("a", three...)
		time.Sleep(20 * time.Second)
		w.want("a")
	})
}

// Guards S3: an error is neither "it is there" nor forgotten.
func TestErrorsOfTheAPIServerAreToldAndTriedAgain(t *testing.T) {
	for name, failure := range map[string]error{
		"forbidden": apierrors.NewForbidden(corev1.Resource("secrets"), pool.CASecret, errors.New("no such rule")),
		"timeout":   apierrors.NewTimeoutError("the request took too long", 1),
		"refused":   errors.New("connection refused"),
	} {
		for _, verb := range []string{"create", "update", "delete"} {
			t.Run(name+" at "+verb, func(t *testing.T) {
				inBubble(t, append(sources(), ns("a", allowed)), func(w *world) {
					var failing atomic.Bool
					k, _ := w.keeper(w.server.Client(func(a clienttesting.Action) error {
						if failing.Load() && a.GetVerb() == verb && a.GetResource().Resource == "secrets" {
							return failure
						}
						return nil
					}), nil)
					act := map[string]func(){
						"create": func() { w.createPod(user("a", "p", pool.CASecret)) },
						"update": func() {
							changed := source(pool.CASecret)
							changed.Data["more"] = []byte(token)
							w.put(changed)
						},
						"delete": func() { w.label("a", nil) },
					}
					done := map[string]func() bool{
						"create": func() bool { return w.get("a", pool.CASecret) != nil },
						"update": func() bool { return len(w.get("a", pool.CASecret).Data) == 2 },
						"delete": func() bool { return w.get("a", pool.CASecret) == nil },
					}
					if verb != "create" {
						act["create"]()
					}
					failing.Store(true)
					act[verb]()
					time.Sleep(time.Minute)
					if done[verb]() {
						t.Fatal("it was done although it failed")
					}
					if got := testutil.ToFloat64(k.metrics.copies.WithLabelValues(resultFailed)); got < 3 || got > 100 {
						t.Errorf("%v failures counted in a minute", got)
					}
					// The log quotes messages.
					if !strings.Contains(w.log.String(), strings.ReplaceAll(failure.Error(), `"`, `\"`)) {
						t.Errorf("the log says nothing of it:\n%s", w.log)
					}
					if got := w.told("a", "p"); verb != "delete" && !slices.Contains(got, events.PoolCredentialsFailed.Reason) {
						t.Errorf("the pod was told %v", got)
					}
					failing.Store(false)
					time.Sleep(35 * time.Second)
					if !done[verb]() {
						t.Error("it was not tried again")
					}
				})
			})
		}
	}
}

func TestWhatCannotBeWatchedIsTold(t *testing.T) {
	inBubble(t, append(sources(), ns("a", allowed)), func(w *world) {
		var failing atomic.Bool
		failing.Store(true)
		k, _ := w.keeper(w.server.Client(func(a clienttesting.Action) error {
			if failing.Load() && a.GetVerb() == "list" && a.GetResource().Resource == "pods" {
				return apierrors.NewForbidden(corev1.Resource("pods"), "", errors.New("no such rule"))
			}
			return nil
		}), nil)
		time.Sleep(time.Minute)
		for _, err := range []error{k.Ready(), k.Allowed("a", three)} {
			if err == nil || !strings.Contains(err.Error(), "pods") || !strings.Contains(err.Error(), "forbidden") {
				t.Errorf("got %v", err)
			}
		}
		failing.Store(false)
		time.Sleep(2 * time.Minute) // An informer waits up to a minute between attempts.
		if err := k.Ready(); err != nil {
			t.Error(err)
		}
	})
}

func TestANamespaceThatIsBeingDeletedIsLeftAlone(t *testing.T) {
	ending := ns("a", allowed)
	ending.Status.Phase = corev1.NamespaceTerminating
	inBubble(t, append(sources(), ending), func(w *world) {
		k, _ := w.keeper(w.server.Client(nil), nil)
		w.createPod(user("a", "p", three...))
		time.Sleep(time.Minute)
		w.want("a")
		// The API server knows of the end before the watch does.
		refusing := w.server.Client(func(a clienttesting.Action) error {
			if a.GetVerb() != "create" || a.GetResource().Resource != "secrets" {
				return nil
			}
			err := apierrors.NewForbidden(corev1.Resource("secrets"), "x", errors.New("namespace is being terminated"))
			err.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: corev1.NamespaceTerminatingCause}}
			return err
		})
		l, _ := w.keeper(refusing, nil)
		w.label("a", allowed)
		time.Sleep(time.Minute)
		for _, k := range []*Keeper{k, l} {
			if got := testutil.ToFloat64(k.metrics.copies.WithLabelValues(resultFailed)); got != 0 {
				t.Errorf("%v failures counted", got)
			}
		}
	})
}

func TestManyPodsAreNotManyRequests(t *testing.T) {
	objects := sources()
	for i := range 50 {
		objects = append(objects, ns(fmt.Sprintf("n%d", i), allowed))
	}
	inBubble(t, objects, func(w *world) {
		w.both()
		// By several, as the fake's watches take only so many events at once.
		for i := range 1000 {
			p := user(fmt.Sprintf("n%d", i%50), fmt.Sprintf("p%d", i), three...)
			_, err := w.admin.CoreV1().Pods(p.Namespace).Create(t.Context(), p, metav1.CreateOptions{})
			w.must(err)
			if i%20 == 0 {
				time.Sleep(100 * time.Millisecond)
			}
		}
		time.Sleep(10 * time.Second)
		calls := w.server.Calls()
		if got := calls["create secrets"]; got < 150 || got > 300 {
			t.Errorf("%d attempts to make 150 copies for 1000 pods, want at most one a replica", got)
		}
		if got := calls["get secrets"] + calls["update secrets"] + calls["create events"]; got != 0 {
			t.Errorf("%d other requests", got)
		}
		for i := range 50 {
			w.want(fmt.Sprintf("n%d", i), three...)
		}
		before := w.server.Calls()
		time.Sleep(time.Hour)
		for call, n := range w.server.Calls() {
			if n != before[call] && !strings.HasPrefix(call, "watch") {
				t.Errorf("%d times %s in an hour in which nothing happened", n-before[call], call)
			}
		}
	})
}

func TestManyWaitingPodsAreToldInTheirTurn(t *testing.T) {
	var objects []runtime.Object
	objects = append(objects, ns("a", allowed))
	for i := range 300 {
		objects = append(objects, user("a", fmt.Sprintf("p%d", i), pool.SingleSecret))
	}
	inBubble(t, objects, func(w *world) {
		w.keeper(w.server.Client(nil), nil)
		if got := w.server.Calls()["create events"]; got == 0 || got > 60 {
			t.Errorf("%d events in the first second", got)
		}
		time.Sleep(2 * time.Minute)
		if got := w.server.Calls()["create events"]; got != 300 {
			t.Errorf("%d events for 300 pods", got)
		}
	})
}

func TestAllowedAsksForTheLabelsThatAreSelected(t *testing.T) {
	tests := map[string]struct {
		selector string
		want     string // in the error; "" when allowed
	}{
		"all namespaces":     {selector: ""},
		"a label":            {selector: "a=b", want: "kubectl label namespace a a=b"},
		"two labels":         {selector: "a=b,c in (d,e)", want: "kubectl label namespace a a=b c=d"},
		"no simple selector": {selector: "a notin (b),c", want: `"a notin (b),c" matches`},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			inBubble(t, []runtime.Object{ns("a", map[string]string{"x": "y"})}, func(w *world) {
				selector, err := labels.Parse(tt.selector)
				w.must(err)
				k, _ := w.keeper(w.server.Client(nil), func(c *Config) { c.Selector = selector })
				err = k.Allowed("a", three)
				if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
					t.Errorf("got %v, want %q", err, tt.want)
				}
			})
		})
	}
	t.Run("no selector", func(t *testing.T) {
		inBubble(t, []runtime.Object{ns("a", allowed)}, func(w *world) {
			k, _ := w.keeper(w.server.Client(nil), func(c *Config) { c.Selector = nil })
			if err := k.Allowed("a", three); err == nil || !strings.Contains(err.Error(), "the configuration allows no namespace") {
				t.Errorf("got %v", err)
			}
		})
	})
}

func TestAllowedWaitsForANamespaceThatIsNew(t *testing.T) {
	inBubble(t, nil, func(w *world) {
		k, _ := w.keeper(w.server.Client(nil), nil)
		answer := make(chan error, 1)
		go func() { answer <- k.Allowed("new", three) }()
		time.Sleep(100 * time.Millisecond)
		_, err := w.admin.CoreV1().Namespaces().Create(t.Context(), ns("new", allowed), metav1.CreateOptions{})
		w.must(err)
		if err := <-answer; err != nil {
			t.Error(err)
		}
		if err := k.Allowed("never", three); err == nil {
			t.Error("a namespace that does not exist is allowed")
		}
		if err := New(Config{Client: w.admin}).Allowed("new", three); !errors.Is(err, informers.ErrNotRead) {
			t.Errorf("before anything was read: %v", err)
		}
	})
}

func TestTheMemoryHoldsNoCopiesOfTheToken(t *testing.T) {
	inBubble(t, append(sources(), ns("a", allowed)), func(w *world) {
		k, _ := w.both()
		w.createPod(user("a", "p", three...))
		if s := k.stores.secret(pool.CASecret, "a"); s == nil || s.data != nil || !s.ours {
			t.Errorf("the copy is kept as %+v", s)
		}
	})
}

func TestMetrics(t *testing.T) {
	inBubble(t, append(sources(), ns("a", allowed)), func(w *world) {
		k, _ := w.keeper(w.server.Client(nil), nil)
		registry := prometheus.NewPedanticRegistry()
		w.must(k.Register(registry))
		w.createPod(user("a", "p", three...))
		changed := source(pool.CASecret)
		changed.Data["more"] = []byte(token)
		w.put(changed)
		w.deletePod("a", "p")
		w.createPod(user("a", "q", pool.CASecret))
		time.Sleep(time.Minute)
		if err := testutil.GatherAndCompare(registry, strings.NewReader(`
# HELP divvy_pool_credential_changes_total Copies of the pool's secrets in namespaces of pods that this replica changed.
# TYPE divvy_pool_credential_changes_total counter
divvy_pool_credential_changes_total{result="failed"} 0
divvy_pool_credential_changes_total{result="made"} 3
divvy_pool_credential_changes_total{result="removed"} 2
divvy_pool_credential_changes_total{result="updated"} 1
# HELP divvy_pool_credential_copies Copies of the pool's secrets that there are, in all namespaces.
# TYPE divvy_pool_credential_copies gauge
divvy_pool_credential_copies 1
`)); err != nil {
			t.Error(err)
		}
	})
}
