//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/remotepool"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// webhookTimeout is how long the webhook may take to notice a change, or to be
// back.
const webhookTimeout = 3 * time.Minute

// poolStage begins a test of the remote pool: a namespace that may use the pool,
// whose token is in the cluster. A namespace other than the guide's is removed
// afterwards.
func poolStage(t *testing.T, namespace string) (context.Context, *testenv.Env) {
	t.Helper()
	ctx := begin(t, guide)
	p := lab.In(namespace)
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		if t.Failed() {
			t.Log(poolSituation(ctx, p))
		}
		clean := p.Pods.EmptyNamespace
		if namespace != demos.PoolNamespace {
			clean = p.Pods.RemoveNamespace
		}
		if err := clean(ctx); err != nil {
			t.Errorf("after the test: %v", err)
		}
	})
	importToken(t, ctx)
	must(t, p.Pods.EnsureNamespace(ctx))
	must(t, p.Pods.AllowPool(ctx, true))
	must(t, p.Pool.Wait(ctx, webhookTimeout))
	return ctx, p
}

// importToken gives the pool's token to the cluster, which a test before may have
// taken away.
func importToken(t *testing.T, ctx context.Context) {
	t.Helper()
	text, err := product.ImportToken(ctx)
	if err != nil {
		t.Fatalf("%v: %s", err, text)
	}
}

// poolSituation describes the pool, for a test that failed.
func poolSituation(ctx context.Context, p *testenv.Env) string {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var b strings.Builder
	for _, args := range [][]string{
		{"get", "pods,secrets,resourcequotas", "--namespace", p.Pods.Namespace},
		{"get", "events", "--namespace", p.Pods.Namespace, "--sort-by", ".lastTimestamp"},
		{"logs", "--namespace", product.PoolNamespace, "--selector", "app.kubernetes.io/name=bitfusion-webhook",
			"--tail", "40", "--prefix"},
		{"logs", "--namespace", product.PoolServer, "deployment/" + product.PoolServer, "--tail", "20"},
	} {
		text, err := p.CLI.Kubectl(ctx, args...)
		fmt.Fprintf(&b, "$ kubectl %s\n%s\n", strings.Join(args, " "), text)
		if err != nil {
			fmt.Fprintf(&b, "%v\n", err)
		}
	}
	return b.String()
}

// example returns the pod of an example under a name.
func example(t *testing.T, p *testenv.Env, file, name string) *corev1.Pod {
	t.Helper()
	pod, err := p.Pods.Example("bitfusion/" + file)
	must(t, err)
	pod.Name = name
	return pod
}

// holder is a pod that keeps a share of a GPU until it is deleted.
func holder(t *testing.T, p *testenv.Env, file, name string) *corev1.Pod {
	t.Helper()
	pod := example(t, p, file, name)
	pod.Spec.Containers[0].Command = []string{"sleep infinity"}
	return pod
}

// tryOut asks the API server what would become of a pod.
func tryOut(ctx context.Context, p *testenv.Env, pod *corev1.Pod) (*corev1.Pod, error) {
	return p.Client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
}

// ended waits until pods have ended well.
func ended(t *testing.T, p *testenv.Env, names ...string) {
	t.Helper()
	must(t, p.Pods.WaitPhase(t.Context(), podTimeout, corev1.PodSucceeded, names...))
}

// logHas checks what a container printed.
func logHas(t *testing.T, p *testenv.Env, pod, container string, wants ...string) {
	t.Helper()
	text, err := p.Pods.Logs(t.Context(), pod, container)
	must(t, err)
	for _, want := range wants {
		if !strings.Contains(text, want) {
			t.Errorf("container %s of pod %s printed no %q:\n%s", container, pod, want, text)
		}
	}
}

// client450 is the tree of the client that the examples choose.
const client450 = "/bitfusion/bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb"

