package demos

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// freeTimeout is how long a pod that ended may be counted.
const freeTimeout = time.Minute

// The machine of the guide: 8 cards of 16 GB.
const (
	numCards = 8
	cardGB   = 16
)

// guide plays the scenario of the GCUShare guide.
type guide struct{ *Demo }

// Guide shows the scenario of the GCUShare guide, section 4.1: four pods share two cards of
// 16 GB by memory, in units of 1 GB and of 0.1 GB. docs/demo.md shows what it prints.
func (s *Demo) Guide(ctx context.Context) error {
	var printed strings.Builder
	s.out = io.MultiWriter(s.out, &printed)
	s.Checks.Out = s.out
	d := &guide{s}
	if err := d.play(ctx); err != nil {
		return err
	}
	s.Checks.NoError("docs/demo.md shows what was printed", s.CLI.CheckShown("docs/demo.md", "make demo", printed.String()))
	return nil
}

// play shows the scenario in units of 1 GB and of 0.1 GB.
func (d *guide) play(ctx context.Context) error {
	d.Title("The node, as Kubernetes sees it")
	d.Say(`divvy-node has found the cards through the vendor's library and offers their
memory to kubelet, in units of 1 GB. The number of cards is shown beside it.`)
	if err := d.offers(ctx, 128); err != nil {
		return err
	}
	if err := d.scenario(ctx, 1); err != nil {
		return err
	}
	d.Title("The same with finer units")
	d.Say(`memoryUnit is a value of the chart. Pods of the former unit are gone, as they
must be: their requests would change their meaning. With "0.1" one unit is a
tenth of a GB, so 4 GB are 40 units.`)
	if err := d.changeUnit(ctx, "0.1"); err != nil {
		return err
	}
	if err := d.offers(ctx, 1280); err != nil {
		return err
	}
	if err := d.scenario(ctx, 10); err != nil {
		return err
	}
	d.Title("Back to units of 1 GB")
	return d.changeUnit(ctx, "1")
}

// offers shows what the node offers, once kubelet has reported it.
func (d *guide) offers(ctx context.Context, memory int64) error {
	amounts := func(ctx context.Context) (gcuMemory, gcuCount int64, err error) {
		node, err := d.Client.CoreV1().Nodes().Get(ctx, layout.NodeName, metav1.GetOptions{})
		if err != nil {
			return 0, 0, err
		}
		m, c := node.Status.Allocatable[product.Resource], node.Status.Allocatable["enflame.com/gcu-count"]
		return m.Value(), c.Value(), nil
	}
	// That it comes late is a difference, not the end of the demo.
	_ = poll.Until(ctx, configTimeout, "the node's memory", func(ctx context.Context) error {
		m, c, err := amounts(ctx)
		if err == nil && (m != memory || c != numCards) {
			err = fmt.Errorf("it has %d units on %d cards", m, c)
		}
		return err
	})
	_, err := d.Run(ctx, "get", "node", "--output",
		`custom-columns=NAME:.metadata.name,GCU-COUNT:.status.allocatable.enflame\.com/gcu-count,`+
			`GCU-MEMORY:.status.allocatable.enflame\.com/gcu-memory`)
	if err != nil {
		return err
	}
	m, c, err := amounts(ctx)
	if err != nil {
		return err
	}
	d.Checks.Equal("units of enflame.com/gcu-memory", m, memory)
	d.Checks.Equal("cards in enflame.com/gcu-count", c, int64(numCards))
	return nil
}

// holding is what the pods of the demo hold, in units.
type holding struct {
	pod   string
	card  int
	units int64
}

// scenario is the guide's, with so many units to a GB.
func (d *guide) scenario(ctx context.Context, perGB int64) error {
	var now []holding
	run := func(number int, gb int64, card int, why string) error {
		name := fmt.Sprintf("gcushare-pod-%d", number)
		d.Title(fmt.Sprintf("Pod %d asks for %d GB: %d units", number, gb, gb*perGB))
		d.Say(why)
		if err := d.create(ctx, name, gb*perGB); err != nil {
			return err
		}
		if err := d.Pods.WaitPhase(ctx, podTimeout, corev1.PodRunning, name); err != nil {
			return err
		}
		if err := d.list(ctx); err != nil {
			return err
		}
		if err := d.look(ctx, name, card); err != nil {
			return err
		}
		now = append(now, holding{name, card, gb * perGB})
		return d.inspect(ctx, now, perGB)
	}
	if err := run(1, 4, 0, `All cards are empty, so the first serves it. The container sees that card's
device node and no other.`); err != nil {
		return err
	}
	if err := run(2, 8, 0, `The scheduler asks Divvy's extender, which chooses the fullest card that still
has room: both pods share card 0 now.`); err != nil {
		return err
	}
	if err := run(3, 12, 1, `Card 0 has 4 GB left, and a request is never split over cards: card 1.`); err != nil {
		return err
	}
	if err := d.tooLarge(ctx, "gcushare-pod-4", 20*perGB, now, perGB); err != nil {
		return err
	}

	d.Title("Pod 2 is deleted")
	d.Say(`Its memory is free as soon as the pod has ended.`)
	if _, err := d.Run(ctx, "delete", "pod", "gcushare-pod-2", "--namespace", d.Pods.Namespace); err != nil {
		return err
	}
	now = slices.Delete(now, 1, 2)
	if err := d.inspect(ctx, now, perGB); err != nil {
		return err
	}
	d.Title("All pods are deleted")
	if _, err := d.Run(ctx, "delete", "pod", "--all", "--namespace", d.Pods.Namespace); err != nil {
		return err
	}
	return d.inspect(ctx, nil, perGB)
}

