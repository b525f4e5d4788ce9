//go:build e2e

package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/divvy-gpu/divvy/internal/report/doctor"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// mendTimeout is how long a remedy may take to show: kubelet makes pods anew, and
// kube-scheduler is watched for some seconds once it is wired.
const mendTimeout = 3 * time.Minute

// examine runs the doctor as a person does and returns its report and exit code.
func examine(ctx context.Context) (doctor.Report, int, error) {
	var report doctor.Report
	text, err := lab.CLI.Kubectl(ctx, "divvy", "doctor", "--output", "json", "--settle", "0")
	code := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code, err = exit.ExitCode(), nil
	}
	if err == nil {
		err = json.Unmarshal([]byte(text), &report)
	}
	return report, code, err
}

// well waits until the doctor finds nothing.
func well(ctx context.Context) error {
	return poll.Until(ctx, mendTimeout, "the doctor to find nothing", func(ctx context.Context) error {
		report, code, err := examine(ctx)
		if err == nil && (code != 0 || len(report.Findings()) > 0) {
			err = fmt.Errorf("exit code %d: %+v", code, report.Findings())
		}
		return err
	})
}

// sign is a finding of the doctor.
type sign struct {
	check, object, problem string
	// remedy is a part of what the doctor says to do.
	remedy string
}

// in returns nil if the sign is among findings, with its remedy.
func (s *sign) in(findings []doctor.Finding) error {
	found := slices.IndexFunc(findings, func(f doctor.Finding) bool {
		return f.Check == s.check && strings.Contains(f.Object, s.object) && strings.Contains(f.Problem, s.problem)
	})
	if found < 0 {
		return fmt.Errorf("findings %+v, want %q", findings, s.problem)
	}
	if f := findings[found]; !strings.Contains(f.Remedy+strings.Join(f.Commands, " "), s.remedy) {
		return fmt.Errorf("the remedy is %q, %q; want %q in it", f.Remedy, f.Commands, s.remedy)
	}
	return nil
}

// illness is a fault of an installation.
type illness struct {
	// plant brings it about.
	plant func(t *testing.T, ctx context.Context)
	sign
	// second is what else is found, nil for nothing.
	second *sign
	// mend does what no command can; nil where the commands that the doctor prints
	// are all that is to be done.
	mend func(t *testing.T, ctx context.Context)
	// after removes what is left once it is repaired, nil for nothing.
	after func(t *testing.T, ctx context.Context)
}

// TestDoctor plants faults one by one. The doctor finds each, and what it prints
// as the remedy, run as it is, mends it.
func TestDoctor(t *testing.T) {
	ctx := begin(t, guide)
	// A pool without its token is a finding.
	importToken(t, ctx)
	must(t, well(ctx))
	node := layout.NodeName
	ills := illnesses(node)
	for _, name := range slices.Sorted(maps.Keys(ills)) {
		ill := ills[name]
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			start := time.Now()
			ill.plant(t, ctx)
			var commands []string
			must(t, poll.Until(ctx, podTimeout, "the doctor to find it", func(ctx context.Context) error {
				report, code, err := examine(ctx)
				if err != nil {
					return err
				}
				if code != 1 {
					return fmt.Errorf("exit code %d, findings %+v", code, report.Findings())
				}
				for _, s := range []*sign{&ill.sign, ill.second} {
					if s == nil {
						continue
					}
					if err := s.in(report.Findings()); err != nil {
						return err
					}
				}
				commands = nil
				for _, f := range report.Findings() {
					for _, c := range f.Commands {
						if !slices.Contains(commands, c) {
							commands = append(commands, c)
						}
					}
				}
				return nil
			}))
			found := time.Since(start)
			if ill.mend != nil {
				ill.mend(t, ctx)
			} else if len(commands) == 0 {
				t.Fatal("the doctor names no command")
			}
			dir := t.TempDir() // some write a file
			for _, c := range commands {
				_, err := lab.CLI.Command(ctx, "", "bash", "-c", "cd '"+dir+"' && "+c)
				if err != nil && !strings.Contains(err.Error(), "(NotFound)") { // replaced meanwhile
					t.Fatalf("$ %s\n%v", c, err)
				}
			}
			must(t, well(ctx))
			if ill.after != nil {
				ill.after(t, ctx)
			}
			t.Logf("found after %v, mended after %v by %q", found.Round(100*time.Millisecond),
				time.Since(start).Round(100*time.Millisecond), commands)
		})
	}
	// The installation is the one that it was.
	must(t, lab.Node.Label(ctx, product.EnabledLabel, "true"))
	start(t, one("after", 4))
	agree(t)
}