// TestPoolGuide runs the pods of the guide, its Job and its Deployment through the
// client (W1-W3, W8-W10, S6: several containers, init containers, commands of
// several words, a workload that is not root).
func TestPoolGuide(t *testing.T) {
	ctx, p := poolStage(t, demos.PoolNamespace)
	before, err := product.PoolBooks(ctx)
	must(t, err)
	pods := []*corev1.Pod{
		example(t, p, "pod.yaml", "bf-pkgs"),
		example(t, p, "pod-memory.yaml", "bf-memory"),
		example(t, p, "pod-filter.yaml", "bf-filter"),
		example(t, p, "multi-container.yaml", "bf-multi"),
		example(t, p, "injection.yaml", "bf-injection"),
		nobody(example(t, p, "pod.yaml", "bf-nobody")),
	}
	_, err = p.Pods.Create(ctx, pods...)
	must(t, err)
	for _, file := range []string{"job.yaml", "deployment.yaml"} {
		_, err := p.CLI.Kubectl(ctx, "create", "--filename", p.CLI.Example("bitfusion/"+file))
		must(t, err)
	}
	ended(t, p, namesOf(pods)...)

	for name, locked := range map[string]string{
		"bf-pkgs": "Locked 1 GPUs with partial memory 0.5,", "bf-memory": "Locked 1 GPUs with partial memory 0.495,",
		"bf-filter": "Requesting GPUs [", "bf-nobody": "Locked 1 GPUs with partial memory 0.5,",
		"bf-injection": "- server 1 [10.96.56.2:56001]",
	} {
		logHas(t, p, name, "bf-pkgs", locked, "Query server 10.96.56.1:56001 gpu availability", "Model:       inception3",
			"total images/sec: 199.65")
	}
	logHas(t, p, "bf-filter", "bf-pkgs", "physical GPU (bf-server, ")
	logHas(t, p, "bf-multi", "warm-up", "partial memory 0.1,", "Model:       trivial")
	logHas(t, p, "bf-multi", "train", "partial memory 0.25,", "Model:       inception3")
	logHas(t, p, "bf-multi", "evaluate", "Model:       resnet50", "Batch size:  64")

	must(t, poll.Until(ctx, podTimeout, "the job to be complete", func(ctx context.Context) error {
		job, err := p.Client.BatchV1().Jobs(p.Pods.Namespace).Get(ctx, "bf-job", metav1.GetOptions{})
		if err == nil && !slices.ContainsFunc(job.Status.Conditions, func(c batchv1.JobCondition) bool {
			return c.Type == batchv1.JobComplete && c.Status == corev1.ConditionTrue
		}) {
			err = fmt.Errorf("its status is %+v", job.Status)
		}
		return err
	}))
	for _, of := range []string{"job/bf-job", "deployment/bf-deployment"} {
		must(t, poll.Until(ctx, podTimeout, of+" to have run", func(ctx context.Context) error {
			text, err := p.CLI.Kubectl(ctx, "logs", of, "--container", "bf-pkgs", "--namespace", p.Pods.Namespace)
			if err == nil && (!strings.Contains(text, "partial memory 0.25,") || !strings.Contains(text, "total images/sec")) {
				err = fmt.Errorf("it has printed %q", text)
			}
			return err
		}))
	}
	after, err := product.PoolBooks(ctx)
	must(t, err)
	// Five pods, three containers of one, a job and one run of a Deployment.
	if granted := after.Granted - before.Granted; granted < 10 || after.Refused != before.Refused {
		t.Errorf("the pool granted %d requests and refused %d, want 10 or more, and none", granted, after.Refused-before.Refused)
	}
	checkShape(t, p)
}

// nobody makes a pod as the restricted level of pod security wants it.
func nobody(pod *corev1.Pod) *corev1.Pod {
	restrict(&pod.Spec)
	pod.Annotations[pool.HomeAnnotation] = "/home/nobody"
	c := &pod.Spec.Containers[0]
	c.Env = append(c.Env, corev1.EnvVar{Name: "HOME", Value: "/home/nobody"})
	return pod
}

func restrict(spec *corev1.PodSpec) {
	spec.SecurityContext = &corev1.PodSecurityContext{
		RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](65534),
		SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
	for i := range spec.Containers {
		spec.Containers[i].SecurityContext = &corev1.SecurityContext{
			AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		}
	}
}