// create makes the pod of a file in examples/, with the lab's image.
func (d *guide) create(ctx context.Context, name string, units int64) error {
	manifest, err := d.manifest(name, units)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "$ kubectl create -f %s.yaml --namespace %s\n", name, d.Pods.Namespace)
	text, err := d.CLI.Command(ctx, manifest, d.Cluster.Program("kubectl"), "create", "-f", "-", "--namespace", d.Pods.Namespace)
	if err != nil {
		return err
	}
	fmt.Fprintln(d.out, text)
	return nil
}

func (d *guide) manifest(name string, units int64) (string, error) {
	data, err := os.ReadFile(filepath.Join(d.CLI.Repository, "examples", name+".yaml"))
	if err != nil {
		return "", fmt.Errorf("read the example: %w", err)
	}
	return withUnits(data, units)
}

// withUnits returns the pod of an example with the lab's image, which needs no
// download, and another request.
func withUnits(example []byte, units int64) (string, error) {
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict(example, &pod); err != nil {
		return "", fmt.Errorf("read the example: %w", err)
	}
	for i := range pod.Spec.Containers {
		c := &pod.Spec.Containers[i]
		c.Image = cluster.ShellImage
		c.Resources.Limits[product.Resource] = *resource.NewQuantity(units, resource.DecimalSI)
	}
	manifest, err := yaml.Marshal(pod)
	if err != nil {
		return "", fmt.Errorf("write the example: %w", err)
	}
	return string(manifest), nil
}

func (d *guide) list(ctx context.Context) error {
	_, err := d.Run(ctx, "get", "pod", "--namespace", d.Pods.Namespace)
	return err
}

// look runs ls in the container, as the guide does, and reads the variable and
// the annotation that name the card.
func (d *guide) look(ctx context.Context, name string, card int) error {
	fmt.Fprintf(d.out, "$ kubectl exec %s --namespace %s -- ls /dev\n", name, d.Pods.Namespace)
	text, err := d.CLI.Kubectl(ctx, "exec", name, "--namespace", d.Pods.Namespace, "--", "ls", "/dev")
	if err != nil {
		return err
	}
	files := strings.Fields(text)
	fmt.Fprintln(d.out, fold(files, 78)) // as ls does at a terminal
	var cards []string
	for _, file := range files {
		if strings.HasPrefix(file, "gcu") {
			cards = append(cards, file)
		}
	}
	d.Checks.Equal("cards in /dev of "+name, cards, []string{fmt.Sprintf("gcu%d", card)})
	variable, err := d.Pods.Exec(ctx, name, "pod-gcu-example", "sh", "-c", "echo $ENFLAME_VISIBLE_DEVICES")
	if err != nil {
		return err
	}
	d.Checks.Equal("ENFLAME_VISIBLE_DEVICES in "+name, variable, fmt.Sprint(card))
	var assigned string
	err = poll.Until(ctx, freeTimeout, "annotations of "+name, func(ctx context.Context) error {
		pod, err := d.Pods.API.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		a := pod.Annotations
		assigned = fmt.Sprintf("card %s, assigned %s", a["enflame.com/gcu-device-id"], a["enflame.com/gcu-device-assigned"])
		if a["enflame.com/gcu-device-assigned"] != "true" {
			return fmt.Errorf("%s", assigned)
		}
		return nil
	})
	if err != nil && ctx.Err() != nil {
		return err
	}
	d.Checks.Equal("annotations of "+name, assigned, fmt.Sprintf("card %d, assigned true", card))
	return nil
}

// fold puts words on lines of no more than width.
func fold(words []string, width int) string {
	var b strings.Builder
	column := 0
	for _, word := range words {
		switch {
		case column == 0:
		case column+2+len(word) > width:
			b.WriteString("\n")
			column = 0
		default:
			b.WriteString("  ")
			column += 2
		}
		b.WriteString(word)
		column += len(word)
	}
	return b.String()
}