func illnesses(node string) map[string]illness {
	return map[string]illness{
		"a node is taken out by a label": {
			plant: kubectl("label", "node", node, "divvy.dev/enabled=false", "--overwrite"),
			sign: sign{
				check: "node-labels", object: "Node " + node, problem: "divvy.dev/enabled=false excludes it from divvy-node",
				remedy: "divvy.dev/enabled=true",
			},
		},
		"the extender is scaled to 0": {
			plant: kubectl("scale", "deployment/divvy-extender", "--namespace", product.Namespace, "--replicas=0"),
			sign: sign{
				check: "workloads", object: "Deployment divvy-system/divvy-extender", problem: "scaled to 0",
				remedy: "--replicas=1",
			},
		},
		"a ClusterRoleBinding is deleted": {
			plant: kubectl("delete", "clusterrolebinding", "divvy-node"),
			sign: sign{
				check: "rbac", object: "ServiceAccount divvy-system/divvy-node", problem: "patch nodes",
				remedy: "helm get manifest",
			},
		},
		"the key of the grants is too short": {
			plant: kubectl("patch", "secret", "divvy-grant-key", "--namespace", product.Namespace,
				"--patch", `{"stringData":{"key":"short"}}`),
			sign: sign{
				check: "grant-key", object: "Secret divvy-system/divvy-grant-key", problem: "has 5 bytes",
				remedy: "helm get manifest",
			},
		},
		"an admission policy is deleted": {
			plant: kubectl("delete", "validatingadmissionpolicy", "divvy-node"),
			sign: sign{
				check: "policies", object: "ValidatingAdmissionPolicyBinding divvy-node", problem: "its policy divvy-node is missing",
				remedy: "helm get manifest",
			},
		},
		"a second device plugin for the same cards": {
			plant: secondPlugin,
			sign: sign{
				check: "other-plugins", object: "DaemonSet kube-system/gcushare-device-plugin",
				problem: "another device plugin runs on node " + node,
				remedy:  "kubectl delete daemonset gcushare-device-plugin -n kube-system",
			},
		},
		"a program is of another version": {
			plant: func(t *testing.T, ctx context.Context) {
				t.Helper()
				kubectl("set", "image", "daemonset/"+product.PoolDaemon, "--namespace", product.Namespace, "*="+product.NodeImage+":dev")(t,
					ctx)
			},
			sign: sign{
				check: "versions", object: "image divvy-node", problem: "several versions are running",
				remedy: "helm get manifest",
			},
		},
		"a webhook's CA is overwritten, and a certificate runs out, while the webhook is stopped": {
			plant: func(t *testing.T, ctx context.Context) {
				t.Helper()
				silenceWebhook(t, ctx)
				other := certificate(t, nil, time.Hour)
				patch, err := json.Marshal([]map[string]any{{"op": "replace", "path": "/webhooks/0/clientConfig/caBundle",
					"value": other.crt}})
				must(t, err)
				kubectl("patch", "mutatingwebhookconfiguration", testenv.MutatingConfig, "--type=json", "--patch", string(patch))(t, ctx)

				secret, err := lab.Client.CoreV1().Secrets(product.PoolNamespace).Get(ctx, testenv.WebhookSecret, metav1.GetOptions{})
				must(t, err)
				old := certificate(t, secret.Data, -time.Hour, testenv.WebhookService+"."+product.PoolNamespace+".svc")
				patch, err = json.Marshal(map[string]any{"data": map[string][]byte{"tls.crt": old.crt, "tls.key": old.key}})
				must(t, err)
				_, err = lab.Client.CoreV1().Secrets(product.PoolNamespace).Patch(ctx, testenv.WebhookSecret, types.MergePatchType, patch,
					metav1.PatchOptions{})
				must(t, err)
			},
			sign: sign{
				check: "webhooks", object: "MutatingWebhookConfiguration " + testenv.MutatingConfig, problem: "does not contain the CA",
				remedy: "rollout restart deployment/" + product.PoolWebhook,
			},
			second: &sign{
				check: "certificates", object: "Secret bwki/" + testenv.WebhookSecret, problem: "has expired",
				remedy: "divvy.dev/rotate=cert",
			},
		},
		"a pod asks for more than any card has": {
			plant: func(t *testing.T, ctx context.Context) {
				t.Helper()
				pending(t, create(t, one("too-large", 17))[0], noRoom)
			},
			sign: sign{
				check: "waiting", object: "Pod " + namespace + "/too-large", problem: "are more than any device has",
				remedy: "request 16 instead of 17",
			},
			after: func(t *testing.T, ctx context.Context) {
				t.Helper()
				running(t, "too-large")
				must(t, lab.Pods.Delete(ctx, "too-large"))
			},
		},
		"the scheduler's manifest is restored by hand": {
			plant: restoreManifest,
			sign: sign{
				check: "scheduler", object: "Pod kube-system/kube-scheduler-" + node, problem: "does not call the extender",
				remedy: "kubectl rollout restart daemonset/divvy-schedconf",
			},
			mend: func(t *testing.T, ctx context.Context) {
				t.Helper()
				// One that is stopped cannot end in time.
				must(t, signalSchedconf(ctx, syscall.SIGCONT))
			},
		},
		"a node names a configuration that is not there": {
			plant: kubectl("label", "node", node, "divvy.dev/config=no-such"),
			sign: sign{
				check: "configuration", object: "Node " + node, problem: `selects the configuration "no-such"`,
				remedy: "divvy.dev/config-",
			},
		},
		"a role is left of another release": {
			plant: func(t *testing.T, ctx context.Context) {
				t.Helper()
				kubectl("create", "clusterrole", "divvy-of-old", "--verb=get", "--resource=nodes")(t, ctx)
				kubectl("label", "clusterrole", "divvy-of-old", "app.kubernetes.io/part-of=divvy", "app.kubernetes.io/instance=old")(t, ctx)
			},
			sign: sign{
				check: "leftovers", object: "clusterrole divvy-of-old", problem: `release "old", which is not installed`,
				remedy: "kubectl delete clusterrole divvy-of-old",
			},
		},
	}
}