// checkShape compares the guide's first pod with section 4.3 of the guide (W4: its
// annotations are all there).
func checkShape(t *testing.T, p *testenv.Env) {
	t.Helper()
	made, err := p.Pods.API.Get(t.Context(), "bf-pkgs", metav1.GetOptions{})
	must(t, err)
	for key, want := range map[string]string{
		pool.StatusAnnotation: pool.StatusInjected, pool.ModeAnnotation: "all", pool.OSAnnotation: "ubuntu18",
		pool.VersionAnnotation: "450",
	} {
		if got := made.Annotations[key]; got != want {
			t.Errorf("annotation %s is %q, want %q", key, got, want)
		}
	}
	c := made.Spec.Containers[0]
	want := []string{"/bin/bash", "-c", client450 + "/usr/bin/bitfusion run -n 1 -p 0.500000  -- python " +
		"/benchmark/scripts/tf_cnn_benchmarks/tf_cnn_benchmarks.py --local_parameter_device=gpu --batch_size=32 --model=inception3"}
	if !slices.Equal(c.Command, want) {
		t.Errorf("command %q, want %q", c.Command, want)
	}
	env := map[string]string{}
	for _, e := range c.Env {
		env[e.Name] = e.Value
	}
	if want := client450 + "/opt/bitfusion/lib/x86_64-linux-gnu/bitfusion/lib/"; env["LD_LIBRARY_PATH"] != want {
		t.Errorf("LD_LIBRARY_PATH is %q, want %q", env["LD_LIBRARY_PATH"], want)
	}
	units := corev1.ResourceList{pool.Resource: resource.MustParse("50")}
	for name, list := range map[string]corev1.ResourceList{"limits": c.Resources.Limits, "requests": c.Resources.Requests} {
		got := list[pool.Resource]
		if len(list) != 1 || !got.Equal(units[pool.Resource]) {
			t.Errorf("%s are %v, want 50 of %s alone", name, list, pool.Resource)
		}
	}
	var mounts []string
	for _, m := range c.VolumeMounts {
		mounts = append(mounts, m.MountPath)
	}
	for _, path := range []string{"/benchmark", "/etc/bitfusion/tls/ca.crt", "/root/.bitfusion/client.yaml", "/etc/bitfusion/servers.conf",
		"/bitfusion", "/opt/bitfusion"} {
		if !slices.Contains(mounts, path) {
			t.Errorf("nothing is mounted at %s; mounts are %v", path, mounts)
		}
	}
	if len(made.Spec.InitContainers) != 1 || made.Spec.InitContainers[0].Name != "populate" ||
		made.Spec.InitContainers[0].Image != remotepool.ClientImage {
		t.Errorf("init containers: %+v, want populate of %s", made.Spec.InitContainers, remotepool.ClientImage)
	}
}

// TestPoolQuota is section 5 of the guide: 50 of 100 for memory and for percent,
// and a third pod is refused with the reason.
func TestPoolQuota(t *testing.T) {
	ctx, p := poolStage(t, demos.PoolNamespace)
	_, err := p.CLI.Kubectl(ctx, "create", "--filename", p.CLI.Example("bitfusion/quota.yaml"))
	must(t, err)
	used := func(want string) {
		t.Helper()
		must(t, poll.Until(ctx, podTimeout, "the quota to count "+want, func(ctx context.Context) error {
			quota, err := p.Client.CoreV1().ResourceQuotas(p.Pods.Namespace).Get(ctx, "bitfusion-quota", metav1.GetOptions{})
			if err != nil {
				return err
			}
			got, hard := quota.Status.Used["requests."+pool.Resource], quota.Status.Hard["requests."+pool.Resource]
			if got.String() != want || hard.String() != "100" {
				return fmt.Errorf("it counts %s of %s", got.String(), hard.String())
			}
			return nil
		}))
	}
	used("0")
	for _, file := range []string{"pod-memory.yaml", "pod.yaml"} {
		_, err := p.Pods.Create(ctx, holder(t, p, file, "alone"))
		must(t, err)
		used("50")
		must(t, p.Pods.Delete(ctx, "alone"))
		used("0")
	}
	_, err = p.Pods.Create(ctx, holder(t, p, "pod-memory.yaml", "by-memory"), holder(t, p, "pod.yaml", "by-percent"))
	must(t, err)
	used("100")
	_, err = p.Pods.Create(ctx, holder(t, p, "pod.yaml", "third"))
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota: bitfusion-quota, requested: "+
		"requests.bitfusion.io/gpu=50, used: requests.bitfusion.io/gpu=100") {
		t.Errorf("the third pod: %v; want that the quota is exceeded", err)
	}
	must(t, p.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "by-memory", "by-percent"))
	text, err := p.CLI.Kubectl(ctx, "divvy", "inspect")
	must(t, err)
	if !strings.Contains(text, p.Pods.Namespace) || !strings.Contains(text, "100") {
		t.Errorf("inspect shows nothing of the pool's use in %s:\n%s", p.Pods.Namespace, text)
	}

	// What the quota can never hold is refused with another reason.
	large := example(t, p, "pod.yaml", "large")
	large.Spec.Containers[0].Resources.Limits[pool.AmountResource] = resource.MustParse("3")
	if _, err := p.Pods.Create(ctx, large); err == nil || !strings.Contains(err.Error(), "bitfusion-quota") ||
		!strings.Contains(err.Error(), "150") {
		t.Errorf("a pod of 150 units under a quota of 100: %v", err)
	}
}

