package demos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// administrator plays the demo of installing.
type administrator struct {
	*Demo
	manifest string // the path of kube-scheduler's manifest
	before   []byte // its content without Divvy
	files    []string
}

// Install shows an administrator's day: installing, looking, changing, removing. The
// lab is bare, and is bare again at the end.
func (s *Demo) Install(ctx context.Context) (err error) {
	a := &administrator{Demo: s, manifest: filepath.Join(layout.ManifestDir, "kube-scheduler.yaml")}
	if a.before, err = os.ReadFile(a.manifest); err != nil {
		return fmt.Errorf("kube-scheduler's manifest: %w", err)
	}
	if a.files, err = filepath.Glob(filepath.Join(layout.KubernetesDir, "*")); err != nil {
		return fmt.Errorf("files of the control plane: %w", err)
	}
	for _, part := range []func(context.Context) error{a.install, a.wired, a.guide, a.unit, a.broken, a.uninstall} {
		if err := part(ctx); err != nil {
			return errors.Join(err, s.Remove(context.WithoutCancel(ctx)))
		}
	}
	return nil
}

// typed prints a command, runs it and prints what it says.
func (a *administrator) typed(ctx context.Context, program string, args ...string) (string, error) {
	fmt.Fprintf(a.out, "$ %s %s\n", filepath.Base(program), strings.Join(args, " "))
	text, err := a.CLI.Command(ctx, "", program, args...)
	if text != "" {
		fmt.Fprintln(a.out, text)
	}
	return text, err
}

func (a *administrator) schedconf(ctx context.Context, command string) (string, error) {
	return a.typed(ctx, filepath.Join(product.Programs(), "divvy-control"), "schedconf", command,
		"--kubeconfig", layout.AdminKubeconfig, "--node-name", layout.NodeName, "--log-level", "error")
}

func (a *administrator) install(ctx context.Context) error {
	a.Title("Install")
	a.Say("`helm install`, on a control plane as kubeadm makes it: a static pod kube-scheduler\nwithout a configuration file.")
	return a.Env.Install(ctx, testenv.Options{Topology: testenv.Guide, MemoryUnit: "1", Out: a.out})
}

func (a *administrator) wired(ctx context.Context) error {
	a.Title("kube-scheduler asks the extender")
	status, err := a.schedconf(ctx, "status")
	if err != nil {
		return err
	}
	a.Checks.Contains("status", status, "wired")
	backup, err := os.ReadFile(filepath.Join(layout.KubernetesDir, "kube-scheduler.back.yaml"))
	a.Checks.NoError("the original is kept", err)
	a.Checks.True("byte for byte", bytes.Equal(backup, a.before), fmt.Sprintf("%d bytes", len(backup)))
	plan, err := a.schedconf(ctx, "plan")
	if err != nil {
		return err
	}
	a.Checks.True("there is nothing left to change", !strings.Contains(plan, "@@"), plan)
	_, err = a.Run(ctx, "divvy", "doctor")
	a.Checks.NoError("doctor finds nothing", err)
	return ctx.Err()
}

func (a *administrator) guide(ctx context.Context) error {
	a.Title("Pods of the guide")
	if err := a.Start(ctx, a.One("gcushare-pod-1", product.Resource, 4), a.One("gcushare-pod-2", product.Resource, 8),
		a.One("gcushare-pod-3", product.Resource, 12)); err != nil {
		return err
	}
	for pod, card := range map[string]string{"gcushare-pod-1": "0", "gcushare-pod-2": "0", "gcushare-pod-3": "1"} {
		got, err := a.Pods.API.Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return err
		}
		a.Checks.Equal("card of "+pod, got.Annotations["enflame.com/gcu-device-id"], card)
	}
	_, err := a.Run(ctx, "divvy", "inspect")
	return err
}

