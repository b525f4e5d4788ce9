package demos

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/pool"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// PoolValues are the values of a remote pool, NoCardsValues those of a cluster
// without cards of its own, and PoolNamespace is where the guide's pods are.
const (
	PoolValues    = "pool.yaml"
	NoCardsValues = "no-cards.yaml"
	PoolNamespace = "tensorflow-benchmark"
)

// remote plays the demo of the pool.
type remote struct{ *Demo }

// RemotePool shows GPUs of a remote pool. Its namespace is PoolNamespace.
func (s *Demo) RemotePool(ctx context.Context) error {
	r := &remote{Demo: s}
	for _, part := range []func(context.Context) error{
		r.installed, r.token, r.allowed, r.percent, r.quota, r.filter, r.controllers, r.several, r.refused,
	} {
		if err := part(ctx); err != nil {
			return err
		}
		if err := r.Pods.DeleteAll(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *remote) installed(ctx context.Context) error {
	r.Title("What runs")
	if err := r.Pool.Wait(ctx, configTimeout); err != nil {
		return err
	}
	if _, err := r.Run(ctx, "get", "pods", "--namespace", product.Namespace); err != nil {
		return err
	}
	if _, err := r.Run(ctx, "get", "pods", "--namespace", product.PoolNamespace); err != nil {
		return err
	}
	r.Say(`
A small daemon offers units of the pool on every node: 100 are one GPU. The
webhooks run twice, and know the memory of one GPU, 16000 MB.`)
	_, err := r.Offer(ctx, pool.Resource, testenv.PoolUnits)
	return err
}

// token imports the token as an administrator does who has downloaded it.
func (r *remote) token(ctx context.Context) error {
	r.Title("The pool's token")
	r.Say(`An administrator downloads the token of the pool, one archive of three files, and
imports it once.`)
	if err := product.ForgetToken(ctx); err != nil {
		return err
	}
	if _, err := r.Run(ctx, "divvy", "pool", "import", product.TokenFile(), "--namespace", product.TokenNamespace); err != nil {
		return err
	}
	text, err := r.Run(ctx, "get", "secrets", "--namespace", product.TokenNamespace)
	if err != nil {
		return err
	}
	for _, name := range product.TokenSecrets() {
		r.Checks.True("secret "+name, strings.Contains(text, name+" "), "it is in "+product.TokenNamespace)
	}
	text, err = r.Run(ctx, "divvy", "pool", "check")
	if err != nil {
		return err
	}
	for _, server := range product.PoolServers().Servers {
		r.Checks.Contains("pool check", text, server.Address)
	}
	return nil
}

// create runs kubectl create for an example of the guide, and returns what it
// said.
func (r *remote) create(ctx context.Context, example string) (string, error) {
	fmt.Fprintf(r.out, "$ kubectl create --filename examples/bitfusion/%s\n", example)
	text, err := r.CLI.Kubectl(ctx, "create", "--filename", r.CLI.Example("bitfusion/"+example))
	if text != "" {
		fmt.Fprintln(r.out, text)
	}
	return text, err
}

func (r *remote) allowed(ctx context.Context) error {
	r.Title("Who may use the pool")
	r.Say(`Whoever can read the token can use the pool. So it is brought to namespaces alone
that an administrator has labelled; a pod anywhere else is refused.`)
	if err := r.Pods.AllowPool(ctx, false); err != nil {
		return err
	}
	_, err := r.create(ctx, "pod.yaml")
	r.wants("the refusal", err, product.PoolLabel+"=allowed")
	_, err = r.Run(ctx, "label", "namespace", r.Pods.Namespace, product.PoolLabel+"=allowed")
	return err
}

// wants checks that an API call was refused with a reason, and prints it.
func (r *remote) wants(what string, err error, texts ...string) {
	reason := "it was not refused"
	if err != nil {
		reason = err.Error()
		if _, after, ok := strings.Cut(reason, ": exit status 1: "); ok {
			reason = after
		}
		fmt.Fprintln(r.out, reason)
	}
	for _, text := range texts {
		r.Checks.Contains(what, reason, text)
	}
}

// completed waits until a pod has ended well and returns what its container
// printed, which it shows without the benchmark's lines in between.
func (r *remote) completed(ctx context.Context, name, container string) (string, error) {
	if err := r.Pods.WaitPhase(ctx, podTimeout, corev1.PodSucceeded, name); err != nil {
		return "", err
	}
	text, err := r.Pods.Logs(ctx, name, container)
	if err != nil {
		return "", err
	}
	fmt.Fprintf(r.out, "$ kubectl logs %s --namespace %s --container %s\n%s\n", name, r.Pods.Namespace, container, brief(text))
	return text, nil
}

// brief leaves lines out of the middle of the benchmark's output.
func brief(text string) string {
	before, rest, found := strings.Cut(text, "TensorFlow:  1.14\n")
	_, after, ended := strings.Cut(rest, "Done warm up\n")
	if !found || !ended {
		return text
	}
	lines := strings.Split(after, "\n")
	return before + "...\n" + strings.Join(lines[max(0, len(lines)-4):], "\n")
}

func (r *remote) percent(ctx context.Context) error {
	r.Title("Half of a GPU")
	if _, err := r.create(ctx, "pod.yaml"); err != nil {
		return err
	}
	text, err := r.completed(ctx, "bf-pkgs", "bf-pkgs")
	if err != nil {
		return err
	}
	r.Checks.Contains("the client's log", text, "Locked 1 GPUs with partial memory 0.5")
	r.Checks.Contains("the benchmark", text, "total images/sec: 199.65")

	r.Title("What became of the pod")
	made, err := r.Pods.API.Get(ctx, "bf-pkgs", metav1.GetOptions{})
	if err != nil {
		return err
	}
	fmt.Fprintf(r.out, "$ kubectl get pod bf-pkgs --namespace %s --output yaml     (what changed)\n%s\n", r.Pods.Namespace, changed(made))
	c := made.Spec.Containers[0]
	units := c.Resources.Limits[pool.Resource]
	r.Checks.Equal("resources, "+pool.Resource, units.String(), "50")
	r.Checks.True("the command", len(c.Command) == 3 && strings.Contains(c.Command[2], "/usr/bin/bitfusion run -n 1 -p 0.500000 "),
		fmt.Sprintf("%.90q...", c.Command))
	r.Checks.Equal("annotation "+pool.StatusAnnotation, made.Annotations[pool.StatusAnnotation], pool.StatusInjected)
	r.Checks.Equal("annotation "+pool.VersionAnnotation+", as it was", made.Annotations[pool.VersionAnnotation], "450")
	copies, err := r.Pods.TokenSecrets(ctx)
	if err != nil {
		return err
	}
	r.Checks.Equal("secrets brought to the namespace", len(copies), 3)
	return nil
}

// changed shows the parts of a pod that the webhook writes.
func changed(p *corev1.Pod) string {
	type container struct {
		Name         string                       `json:"name"`
		Command      []string                     `json:"command"`
		Env          []corev1.EnvVar              `json:"env,omitempty"`
		Resources    *corev1.ResourceRequirements `json:"resources,omitempty"`
		VolumeMounts []string                     `json:"volumeMounts"`
	}
	show := func(c corev1.Container) container {
		out := container{Name: c.Name, Command: c.Command, Env: c.Env}
		if len(c.Resources.Limits) > 0 {
			out.Resources = &c.Resources
		}
		for _, m := range c.VolumeMounts {
			out.VolumeMounts = append(out.VolumeMounts, m.MountPath+" of "+m.Name)
		}
		return out
	}
	var view struct {
		Annotations    map[string]string `json:"annotations"`
		InitContainers []container       `json:"initContainers"`
		Containers     []container       `json:"containers"`
		Volumes        []string          `json:"volumes"`
	}
	view.Annotations = p.Annotations
	for _, c := range p.Spec.InitContainers {
		view.InitContainers = append(view.InitContainers, show(c))
	}
	for _, c := range p.Spec.Containers {
		view.Containers = append(view.Containers, show(c))
	}
	for _, v := range p.Spec.Volumes {
		view.Volumes = append(view.Volumes, v.Name)
	}
	text, err := yaml.Marshal(view)
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(text))
}

// keep returns the pod of an example under another name, with a command that
// keeps its GPU.
func (r *remote) keep(example, name string) (*corev1.Pod, error) {
	p, err := r.Pods.Example("bitfusion/" + example)
	if err != nil {
		return nil, err
	}
	p.Name = name
	p.Spec.Containers[0].Command = []string{"sleep infinity"}
	return p, nil
}

func (r *remote) quota(ctx context.Context) error {
	r.Title("Quota: one GPU for the namespace")
	if _, err := r.Run(ctx, "apply", "--filename", r.CLI.Example("bitfusion/quota.yaml")); err != nil {
		return err
	}
	defer func() { _ = r.removeQuota(context.WithoutCancel(ctx)) }()
	r.Say(`
A pod by memory and a pod by percent, half a GPU each, that keep what they have:
8000 MB of 16000, and 50 percent.`)
	for i, example := range []string{"pod-memory.yaml", "pod.yaml"} {
		name := []string{"by-memory", "by-percent"}[i]
		p, err := r.keep(example, name)
		if err != nil {
			return err
		}
		if err := r.Start(ctx, p); err != nil {
			return err
		}
		used := fmt.Sprint(50 * (i + 1))
		if err := r.used(ctx, used); err != nil {
			return err
		}
	}
	if _, err := r.Run(ctx, "describe", "quota", "bitfusion-quota", "--namespace", r.Pods.Namespace); err != nil {
		return err
	}
	third, err := r.keep("pod.yaml", "third")
	if err != nil {
		return err
	}
	_, err = r.Pods.Create(ctx, third)
	r.wants("the third pod", err, "exceeded quota: bitfusion-quota", "requested: requests."+pool.Resource+"=50")
	r.Title("What of the pool is requested and allowed")
	text, err := r.Run(ctx, "divvy", "inspect")
	if err != nil {
		return err
	}
	r.Checks.Contains("inspect", text, r.Pods.Namespace)
	books, err := product.PoolBooks(ctx)
	if err != nil {
		return err
	}
	r.Checks.Equal("leases at the pool's servers", len(books.Leases), 2)
	if err := r.Pods.DeleteAll(ctx); err != nil {
		return err
	}
	return r.used(ctx, "0")
}

// used waits until the quota shows so many units in use, and checks it.
func (r *remote) used(ctx context.Context, want string) error {
	var got string
	_ = poll.Until(ctx, podTimeout, "the quota to count "+want, func(ctx context.Context) error { // a difference, not the end of the demo
		q, err := r.Client.CoreV1().ResourceQuotas(r.Pods.Namespace).Get(ctx, "bitfusion-quota", metav1.GetOptions{})
		if err != nil {
			return err
		}
		quantity := q.Status.Used["requests."+pool.Resource]
		if got = quantity.String(); got != want {
			return errors.New("it counts " + got)
		}
		return nil
	})
	r.Checks.Equal("units of the quota in use, of 100", got, want)
	return ctx.Err()
}

func (r *remote) removeQuota(ctx context.Context) error {
	err := r.Client.CoreV1().ResourceQuotas(r.Pods.Namespace).Delete(ctx, "bitfusion-quota", metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func (r *remote) filter(ctx context.Context) error {
	if err := r.removeQuota(ctx); err != nil {
		return err
	}
	r.Title("Which GPUs: filters")
	if _, err := r.create(ctx, "pod-filter.yaml"); err != nil {
		return err
	}
	text, err := r.completed(ctx, "bf-pkgs", "bf-pkgs")
	if err != nil {
		return err
	}
	r.Checks.Contains("the benchmark", text, "physical GPU (bf-server, ")
	none, err := r.Pods.Example("bitfusion/pod-filter.yaml")
	if err != nil {
		return err
	}
	none.Name = "no-such-gpu"
	none.Annotations[pool.FilterAnnotation] = "server.hostname=bf-server server.has-rdma=true"
	if _, err := r.Pods.Create(ctx, none); err != nil {
		return err
	}
	if err := r.Pods.WaitPhase(ctx, podTimeout, corev1.PodFailed, none.Name); err != nil {
		return err
	}
	if text, err = r.Run(ctx, "logs", none.Name, "--namespace", r.Pods.Namespace); err != nil {
		return err
	}
	r.Checks.Contains("the pool's answer to two filters that exclude each other", text, "0 match the filters")
	return nil
}

func (r *remote) controllers(ctx context.Context) error {
	r.Title("A Job and a Deployment")
	defer func() {
		ctx := context.WithoutCancel(ctx)
		_, _ = r.CLI.Kubectl(ctx, "delete", "job/bf-job", "deployment/bf-deployment", "--namespace", r.Pods.Namespace, "--ignore-not-found")
	}()
	if _, err := r.create(ctx, "job.yaml"); err != nil {
		return err
	}
	if _, err := r.create(ctx, "deployment.yaml"); err != nil {
		return err
	}
	if _, err := r.Run(ctx, "wait", "job/bf-job", "--for=condition=Complete", "--namespace", r.Pods.Namespace,
		"--timeout", podTimeout.String()); err != nil {
		return err
	}
	text, err := r.CLI.Kubectl(ctx, "logs", "job/bf-job", "--namespace", r.Pods.Namespace)
	if err != nil {
		return err
	}
	r.Checks.Contains("the job's log", text, "Locked 1 GPUs with partial memory 0.25")
	r.Checks.Contains("the job's log", text, "total images/sec")
	err = poll.Until(ctx, podTimeout, "the Deployment's pod to have run", func(ctx context.Context) error {
		text, err = r.CLI.Kubectl(ctx, "logs", "deployment/bf-deployment", "--namespace", r.Pods.Namespace)
		if err == nil && !strings.Contains(text, "total images/sec") {
			err = errors.New("it has not yet")
		}
		return err
	})
	if err != nil {
		return err
	}
	r.Checks.Contains("the Deployment's log", text, "Locked 1 GPUs with partial memory 0.25")
	_, err = r.Run(ctx, "delete", "job/bf-job", "deployment/bf-deployment", "--namespace", r.Pods.Namespace)
	return err
}

func (r *remote) several(ctx context.Context) error {
	r.Title("Several containers, and your own call of the client")
	r.Say(`Containers that ask for GPUs get the client, init containers among them, and others
are left alone. In mode injection the command is left alone as well.`)
	if _, err := r.create(ctx, "multi-container.yaml"); err != nil {
		return err
	}
	if _, err := r.create(ctx, "injection.yaml"); err != nil {
		return err
	}
	for _, container := range []string{"train", "evaluate"} {
		text, err := r.completed(ctx, "bf-multi", container)
		if err != nil {
			return err
		}
		r.Checks.Contains("container "+container, text, "Locked 1 GPUs with partial memory 0.2")
	}
	made, err := r.Pods.API.Get(ctx, "bf-multi", metav1.GetOptions{})
	if err != nil {
		return err
	}
	var names []string
	for _, c := range made.Spec.InitContainers {
		names = append(names, c.Name)
	}
	r.Checks.Equal("init containers", names, []string{"monitor", "populate", "warm-up"})
	uses := []string{}
	for _, c := range slices.Concat(made.Spec.InitContainers, made.Spec.Containers) {
		if slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == pool.MountPath }) {
			uses = append(uses, c.Name)
		}
	}
	r.Checks.Equal("containers with the client", uses, []string{"warm-up", "train", "evaluate"})
	text, err := r.completed(ctx, "bf-injection", "bf-pkgs")
	if err != nil {
		return err
	}
	r.Checks.Contains("the list of GPUs", text, "GPU 3: free memory")
	r.Checks.Contains("the benchmark", text, "total images/sec")
	return nil
}

// refused shows mistakes and what is said about them.
func (r *remote) refused(ctx context.Context) error {
	r.Title("Mistakes are told at once")
	set := func(name corev1.ResourceName, value string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Limits[name] = resource.MustParse(value) }
	}
	note := func(key, value string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Annotations[key] = value }
	}
	for _, mistake := range []struct {
		what   string
		change func(*corev1.Pod)
		want   []string
	}{
		{"more than a whole GPU", set(pool.PercentResource, "150"), []string{"bf-pkgs", pool.PercentResource, "150", "100"}},
		{"percent and memory at once", set(pool.MemoryResource, "8000M"), []string{pool.PercentResource, pool.MemoryResource}},
		{"a client that there is not", note(pool.VersionAnnotation, "999"), []string{pool.VersionAnnotation, "999", "450"}},
		{"a mode that there is not", note(pool.ModeAnnotation, "injecton"), []string{"injecton", "injection"}},
		{"a filter that would be shell text", note(pool.FilterAnnotation, "server.hostname=a;id color=red"), []string{"color"}},
		{"a pod that does not say the mode", func(p *corev1.Pod) { delete(p.Annotations, pool.ModeAnnotation) },
			[]string{pool.ModeAnnotation}},
		{"more GPUs than any node has units for", set(pool.AmountResource, "50"), []string{pool.Resource, "1000"}},
	} {
		p, err := r.Pods.Example("bitfusion/pod.yaml")
		if err != nil {
			return err
		}
		mistake.change(p)
		fmt.Fprintf(r.out, "%s:\n", mistake.what)
		_, err = r.Pods.Create(ctx, p)
		r.wants(mistake.what, err, mistake.want...)
	}
	return nil
}