// TestAnotherClient gives the webhook the catalog of the examples while it runs,
// and runs pods that choose its client of another maker.
func TestAnotherClient(t *testing.T) {
	ctx, p := poolStage(t, demos.PoolNamespace)
	const name, key = "bwki-bitfusion-client-configmap", "bitfusion-client-config.yaml"
	maps := p.Client.CoreV1().ConfigMaps(product.PoolNamespace)
	config, err := maps.Get(ctx, name, metav1.GetOptions{})
	must(t, err)
	set := func(ctx context.Context, catalog string) error {
		patch, err := json.Marshal(map[string]any{"data": map[string]string{key: catalog}})
		if err == nil {
			_, err = maps.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
		}
		return errors.Join(err, p.Pool.PokeWebhook(ctx))
	}
	original := config.Data[key]

	catalog, err := os.ReadFile(p.CLI.Example("catalog/rgpu.yaml"))
	must(t, err)
	plain, err := p.Pods.Example("catalog/rgpu-pod.yaml")
	must(t, err)
	pod := example(t, p, "pod-filter.yaml", "other-client")
	for _, key := range []string{pool.OSAnnotation, pool.VersionAnnotation} {
		pod.Annotations[key] = plain.Annotations[key]
	}
	pod.Spec.Containers[0].Command = []string{"/bin/bash", "-c", `echo "$RGPU_GPUS GPUs, $0"`, "$(HOME) && $x"}
	unknown := func(ctx context.Context) error {
		_, err := tryOut(ctx, p, pod)
		switch {
		case err == nil:
			return errors.New("a client that is not in the catalog is admitted")
		case !strings.Contains(err.Error(), `unknown client "rgpu-1.0"`):
			return fmt.Errorf("a client that is not in the catalog is not named: %w", err)
		}
		return nil
	}
	// everyReplica waits until all of them know the catalog.
	everyReplica := func(ctx context.Context, answer func(context.Context) error) error {
		poked := time.Now()
		return poll.Until(ctx, webhookTimeout, "every replica to know the catalog", func(ctx context.Context) error {
			if time.Since(poked) > 5*time.Second {
				poked = time.Now()
				if err := p.Pool.PokeWebhook(ctx); err != nil {
					return err
				}
			}
			for range 6 { // whichever replica answers
				if err := answer(ctx); err != nil {
					return err
				}
			}
			return nil
		})
	}
	must(t, unknown(ctx))
	t.Cleanup(func() {
		ctx := context.WithoutCancel(ctx)
		if err := errors.Join(set(ctx, original), everyReplica(ctx, unknown)); err != nil {
			t.Errorf("put the catalog back: %v", err)
		}
	})
	must(t, set(ctx, string(catalog)))
	must(t, everyReplica(ctx, func(ctx context.Context) error {
		_, err := tryOut(ctx, p, pod)
		return err
	}))
	_, err = p.Pods.Create(ctx, pod, plain)
	must(t, err)
	ended(t, p, pod.Name, plain.Name)
	logHas(t, p, plain.Name, plain.Spec.Containers[0].Name, "rgpu: attached 1 GPUs, 50 percent of each", "total images/sec")
	logHas(t, p, pod.Name, "bf-pkgs", "rgpu: attached 1 GPUs, 50 percent of each, picked by server.hostname=bf-server", "1 GPUs, ")
	logHas(t, p, pod.Name, "bf-pkgs", " && $x")
}