// kubectl returns a function that runs it.
func kubectl(args ...string) func(*testing.T, context.Context) {
	return func(t *testing.T, ctx context.Context) {
		t.Helper()
		_, err := lab.CLI.Kubectl(ctx, args...)
		must(t, err)
	}
}

// secondPlugin runs what looks like GCUShare's device plugin: the doctor goes by
// what a DaemonSet is called and mounts.
func secondPlugin(t *testing.T, ctx context.Context) {
	t.Helper()
	labels := map[string]string{"app": "gcushare"}
	pod := one("x", 0).Spec
	pod.RestartPolicy = corev1.RestartPolicyAlways
	pod.NodeSelector = map[string]string{product.NodeLabel: "true"}
	pod.Volumes = append(pod.Volumes, corev1.Volume{Name: "device-plugins", VolumeSource: corev1.VolumeSource{
		HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/device-plugins"},
	}})
	_, err := lab.Client.AppsV1().DaemonSets("kube-system").Create(ctx, &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "gcushare-device-plugin"},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: pod},
		},
	}, metav1.CreateOptions{})
	must(t, err)
}

// silenceWebhook scales the pool's webhook to 0 and waits until nobody would undo
// what is planted.
func silenceWebhook(t *testing.T, ctx context.Context) {
	t.Helper()
	kubectl("scale", "deployment/"+product.PoolWebhook, "--namespace", product.PoolNamespace, "--replicas=0")(t, ctx)
	must(t, poll.Until(ctx, podTimeout, "the webhooks to be gone", func(ctx context.Context) error {
		list, err := lab.Client.CoreV1().Pods(product.PoolNamespace).List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) > 0 {
			err = fmt.Errorf("there are %d", len(list.Items))
		}
		return err
	}))
}

// made is a certificate with its key, in PEM.
type made struct{ crt, key []byte }

// certificate makes one that ends so long from now, signed by the CA in the
// Secret's data, or by itself.
func certificate(t *testing.T, by map[string][]byte, ends time.Duration, names ...string) made {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), DNSNames: names, BasicConstraintsValid: true, IsCA: by == nil,
		NotBefore: time.Now().Add(-24 * time.Hour), NotAfter: time.Now().Add(ends),
	}
	parent, signer := template, any(key)
	if by != nil {
		block, _ := pem.Decode(by["ca.crt"])
		parent, err = x509.ParseCertificate(block.Bytes)
		must(t, err)
		block, _ = pem.Decode(by["ca.key"])
		signer, err = x509.ParsePKCS8PrivateKey(block.Bytes)
		must(t, err)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	must(t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	must(t, err)
	return made{
		crt: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		key: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
	}
}

// signalSchedconf sends a signal to the program that keeps kube-scheduler wired.
func signalSchedconf(ctx context.Context, signal syscall.Signal) error {
	pod, err := lab.Divvy.Pod(ctx, "divvy-schedconf")
	if err != nil {
		return err
	}
	at := slices.IndexFunc(pod.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.Name == "schedconf" })
	if at < 0 {
		return errors.New(testenv.Describe(pod))
	}
	pid, err := testenv.ContainerPID(pod.Status.ContainerStatuses[at].ContainerID)
	if err != nil {
		return err
	}
	return syscall.Kill(pid, signal)
}

// restoreManifest puts the manifest back that kube-scheduler had before Divvy, in
// a moment in which nobody keeps it.
func restoreManifest(t *testing.T, ctx context.Context) {
	t.Helper()
	must(t, signalSchedconf(ctx, syscall.SIGSTOP))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), podTimeout)
		defer cancel()
		if err := signalSchedconf(ctx, syscall.SIGCONT); err != nil {
			t.Errorf("let divvy-schedconf go on: %v", err)
		}
	})
	original, err := os.ReadFile("/etc/kubernetes/kube-scheduler.back.yaml")
	must(t, err)
	// As a person would: beside, and then in one step.
	const manifest = "/etc/kubernetes/manifests/kube-scheduler.yaml"
	must(t, os.WriteFile("/etc/kubernetes/kube-scheduler.tmp", original, 0o600))
	must(t, os.Rename("/etc/kubernetes/kube-scheduler.tmp", manifest))
}
