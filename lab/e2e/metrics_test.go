//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/platform/events"
	"github.com/divvy-gpu/divvy/internal/platform/metrics"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// schedconfMetrics is where what wires kube-scheduler shows its metrics, to its own
// host alone.
const schedconfMetrics = "127.0.0.1:9402"

// shown is what one program shows.
type shown struct {
	program, text string
}

// scrape asks for metrics.
func scrape(ctx context.Context, address string) (shown, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	if err != nil {
		return shown{}, err
	}
	response, err := poster.Do(request)
	if err != nil {
		return shown{}, err
	}
	defer response.Body.Close() //nolint:errcheck // read to its end
	text, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		return shown{}, fmt.Errorf("%s: %s: %w", address, response.Status, err)
	}
	_, info, _ := strings.Cut(string(text), metrics.BuildInfo.Name+"{")
	_, program, _ := strings.Cut(info, `program="`)
	program, _, _ = strings.Cut(program, `"`)
	return shown{program: program, text: string(text)}, nil
}

// scrapeAll asks all programs, as Prometheus finds them: by the annotations of their
// pods.
func scrapeAll(ctx context.Context) (map[string]shown, error) {
	pods, err := lab.Client.CoreV1().Pods("").List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/part-of=divvy"})
	if err != nil {
		return nil, err
	}
	addresses := []string{}
	for _, pod := range pods.Items {
		if pod.Annotations["prometheus.io/scrape"] == "true" && pod.DeletionTimestamp == nil && pod.Status.Phase == corev1.PodRunning {
			addresses = append(addresses, net.JoinHostPort(pod.Status.PodIP, pod.Annotations["prometheus.io/port"]))
		}
		if pod.Labels["app.kubernetes.io/name"] == testenv.Schedconf {
			addresses = append(addresses, schedconfMetrics)
		}
	}
	all := map[string]shown{}
	for _, address := range addresses {
		one, err := scrape(ctx, address)
		if err != nil {
			return nil, err
		}
		all[one.program] = one
	}
	return all, nil
}

// value returns a series of a program; what is not there is 0.
func (s shown) value(series string) float64 {
	for line := range strings.Lines(s.text) {
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), series+" "); ok {
			n, err := strconv.ParseFloat(text, 64)
			if err == nil {
				return n
			}
		}
	}
	return 0
}