// TestWebhookKilled kills both replicas in the middle of creating 200 unrelated
// pods and 50 of the pool (V1, W14, W22: every unrelated pod is created, and none
// of the pool without its client).
func TestWebhookKilled(t *testing.T) {
	ctx, p := poolStage(t, demos.PoolNamespace)
	nowhere := map[string]string{"divvy-e2e/nowhere": "true"}
	var refused atomic.Int64
	batch := func(from, unrelated, ofPool int) {
		t.Helper()
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(8)
		// These first: the webhook is back within a second or two.
		for i := range ofPool {
			pod := example(t, p, "pod.yaml", fmt.Sprintf("pool-%02d", from*ofPool+i))
			pod.Spec.Containers[0].Resources.Limits[pool.PercentResource] = resource.MustParse("10")
			if i >= 4 { // the machine is small: only these run
				pod.Spec.NodeSelector = nowhere
			}
			group.Go(func() error {
				// As a controller does, until it is there.
				return poll.Until(ctx, webhookTimeout, "pod "+pod.Name+" to be admitted", func(ctx context.Context) error {
					_, err := p.Pods.Create(ctx, pod)
					if err != nil {
						refused.Add(1)
					}
					return err
				})
			})
		}
		for i := range unrelated {
			group.Go(func() error {
				pod := p.Pods.New(fmt.Sprintf("unrelated-%03d", from*unrelated+i), testenv.Container("app", 0))
				pod.Spec.NodeSelector = nowhere
				_, err := p.Pods.Create(ctx, pod)
				return err
			})
		}
		must(t, group.Wait())
	}
	batch(0, 100, 25)
	must(t, p.Pool.KillWebhook(ctx))
	batch(1, 100, 25)
	t.Logf("pods of the pool were refused %d times while the webhook was away", refused.Load())
	if refused.Load() == 0 {
		t.Error("no pod of the pool was refused: the webhook was never away")
	}

	list, err := p.Client.CoreV1().Pods(p.Pods.Namespace).List(ctx, metav1.ListOptions{})
	must(t, err)
	count := map[string]int{}
	var run []string
	for _, pod := range list.Items {
		kind, _, _ := strings.Cut(pod.Name, "-")
		count[kind]++
		if kind != "pool" {
			continue
		}
		c := pod.Spec.Containers[0]
		if pool.Asks(c.Resources) || len(pod.Spec.InitContainers) != 1 ||
			!strings.HasPrefix(strings.Join(c.Command, " "), "/bin/bash -c "+client450) {
			t.Errorf("pod %s has no client: init containers %d, command %q, resources %v", pod.Name, len(pod.Spec.InitContainers),
				c.Command, c.Resources)
		}
		if pod.Spec.NodeSelector == nil {
			run = append(run, pod.Name)
		}
	}
	if count["unrelated"] != 200 || count["pool"] != 50 {
		t.Errorf("there are %v pods, want 200 unrelated and 50 of the pool", count)
	}
	ended(t, p, run...)
	for _, name := range run {
		logHas(t, p, name, "bf-pkgs", "Locked 1 GPUs", "total images/sec")
	}
	must(t, p.Pool.Wait(ctx, webhookTimeout))
}

