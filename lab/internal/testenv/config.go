package testenv

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
)

// configTimeout is how long a changed ConfigMap may take to be in use.
const configTimeout = 2 * time.Minute

// applied is a configuration and who uses it.
type applied struct {
	data    map[string]string
	pod     types.UID
	reloads int
}

// configured returns the configuration in the cluster, and how often the daemon
// that runs has read a new one; "" for its pod when none runs.
func (d *Divvy) configured(ctx context.Context) (applied, error) {
	var now applied
	config, err := d.client.CoreV1().ConfigMaps(product.Namespace).Get(ctx, NodeDaemon, metav1.GetOptions{})
	if apierrors.IsNotFound(err) { // no cards are shared
		return now, nil
	}
	if err != nil {
		return now, fmt.Errorf("read the daemon's configuration: %w", err)
	}
	now.data = config.Data
	pods, err := d.Pods(ctx, NodeDaemon)
	if err != nil || len(pods) == 0 {
		return now, err
	}
	now.pod = pods[0].UID
	if address := pods[0].Status.PodIP; address != "" {
		// One that does not answer yet has read none.
		now.reloads, _ = reloads(ctx, "http://"+address+":9400/metrics")
	}
	return now, nil
}

// take waits until the daemon uses a configuration that changed since before,
// and makes kubelet bring it at once. A daemon that was started since read it
// then.
func (d *Divvy) take(ctx context.Context, before applied) error {
	now, err := d.configured(ctx)
	if err != nil || before.pod == "" || maps.Equal(now.data, before.data) {
		return err
	}
	poked := false
	return poll.Until(ctx, configTimeout, "the daemon to use the new configuration", func(ctx context.Context) error {
		now, err := d.configured(ctx)
		if err != nil {
			return err
		}
		if now.pod != before.pod || now.reloads > before.reloads {
			return nil
		}
		if !poked {
			poked = true
			return errors.Join(d.Poke(ctx, NodeDaemon), errors.New("kubelet was told"))
		}
		return fmt.Errorf("it has read %d new ones", now.reloads)
	})
}

// Choose chooses a configuration of the node, "" for that of all nodes, and waits until the daemon
// has read it.
func (d *Divvy) Choose(ctx context.Context, node *Node, name string) error {
	object, err := node.Get(ctx)
	if err != nil || object.Labels[ConfigLabel] == name {
		return err
	}
	before, err := d.configured(ctx)
	if err = errors.Join(err, node.Label(ctx, ConfigLabel, name)); err != nil {
		return err
	}
	return poll.Until(ctx, configTimeout, "the daemon to use another configuration", func(ctx context.Context) error {
		now, err := d.configured(ctx)
		if err == nil && now.pod == before.pod && now.reloads == before.reloads {
			err = fmt.Errorf("it has read %d new ones", now.reloads)
		}
		return err
	})
}

// Poke makes kubelet update at once what it has mounted into a part's pod. By
// itself it does so about once a minute.
func (d *Divvy) Poke(ctx context.Context, part string) error {
	pod, err := d.Pod(ctx, part)
	if err != nil {
		return err
	}
	return poke(ctx, d.client, pod)
}

func poke(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod) error {
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"divvy-lab/poke":"%d"}}}`, time.Now().UnixNano())
	if _, err := client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch,
		metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("poke pod %s: %w", pod.Name, err)
	}
	return nil
}

// reloads asks the daemon how many changed configurations it has read, used or
// not.
func reloads(ctx context.Context, url string) (int, error) {
	metrics, err := Fetch(ctx, url)
	if err != nil {
		return 0, err
	}
	return countReloads(bytes.NewReader(metrics))
}

// countReloads adds up the counter of reloads in metrics.
func countReloads(metrics io.Reader) (sum int, err error) {
	lines := bufio.NewScanner(metrics)
	for lines.Scan() {
		if name, value, ok := strings.Cut(lines.Text(), "} "); ok && strings.HasPrefix(name, "divvy_node_config_reloads_total{") {
			n, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, fmt.Errorf("metric %q: %w", lines.Text(), err)
			}
			sum += int(n)
		}
	}
	return sum, lines.Err()
}

// Upgrade changes values of the release, each as KEY=TEXT, and waits until the
// daemon has read them. It does not wait for their effect; Wait does.
func (d *Divvy) Upgrade(ctx context.Context, values ...string) error {
	return d.upgrade(ctx, d.UpgradeArgs(values...))
}

func (d *Divvy) upgrade(ctx context.Context, args []string) error {
	before, err := d.configured(ctx)
	if err != nil {
		return err
	}
	if _, err := d.cli.Helm(ctx, args...); err != nil {
		return err
	}
	return d.take(ctx, before)
}

// UpgradeArgs are the arguments of helm that Upgrade uses.
func (d *Divvy) UpgradeArgs(values ...string) []string {
	args := d.upgradeArgs("--reset-then-reuse-values")
	for _, value := range values {
		args = append(args, "--set-string", value)
	}
	return args
}

// upgradeArgs are the arguments of helm that change the release. helm need not compare all
// objects with the API's schema each time, which takes it seconds: a test does so that the
// API server accepts the chart.
func (d *Divvy) upgradeArgs(args ...string) []string {
	return append([]string{"upgrade", product.Release, d.cli.chart(), "--namespace", product.Namespace,
		"--disable-openapi-validation"}, args...)
}

// Reconfigure puts the release back to the values of SetUp, with files of
// lab/values and more arguments of helm over them, and waits until the daemon has
// read them.
func (d *Divvy) Reconfigure(ctx context.Context, files []string, args ...string) error {
	for _, path := range d.cli.valuesPaths(files) {
		args = append([]string{"--values", path}, args...)
	}
	return d.resetValues(ctx, d.values, args...)
}

// resetValues gives the release these values and no others.
func (d *Divvy) resetValues(ctx context.Context, values string, args ...string) error {
	file, err := os.CreateTemp("", "divvy-values-*.yaml")
	if err != nil {
		return fmt.Errorf("values of the release: %w", err)
	}
	defer os.Remove(file.Name()) //nolint:errcheck // a file in a temporary folder
	_, err = file.WriteString(values)
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("values of the release: %w", err)
	}
	return d.upgrade(ctx, append(d.upgradeArgs("--reset-values", "--values", file.Name()), args...))
}