// TestMetricsAgreeWithTheBooks: every program shows what the reference lists, the
// units are those of the books, and each decision and correction is counted.
func TestMetricsAgreeWithTheBooks(t *testing.T) {
	ctx := begin(t, guide)
	before, err := scrapeAll(ctx)
	must(t, err)
	for _, program := range []string{metrics.Node, metrics.Extender, metrics.Webhook, metrics.PoolNode, metrics.Schedconf} {
		one, ok := before[program]
		if !ok {
			t.Errorf("%s shows no metrics", program)
			continue
		}
		for _, difference := range metrics.Differences(program, one.text) {
			t.Errorf("%s: %s", program, difference)
		}
		if problems, err := promlint.New(strings.NewReader(one.text)).Lint(); err != nil || len(problems) > 0 {
			t.Errorf("%s: %v, %v", program, problems, err)
		}
	}

	start(t, one("held", 4))
	byHand := one("by-hand", 3)
	byHand.Spec.NodeName = layout.NodeName
	byHand = create(t, byHand)[0]
	running(t, "by-hand")
	giant := create(t, one("giant", 17))[0]
	pending(t, giant, noRoom)
	books := agree(t)

	node, resource := layout.NodeName, product.Resource
	device := func(program, name string, card int, withNode bool) string {
		labels := fmt.Sprintf(`device=%q,index="%d"`, books.Cards[card].UUID, card)
		if withNode {
			labels += fmt.Sprintf(",node=%q", node)
		}
		return fmt.Sprintf("divvy_%s_device_%s{%s,resource=%q}", program, name, labels, resource)
	}
	verdict := fmt.Sprintf(`divvy_extender_node_verdicts_total{resource=%q,verdict="largerThanDevice"}`, resource)
	refused := fmt.Sprintf(`divvy_extender_decisions_total{outcome="refused",resource=%q,verb="filter"}`, resource)
	bound := fmt.Sprintf(`divvy_extender_decisions_total{outcome="bound",resource=%q,verb="bind"}`, resource)
	missing := fmt.Sprintf(`divvy_node_corrections_total{kind="missing",resource=%q}`, resource)
	must(t, poll.Until(ctx, agreeTimeout, "the metrics to agree with the books", func(ctx context.Context) error {
		now, err := scrapeAll(ctx)
		if err != nil {
			return err
		}
		type want struct {
			program, series string
			want            float64
		}
		wants := []want{
			{metrics.Extender, fmt.Sprintf("divvy_extender_namespace_units_used{namespace=%q,node=%q,resource=%q}", namespace, node,
				resource), 7},
			{metrics.Extender, fmt.Sprintf("divvy_extender_node_units_used{node=%q,resource=%q}", node, resource), 7},
			{metrics.Extender, fmt.Sprintf("divvy_extender_node_units{node=%q,resource=%q}", node, resource), 128},
			{metrics.Extender, `divvy_extender_books_pods{state="waiting"}`, 1},
			{metrics.Extender, "divvy_extender_reservations", 0},
			{metrics.Extender, "divvy_extender_expected_pods", 0},
			{metrics.Extender, bound, before[metrics.Extender].value(bound) + 1},
			{metrics.Node, missing, before[metrics.Node].value(missing) + 1},
		}
		for i, card := range books.Inspect.Devices {
			wants = append(wants, want{metrics.Extender, device("extender", "units", i, true), float64(card.Total)},
				want{metrics.Extender, device("extender", "units_used", i, true), float64(card.Used)},
				want{metrics.Extender, device("extender", "units_free", i, true), float64(card.Total - card.Used)},
				want{metrics.Node, device("node", "units_held", i, false), float64(card.Used)},
				want{metrics.Node, device("node", "healthy", i, false), 1})
		}
		for _, w := range wants {
			if got := now[w.program].value(w.series); got != w.want {
				return fmt.Errorf("%s is %v, want %v", w.series, got, w.want)
			}
		}
		for _, series := range []string{verdict, refused} {
			if got := now[metrics.Extender].value(series); got <= before[metrics.Extender].value(series) {
				return fmt.Errorf("%s is %v as before, and a pod was refused", series, got)
			}
		}
		if !strings.Contains(now[metrics.Node].text, `divvy_node_library_call_duration_seconds_count{call="Efml`) {
			return errors.New("no call of the vendor's library is timed")
		}
		return nil
	}))

	// However often it is refused, a pod is told once.
	body, err := json.Marshal(map[string]any{"Pod": giant, "Nodes": nil, "NodeNames": []string{node}})
	must(t, err)
	for range 100 {
		_, _, err := post(ctx, "filter", "application/json", strings.NewReader(string(body)))
		must(t, err)
	}
	start(t, one("later", 1))
	for pod, kind := range map[*corev1.Pod]events.Kind{giant: events.NeverFits, byHand: events.GrantMissing} {
		_, err := lab.Pods.WaitEvent(ctx, podTimeout, pod, map[string]string{"giant": "17 units",
			"by-hand": "kubelet allocated 3 units"}[pod.Name])
		must(t, err)
		list, err := lab.Client.CoreV1().Events(namespace).List(ctx,
			metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(pod.UID)})
		must(t, err)
		told := slices.DeleteFunc(list.Items, func(e corev1.Event) bool { return e.Reason != kind.Reason })
		if len(told) != 1 || told[0].Count > 1 || told[0].Type != kind.Type || told[0].Source.Component != kind.By {
			t.Errorf("pod %s has %d events %s: %+v", pod.Name, len(told), kind.Reason, told)
		}
	}
}