// TestCertificatesRotate changes certificate and CA under load: no admission fails
// (P5-P7, V1). Meanwhile the token goes from a namespace whose last pod is gone
// (S2).
func TestCertificatesRotate(t *testing.T) {
	ctx, p := poolStage(t, demos.PoolNamespace)
	_, err := p.Pods.Create(ctx, holder(t, p, "pod.yaml", "last"))
	must(t, err)
	copies(t, p, 3)
	must(t, p.Pods.Delete(ctx, "last"))

	loadCtx, stop := context.WithCancel(ctx)
	defer stop()
	var admitted atomic.Int64
	var load errgroup.Group
	pod := example(t, p, "pod.yaml", "under-load")
	for range 4 {
		load.Go(func() error {
			for loadCtx.Err() == nil {
				made, err := tryOut(loadCtx, p, pod)
				if err != nil {
					if loadCtx.Err() == nil {
						return err
					}
					break // the load is over
				}
				if made.Annotations[pool.StatusAnnotation] != pool.StatusInjected {
					return fmt.Errorf("a pod was admitted as it was: %v", made.Annotations)
				}
				admitted.Add(1)
			}
			return nil
		})
	}
	before := served(t, ctx, p)
	rotate(t, ctx, p, "cert")
	must(t, poll.Until(ctx, webhookTimeout, "both replicas to serve another certificate", func(ctx context.Context) error {
		now, err := certificates(ctx, p)
		if err != nil {
			return err
		}
		for address, c := range now {
			if slices.ContainsFunc(before, c.Equal) {
				return fmt.Errorf("%s still serves the old one", address)
			}
		}
		return nil
	}))
	bundles, err := p.Pool.CABundles(ctx)
	must(t, err)
	rotate(t, ctx, p, "ca")
	must(t, poll.Until(ctx, 2*webhookTimeout, "the API server to know another CA alone", func(ctx context.Context) error {
		now, err := p.Pool.CABundles(ctx)
		if err != nil {
			return err
		}
		for name, bundle := range now {
			if n := strings.Count(bundle, "BEGIN CERTIFICATE"); n != 1 || bundle == bundles[name] {
				return fmt.Errorf("%s has %d CAs, changed: %t", name, n, bundle != bundles[name])
			}
		}
		_, err = certificates(ctx, p)
		return err
	}))
	stop()
	if err := load.Wait(); err != nil {
		t.Errorf("an admission failed after %d: %v", admitted.Load(), err)
	}
	t.Logf("%d pods were admitted meanwhile", admitted.Load())
	if admitted.Load() < 50 {
		t.Errorf("%d pods were admitted meanwhile: that was no load", admitted.Load())
	}
	copies(t, p, 0)
}

// rotate asks the webhooks for another certificate or CA.
func rotate(t *testing.T, ctx context.Context, p *testenv.Env, what string) {
	t.Helper()
	_, err := p.CLI.Kubectl(ctx, "annotate", "--overwrite", "secret", testenv.WebhookSecret, "--namespace", product.PoolNamespace,
		fmt.Sprintf("divvy.dev/rotate=%s-%d", what, time.Now().Unix()))
	must(t, err)
}

// certificates returns what each replica serves, checked as the API server does.
func certificates(ctx context.Context, p *testenv.Env) (map[string]*x509.Certificate, error) {
	bundles, err := p.Pool.CABundles(ctx)
	if err != nil {
		return nil, err
	}
	pods, err := p.Pool.WebhookPods(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]*x509.Certificate{}
	for _, pod := range pods {
		for name, bundle := range bundles {
			roots := x509.NewCertPool()
			if !roots.AppendCertsFromPEM([]byte(bundle)) {
				return nil, fmt.Errorf("%s has no CA", name)
			}
			dialer := tls.Dialer{
				NetDialer: &net.Dialer{Timeout: 5 * time.Second},
				Config: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: testenv.WebhookService + "." +
					product.PoolNamespace + ".svc"},
			}
			conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(pod.Status.PodIP, "8443"))
			if err != nil {
				return nil, fmt.Errorf("%s under the CA of %s: %w", pod.Name, name, err)
			}
			if secure, ok := conn.(*tls.Conn); ok {
				found[pod.Name] = secure.ConnectionState().PeerCertificates[0]
			}
			if err := conn.Close(); err != nil {
				return nil, err
			}
		}
	}
	if len(found) != 2 {
		return nil, fmt.Errorf("%d replicas serve, want 2", len(found))
	}
	return found, nil
}

func served(t *testing.T, ctx context.Context, p *testenv.Env) []*x509.Certificate {
	t.Helper()
	now, err := certificates(ctx, p)
	must(t, err)
	var all []*x509.Certificate
	for _, c := range now {
		all = append(all, c)
	}
	return all
}