// tooLarge shows the pod that no card can serve.
func (d *guide) tooLarge(ctx context.Context, name string, units int64, now []holding, perGB int64) error {
	d.Title(fmt.Sprintf("Pod 4 asks for 20 GB: %d units", units))
	d.Say(`All cards together have far more free, but no single card has 20 GB. The pod
stays Pending, and its event says why.`)
	if err := d.create(ctx, name, units); err != nil {
		return err
	}
	pod, err := d.Pods.API.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	const documented = "0/1 nodes are available: 1 insufficient GCU Memory in one gcu device"
	message, eventErr := d.Pods.WaitEvent(ctx, podTimeout, pod, documented)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := d.list(ctx); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "$ kubectl describe pod %s --namespace %s\n", name, d.Pods.Namespace)
	described, err := d.CLI.Kubectl(ctx, "describe", "pod", name, "--namespace", d.Pods.Namespace)
	if err != nil {
		return err
	}
	if _, events, ok := strings.Cut(described, "\nEvents:"); ok {
		described = "......\nEvents:" + events // as the guide shows it
	}
	fmt.Fprintln(d.out, described)
	if eventErr != nil {
		message = eventErr.Error()
	}
	d.Checks.Contains("the event of "+name, message, documented)
	if pod, err = d.Pods.API.Get(ctx, name, metav1.GetOptions{}); err != nil {
		return err
	}
	d.Checks.Equal("phase of "+name, pod.Status.Phase, corev1.PodPending)
	return d.inspect(ctx, now, perGB)
}

// inspect shows the books in both forms and checks them against what the pods
// hold, once the last pod's end has been noticed.
func (d *guide) inspect(ctx context.Context, now []holding, perGB int64) error {
	want := wanted(now, perGB)
	url := testenv.ExtenderURL + "/gcushare-scheduler/inspect/" + layout.NodeName
	var body []byte
	var got map[int]string
	_ = poll.Until(ctx, freeTimeout, "inspect", func(ctx context.Context) (err error) {
		if body, err = testenv.Fetch(ctx, url); err != nil {
			return err
		}
		node, err := audit.ParseReport(body)
		if err != nil {
			return err
		}
		if got = shown(node); fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Errorf("it shows %v", got)
		}
		return nil
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if _, err := d.Run(ctx, "divvy", "inspect"); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\n$ curl -s %s\n%s\n", url, abridge(strings.TrimSpace(string(body)), 2))
	const used = 2 // cards that the scenario uses, the first ones
	for index := range used {
		d.Checks.Equal(fmt.Sprintf("inspect, card %d", index), got[index], want[index])
	}
	// Six lines that say the same would help nobody.
	others := func(cards map[int]string) []string {
		var states []string
		for index := used; index < numCards; index++ {
			states = append(states, cards[index])
		}
		return slices.Compact(states)
	}
	d.Checks.Equal("inspect, every other card", others(got), others(want))
	return nil
}

// wanted is what inspect is to show of each card.
func wanted(now []holding, perGB int64) map[int]string {
	cards := map[int]string{}
	for index := range numCards {
		var used int64
		var pods []string
		for _, h := range now {
			if h.card == index {
				used += h.units
				pods = append(pods, fmt.Sprintf("%s holds %d", h.pod, h.units))
			}
		}
		cards[index] = card(used, cardGB*perGB, pods)
	}
	return cards
}

// shown is what inspect shows.
func shown(node audit.Node) map[int]string {
	cards := map[int]string{}
	for _, device := range node.Devices {
		var pods []string
		for _, occupant := range device.Pods {
			pods = append(pods, fmt.Sprintf("%s holds %d", occupant.Name, occupant.Used))
		}
		cards[device.ID] = card(device.Used, device.Total, pods)
	}
	return cards
}

func card(used, total int64, pods []string) string {
	if len(pods) == 0 {
		return fmt.Sprintf("%d of %d used", used, total)
	}
	return fmt.Sprintf("%d of %d used, %s", used, total, strings.Join(pods, ", "))
}

// changeUnit upgrades the release, as a user does.
func (d *guide) changeUnit(ctx context.Context, unit string) error {
	args := d.Divvy.UpgradeArgs("memoryUnit=" + unit)
	shown := slices.Clone(args)
	for i, arg := range shown {
		if rest, ok := strings.CutPrefix(arg, d.CLI.Repository+"/"); ok {
			shown[i] = rest
		}
	}
	fmt.Fprintf(d.out, "$ helm %s\n", strings.Join(shown, " "))
	if err := d.Divvy.Upgrade(ctx, "memoryUnit="+unit); err != nil {
		return err
	}
	if err := d.Divvy.Wait(ctx, configTimeout); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "Divvy is ready again, in units of %s GB.\n", unit)
	return nil
}
