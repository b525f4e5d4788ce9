package host

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/internal/install/schedconf"
)

// Defaults of MirrorConfig.
const (
	DefaultTimeout = time.Minute
	DefaultSettle  = 5 * time.Second
	DefaultLogDir  = "/var/log/pods"
)

const (
	pollEvery = 500 * time.Millisecond
	// unreachable is how much longer than the timeout an API server may be away:
	// then nobody can tell how kube-scheduler is, and it cannot be well either.
	unreachable = 4 * time.Minute
	// maxBackOff is how long kubelet at most waits before it starts a container again
	// (MaxContainerBackOff of pkg/kubelet).
	maxBackOff = 5 * time.Minute
	// stuck is how long a container may fail to be made, for a reason that
	// kubelet tries again.
	stuck = 10 * time.Second
	// logLines and logBytes bound what is told of a log.
	logLines, logBytes = 4, 1500
)

// MirrorConfig says how a Mirror looks.
type MirrorConfig struct {
	Client kubernetes.Interface
	// Node is the name of this node.
	Node string
	// Timeout is how long kube-scheduler may take to be well, Settle how long it
	// must stay so. 0 for the defaults.
	Timeout, Settle time.Duration
	// LogDir is kubelet's folder with the logs of pods; "" for none to look at.
	LogDir string
}

// Mirror is a Scheduler that is seen through the pod that kubelet shows of it in
// the API, and through its health port.
//
// It is safe for concurrent use.
type Mirror struct {
	config MirrorConfig
	http   *http.Client
	// poll and stuck are the constants, but in tests.
	poll, stuck time.Duration

	mu sync.Mutex
	// proven is the container that was well for long enough, with its hash: it
	// need not prove itself again.
	proven string
}

// NewMirror returns the kube-scheduler of a node.
func NewMirror(c MirrorConfig) *Mirror {
	c.Timeout, c.Settle = cmp.Or(c.Timeout, DefaultTimeout), cmp.Or(c.Settle, DefaultSettle)
	return &Mirror{config: c, poll: pollEvery, stuck: stuck, http: &http.Client{
		Timeout: 3 * time.Second,
		Transport: &http.Transport{
			// kubelet's probes do not check the certificate either: kube-scheduler
			// makes its own for the loopback address, and nothing secret is sent.
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
			DisableKeepAlives: true,
		},
	}}
}

type seen struct {
	// well names the container that is well, "" when none is: the pod's UID and how often the
	// container was restarted.
	well string
	// unreported says that kubelet has made the pod and not reported any container.
	unreported bool
	// problem is what is missing when none is.
	problem string
	// crashed and failing say that waiting does not help, or hardly.
	crashed, failing bool
	// backOff says that kubelet stopped the container itself and restarts it after its
	// back-off.
	backOff bool
	message string // of the container's end
}

// Check implements Scheduler.
func (m *Mirror) Check(ctx context.Context, want Want) error {
	_, err := m.look(ctx, want)
	return err
}

// Now returns nil when the scheduler runs as it is wanted and is well in this
// moment.
func (m *Mirror) Now(ctx context.Context, want Want) error {
	s, err := m.look(ctx, want)
	switch {
	case err != nil:
		return err
	case s.well == "":
		return &UnhealthyError{Problem: "kube-scheduler: " + s.problem, Crashed: s.crashed, Log: withoutKeys(s.message)}
	}
	return nil
}