// copies waits until the namespace has so many secrets of the token, the same as
// their source.
func copies(t *testing.T, p *testenv.Env, want int) {
	t.Helper()
	must(t, poll.Until(t.Context(), podTimeout, fmt.Sprintf("%d secrets of the token in %s", want, p.Pods.Namespace),
		func(ctx context.Context) error {
			found, err := p.Pods.TokenSecrets(ctx)
			if err != nil {
				return err
			}
			if len(found) != want {
				return fmt.Errorf("there are %d", len(found))
			}
			for name, secret := range found {
				source, err := p.Client.CoreV1().Secrets(product.TokenNamespace).Get(ctx, name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				for key, data := range source.Data {
					if !bytes.Equal(secret.Data[key], data) {
						return fmt.Errorf("%s differs from its source in %s", name, key)
					}
				}
			}
			return nil
		}))
}

// TestCredentials: the token is brought, changed and taken away, and refused where
// nobody allowed it (S1-S5).
func TestCredentials(t *testing.T) {
	ctx, p := poolStage(t, "divvy-e2e-credentials")
	must(t, p.Pods.AllowPool(ctx, false))
	must(t, poll.Until(ctx, webhookTimeout, "the pod to be refused", func(ctx context.Context) error {
		_, err := tryOut(ctx, p, example(t, p, "pod.yaml", "stranger"))
		if err == nil {
			return errors.New("it would be admitted")
		}
		if !apierrors.IsForbidden(err) ||
			!strings.Contains(err.Error(), "kubectl label namespace "+p.Pods.Namespace+" "+product.PoolLabel+"=allowed") {
			return fmt.Errorf("the refusal has no way out: %w", err)
		}
		return nil
	}))
	copies(t, p, 0)

	must(t, p.Pods.AllowPool(ctx, true))
	user := holder(t, p, "pod.yaml", "user")
	user.Spec.Containers[0].Command = []string{"trap 'exit 0' TERM; while true; do sleep 1; done"}
	// The servers restart with another token, which ends the command; a pod that ended
	// has no use for the copies.
	user.Spec.RestartPolicy = corev1.RestartPolicyAlways
	must(t, poll.Until(ctx, webhookTimeout, "the pod to be admitted", func(ctx context.Context) error {
		_, err := p.Pods.Create(ctx, user)
		return err
	}))
	copies(t, p, 3)
	must(t, p.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "user"))

	// Another token: the copies follow, and the next pod uses it.
	text := fmt.Sprintf("changed-%d", time.Now().UnixNano())
	must(t, product.SetToken(ctx, lab.Cluster, text))
	importToken(t, ctx)
	copies(t, p, 3)
	next := example(t, p, "pod.yaml", "next")
	_, err := p.Pods.Create(ctx, next)
	must(t, err)
	ended(t, p, "next")
	logHas(t, p, "next", "bf-pkgs", "Locked 1 GPUs")

	// The single secret of the first clients.
	old := example(t, p, "pod.yaml", "old-client")
	old.Annotations[pool.VersionAnnotation] = "250"
	_, err = p.Pods.Create(ctx, old)
	must(t, err)
	ended(t, p, "old-client")
	logHas(t, p, "old-client", "bf-pkgs", "Locked 1 GPUs", "total images/sec")

	// No log of the webhook tells the token.
	logs, err := p.CLI.Kubectl(ctx, "logs", "--namespace", product.PoolNamespace, "--selector", "app.kubernetes.io/name=bitfusion-webhook",
		"--tail", "-1")
	must(t, err)
	if strings.Contains(logs, text) || logs == "" {
		t.Errorf("the webhook's log of %d bytes tells the token, or is none", len(logs))
	}

	// A permission that is taken back takes the copies along at once, under a pod
	// that has a use for them.
	_, err = p.Pods.Create(ctx, holder(t, p, "pod.yaml", "stays"))
	must(t, err)
	must(t, p.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "stays"))
	must(t, p.Pods.AllowPool(ctx, false))
	copies(t, p, 0)
	must(t, p.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "stays"))
}

// TestPoolUnitsSurviveKubelet: a restart of kubelet makes the units be offered
// again (D1).
func TestPoolUnitsSurviveKubelet(t *testing.T) {
	ctx, p := poolStage(t, demos.PoolNamespace)
	_, err := p.Pods.Create(ctx, holder(t, p, "pod.yaml", "stays"))
	must(t, err)
	must(t, p.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "stays"))
	daemon, err := p.Divvy.Pod(ctx, product.PoolDaemon)
	must(t, err)
	must(t, lab.Cluster.Restart(ctx, cluster.Kubelet))
	must(t, p.Pool.Wait(ctx, settingTimeout))
	_, err = p.Pods.Create(ctx, example(t, p, "pod.yaml", "after"))
	must(t, err)
	ended(t, p, "after")
	must(t, p.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, "stays"))
	now, err := p.Divvy.Pod(ctx, product.PoolDaemon)
	must(t, err)
	if now.UID != daemon.UID || now.Status.ContainerStatuses[0].RestartCount != daemon.Status.ContainerStatuses[0].RestartCount {
		t.Errorf("the daemon was started again: %s", testenv.Describe(now))
	}
}