// unit is refused under pods.
func (a *administrator) unit(ctx context.Context) error {
	a.Title("A change that would give running pods another meaning")
	_, err := a.CLI.Helm(ctx, a.Divvy.UpgradeArgs("memoryUnit=0.1")...)
	a.Checks.True("helm upgrade with memoryUnit=0.1 is refused", err != nil, fmt.Sprint(err))
	if err != nil {
		fmt.Fprintln(a.out, err)
		a.Checks.Contains("it names the pods", err.Error(), a.Pods.Namespace+"/gcushare-pod-1")
	}
	return ctx.Err()
}

// broken plants a fault and has doctor find it.
func (a *administrator) broken(ctx context.Context) error {
	a.Title("Something is broken")
	if _, err := a.Run(ctx, "scale", "--namespace", product.Namespace, "deployment/divvy-extender", "--replicas=0"); err != nil {
		return err
	}
	report, err := a.Run(ctx, "divvy", "doctor")
	a.Checks.True("doctor says so by its exit status", err != nil, fmt.Sprint(err))
	remedy := "kubectl scale"
	a.Checks.Contains("and what to do", report, remedy)
	if _, err := a.Run(ctx, "scale", "--namespace", product.Namespace, "deployment/divvy-extender", "--replicas=1"); err != nil {
		return err
	}
	return a.Divvy.Wait(ctx, configTimeout)
}

func (a *administrator) uninstall(ctx context.Context) error {
	a.Title("Uninstall")
	a.Say("Pods go on meanwhile. Kubelet keeps the numbers of a plugin that has gone for five\nminutes; `helm uninstall` waits for that " +
		"where uninstall.nodeStatus is true, which\nthis demo leaves out.")
	running, err := a.containers(ctx)
	if err != nil {
		return err
	}
	if _, err := a.typed(ctx, a.Cluster.Program("helm"), "uninstall", product.Release, "--namespace", product.Namespace); err != nil {
		return err
	}
	after, err := os.ReadFile(a.manifest)
	a.Checks.NoError("kube-scheduler's manifest", err)
	a.Checks.True("it is as before, byte for byte", bytes.Equal(after, a.before), fmt.Sprintf("%d bytes, before %d", len(after),
		len(a.before)))
	files, err := filepath.Glob(filepath.Join(layout.KubernetesDir, "*"))
	a.Checks.NoError("files of the control plane", err)
	a.Checks.Equal("they are those of before", strings.Join(files, " "), strings.Join(a.files, " "))
	node, err := a.Node.Get(ctx)
	if err != nil {
		return err
	}
	var left []string
	for key := range node.Annotations {
		if strings.HasPrefix(key, "divvy.dev/") {
			left = append(left, key)
		}
	}
	a.Checks.Equal("annotations of Divvy on the node", len(left), 0)
	still, err := a.containers(ctx)
	if err != nil {
		return err
	}
	a.Checks.Equal("containers that run", strings.Join(still, " "), strings.Join(running, " "))
	if err := a.Pods.DeleteAll(ctx); err != nil {
		return err
	}
	if err := a.Start(ctx, a.Pods.New("after", testenv.Container("app", 0))); err != nil {
		return err
	}
	a.Checks.True("kube-scheduler places a pod", true, "after runs")
	return errors.Join(a.Pods.DeleteAll(ctx), a.Remove(ctx))
}

// containers returns the containers of the namespace's pods, with how often each was
// started again.
func (a *administrator) containers(ctx context.Context) ([]string, error) {
	var found []string
	for _, name := range []string{"gcushare-pod-1", "gcushare-pod-2", "gcushare-pod-3"} {
		pod, err := a.Pods.API.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		for _, c := range pod.Status.ContainerStatuses {
			if c.State.Running != nil && pod.Status.Phase == corev1.PodRunning {
				found = append(found, fmt.Sprintf("%s:%d", c.ContainerID, c.RestartCount))
			}
		}
	}
	slices.Sort(found)
	return found, nil
}