// Await implements Scheduler.
func (m *Mirror) Await(ctx context.Context, want Want) error {
	var wellSince, failingSince time.Time
	var well string
	deadline := time.Now().Add(m.config.Timeout)
	latest := deadline.Add(unreachable)
	backOffLimit := deadline.Add(maxBackOff)
	ticker := time.NewTicker(m.poll)
	defer ticker.Stop()
	last := time.Now()
	for {
		s, err := m.look(ctx, want)
		now := time.Now()
		passed := now.Sub(last)
		last = now
		if ctx.Err() != nil {
			return fmt.Errorf("stopped while waiting for kube-scheduler: %w", ctx.Err())
		}
		switch {
		case err != nil && (now.After(latest) || apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err)):
			return fmt.Errorf("get the health of kube-scheduler: %w", err)
		case err != nil:
			// Time without an API server does not count; one that is away may let each
			// question wait.
			deadline = deadline.Add(passed)
			well, failingSince = "", time.Time{}
		case s.backOff && now.Before(backOffLimit):
			// A rollback would wait for the same back-off.
			deadline = deadline.Add(passed)
			well = ""
		case s.well == "":
			well = ""
		case m.isProven(want, s.well):
			return nil
		case s.well != well:
			well, wellSince = s.well, now
		case now.Sub(wellSince) >= m.config.Settle:
			m.prove(want, well)
			return nil
		}
		if s.failing && failingSince.IsZero() {
			failingSince = now
		} else if !s.failing {
			failingSince = time.Time{}
		}
		switch {
		case err != nil:
		case s.crashed, s.failing && now.Sub(failingSince) > m.stuck:
			return m.unhealthy(want, s)
		case now.After(deadline) && s.well == "":
			s.problem = fmt.Sprintf("after %s: %s", m.config.Timeout, s.problem)
			return m.unhealthy(want, s)
		}
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

func (m *Mirror) isProven(want Want, container string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.proven == want.Hash+" "+container
}

func (m *Mirror) prove(want Want, container string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.proven = want.Hash + " " + container
}

func (m *Mirror) unhealthy(want Want, s seen) error {
	e := &UnhealthyError{Problem: "kube-scheduler: " + s.problem, Crashed: s.crashed, Log: withoutKeys(s.message)}
	if e.Log == "" {
		e.Log = m.logTail(want)
	}
	return e
}

// look returns an error only when the API server did not answer.
func (m *Mirror) look(ctx context.Context, want Want) (seen, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	name := want.Name + "-" + m.config.Node
	pod, err := m.config.Client.CoreV1().Pods(want.Namespace).Get(ctx, name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return seen{problem: fmt.Sprintf("kubelet shows no pod %s/%s", want.Namespace, name)}, nil
	case err != nil:
		return seen{}, fmt.Errorf("get pod %s/%s: %w", want.Namespace, name, err)
	}
	if got := schedconf.HashOf(pod.Annotations); got != want.Hash {
		return seen{problem: "kubelet has not loaded the new manifest"}, nil
	}
	s := containerSeen(pod, want.Container)
	if want.Health == "" || s.well == "" && !s.unreported {
		return s, nil
	}
	switch err := m.askHealth(ctx, want.Health); {
	case err == nil:
		s.well = cmp.Or(s.well, containerName(pod, 0))
	case s.well != "":
		return seen{problem: "it runs but is not healthy: " + err.Error()}, nil
	}
	return s, nil
}

// failures are reasons of kubelet for a container that it cannot start, some of
// which pass.
var failures = []string{
	"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "InvalidImageName", "ErrImageNeverPull", "ErrImagePull",
	"ImagePullBackOff",
}

func containerSeen(pod *corev1.Pod, name string) seen {
	if pod.DeletionTimestamp != nil {
		return seen{problem: "its pod is being replaced"}
	}
	i := slices.IndexFunc(pod.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.Name == name })
	if i < 0 {
		// Kubelet makes the pod once the one before has ended, and may report its containers 10 s
		// later. Until then, whatever answers its health port is the new one.
		return seen{problem: "kubelet has not started it", unreported: pod.Status.Phase == corev1.PodPending}
	}
	c := pod.Status.ContainerStatuses[i]
	ended := func(t *corev1.ContainerStateTerminated) seen {
		return seen{problem: fmt.Sprintf("it exited with code %d (%s)", t.ExitCode, t.Reason), message: strings.TrimSpace(t.Message)}
	}
	switch {
	case c.State.Running != nil:
		return seen{well: containerName(pod, c.RestartCount)}
	case c.State.Terminated != nil:
		return ended(c.State.Terminated)
	case c.State.Waiting == nil:
		return seen{problem: "kubelet has not started it"}
	case c.State.Waiting.Reason == "CrashLoopBackOff":
		last := c.LastTerminationState.Terminated
		if last == nil {
			return seen{problem: "it keeps exiting", crashed: true}
		}
		s := ended(last)
		if last.ExitCode == 0 {
			// kube-scheduler exits with code 0 only when it is asked to stop. A restored
			// manifest has the UID that it had before, and kubelet applies the back-off of that
			// pod's container even if it stopped the container itself.
			s.problem += "; kubelet restarts it after its back-off: " + c.State.Waiting.Message
			s.backOff = true
			return s
		}
		s.problem += ", repeatedly"
		s.crashed = true
		return s
	}
	return seen{
		problem: strings.TrimSuffix(c.State.Waiting.Reason+": "+c.State.Waiting.Message, ": "),
		failing: slices.Contains(failures, c.State.Waiting.Reason),
	}
}