// TestPoolLeavesOthersAlone: namespaces of the system and of the webhook itself are
// left alone, and a dry run of any pod works (W24, S5, V1).
func TestPoolLeavesOthersAlone(t *testing.T) {
	ctx, p := poolStage(t, "divvy-e2e-untouched")
	for _, namespace := range []string{"kube-system", product.PoolNamespace, product.Namespace} {
		other := lab.In(namespace)
		pod := example(t, other, "pod.yaml", "untouched")
		pod.Spec.Volumes, pod.Spec.Containers[0].VolumeMounts = nil, nil
		restrict(&pod.Spec)
		made, err := tryOut(ctx, other, pod)
		must(t, err)
		if made.Annotations[pool.StatusAnnotation] != "" || len(made.Spec.InitContainers) != 0 ||
			!slices.Equal(made.Spec.Containers[0].Command, pod.Spec.Containers[0].Command) {
			t.Errorf("a pod in %s was changed: %v, %v", namespace, made.Annotations, made.Spec.Containers[0].Command)
		}
	}
	unrelated := p.Pods.New("unrelated", testenv.Container("app", 0))
	made, err := tryOut(ctx, p, unrelated)
	must(t, err)
	if len(made.Spec.InitContainers) != 0 || len(made.Annotations) != 0 {
		t.Errorf("an unrelated pod was changed: %v", made)
	}
	made, err = tryOut(ctx, p, example(t, p, "pod.yaml", "tried"))
	must(t, err)
	if made.Annotations[pool.StatusAnnotation] != pool.StatusInjected {
		t.Errorf("a dry run of a pod of the pool shows no client: %v", made.Annotations)
	}
	copies(t, p, 0)
}

// TestPoolRefusals: what is written wrongly is told at once, with what would be
// right (W13, W16-W23, W30, V3, V5).
func TestPoolRefusals(t *testing.T) {
	ctx, p := poolStage(t, demos.PoolNamespace)
	limit := func(name corev1.ResourceName, value string) func(*corev1.Pod) {
		return func(pod *corev1.Pod) { pod.Spec.Containers[0].Resources.Limits[name] = resource.MustParse(value) }
	}
	note := func(key, value string) func(*corev1.Pod) {
		return func(pod *corev1.Pod) { pod.Annotations[key] = value }
	}
	without := func(key string) func(*corev1.Pod) {
		return func(pod *corev1.Pod) { delete(pod.Annotations, key) }
	}
	for name, test := range map[string]struct {
		change func(*corev1.Pod)
		wants  []string
	}{
		"percent too large":  {limit(pool.PercentResource, "101"), []string{"bf-pkgs", pool.PercentResource, "101"}},
		"no whole amount":    {limit(pool.AmountResource, "1500m"), []string{"bf-pkgs", pool.AmountResource}},
		"percent and memory": {limit(pool.MemoryResource, "8000M"), []string{"bf-pkgs", pool.PercentResource, pool.MemoryResource}},
		"unknown version":    {note(pool.VersionAnnotation, "451"), []string{pool.VersionAnnotation, "451", "450"}},
		"no version":         {without(pool.VersionAnnotation), []string{pool.VersionAnnotation}},
		"unknown mode":       {note(pool.ModeAnnotation, "injecton"), []string{pool.ModeAnnotation, "injecton"}},
		"no mode":            {without(pool.ModeAnnotation), []string{pool.ModeAnnotation}},
		"status written by hand": {func(pod *corev1.Pod) {
			without(pool.ModeAnnotation)(pod)
			note(pool.StatusAnnotation,
				"injected")(pod)
		}, []string{pool.AmountResource}},
		"filter with shell text": {note(pool.FilterAnnotation, "a=b;id"), []string{pool.FilterAnnotation}},
		"more than any node has": {limit(pool.AmountResource, "21"), []string{"1050", "1000"}},
	} {
		t.Run(name, func(t *testing.T) {
			pod := example(t, p, "pod.yaml", "refused")
			test.change(pod)
			_, err := p.Pods.Create(ctx, pod)
			if err == nil {
				t.Fatal("it was created")
			}
			for _, want := range test.wants {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the refusal has no %q: %v", want, err)
				}
			}
		})
	}
}