// containerName names a container of the pod, from its start to its end.
func containerName(pod *corev1.Pod, restarts int32) string {
	return fmt.Sprintf("%s/%d", pod.UID, restarts)
}

func (m *Mirror) askHealth(ctx context.Context, url string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := m.http.Do(request)
	if err != nil {
		return err
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, 1024))
	if err := errors.Join(err, response.Body.Close()); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s: %s", url, response.Status, strings.TrimSpace(string(body)))
	}
	return nil
}

// logTail returns the last lines of the program's newest log, "" when there is
// none to be read.
func (m *Mirror) logTail(want Want) string {
	if m.config.LogDir == "" {
		return ""
	}
	pattern := filepath.Join(m.config.LogDir, want.Namespace+"_"+want.Name+"-"+m.config.Node+"_*", want.Container, "*.log")
	files, err := filepath.Glob(pattern)
	if err != nil {
		return ""
	}
	var newest string
	var at time.Time
	for _, file := range files {
		if info, err := os.Stat(file); err == nil && info.Size() > 0 && info.ModTime().After(at) {
			newest, at = file, info.ModTime()
		}
	}
	return tailOf(newest)
}

var (
	klogError = regexp.MustCompile(`^[EF][0-9]{4} `)
	// encoded is what may be a part of a key of which the beginning is missing.
	encoded = regexp.MustCompile(`[A-Za-z0-9+/=]{64,}`)
)

// withoutKeys takes private keys out of what a scheduler said: from -v=2 on it logs
// its whole configuration when it starts.
func withoutKeys(text string) string {
	return encoded.ReplaceAllString(Redact(text), "REDACTED")
}

func tailOf(file string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close() //nolint:errcheck // only read
	const window = 64 << 10
	from := int64(0)
	if info, err := f.Stat(); err == nil && info.Size() > window {
		if from, err = f.Seek(-window, io.SeekEnd); err != nil {
			return ""
		}
	}
	data, err := io.ReadAll(io.LimitReader(f, window))
	if err != nil {
		return ""
	}
	if from > 0 { // in the middle of a line
		_, data, _ = bytes.Cut(data, []byte("\n"))
	}
	var lines []string
	begun := ""
	for line := range strings.Lines(string(data)) {
		// The runtime writes "<time> <stream> <F or P> <text>", where P says that the
		// line goes on in the next.
		parts := strings.SplitN(strings.TrimRight(line, "\n"), " ", 4)
		if len(parts) != 4 {
			continue
		}
		begun += parts[3]
		if parts[2] == "P" {
			continue
		}
		if text := strings.TrimSpace(begun); text != "" {
			lines = append(lines, withoutKeys(text))
		}
		begun = ""
	}
	// klog begins errors with E or F; what led to them is seldom what helps.
	if wrong := slices.DeleteFunc(slices.Clone(lines), func(l string) bool { return !klogError.MatchString(l) }); len(wrong) > 0 {
		lines = wrong
	}
	text := strings.Join(lines[max(0, len(lines)-logLines):], " | ")
	return text[max(0, len(text)-logBytes):]
}
