package browser

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

var update = flag.Bool("update", false, "write the pictures of the documentation")

func picture(p *Page, name string) {
	if *update {
		p.Picture(filepath.Join("..", "..", "..", "docs", "images", name))
	}
}

// small is a cluster of two vendors with something of everything.
func small(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	for i, name := range []string{"gcu-1", "gcu-2"} {
		w.node(name, gcuMemory, "S60", 8, 48)
		for d := range 7 - i {
			w.run(fmt.Sprintf("infer-%d%d", i, d), gcuMemory, 16, .8, name, d)
			if d%2 == 0 {
				w.run(fmt.Sprintf("batch-job-%d%d", i, d), gcuMemory, 24, .45, name, d)
			}
		}
	}
	w.node("a100-1", gpuMemory, "NVIDIA A100-SXM4-80GB", 4, 80)
	w.node("a100-2", gpuMemory, "NVIDIA A100-SXM4-80GB", 4, 80)
	w.run("train-llm", gpuMemory, 240, .93, "a100-1", 0, 1, 2)
	w.run("notebook-7", gpuMemory, 60, 0, "a100-1", 3)
	w.run("embed", gpuMemory, 20, 1.6, "a100-2", 0)
	w.run("rerank", gpuMemory, 40, .7, "a100-2", 0)
	w.run("notebook-12", gpuMemory, 40, .1, "a100-2", 1)
	w.share("gcu-2", 6).Health = accel.Health{Unhealthy: true, Cause: "over-temperature",
		Reason: "the temperature is 104 °C, above 100 °C"}
	w.share("a100-2", 3).Health = accel.Health{Unhealthy: true, Reason: "XID 79: the GPU has fallen off the bus", Cause: "xid-79",
		Quarantined: time.Now().Add(-3 * time.Hour).UTC().Truncate(time.Second)}
	w.share("a100-2", 0).Withheld = 12
	w.wait("train-0", gcuMemory, 56,
		"0/4 nodes are available: 2 insufficient GCU Memory in one gcu device, 2 the node offers no enflame.com/gcu-memory.")
	w.wait("finetune-1", gpuMemory, 120,
		"0/4 nodes are available: 2 Insufficient nvidia.com/gpu-memory.").CreationTimestamp.Time = time.Now().Add(-130 * time.Minute)
	return w
}

// large is a cluster of nodes with 8 devices, with pods.
func large(t *testing.T, nodes, pods int) *world {
	t.Helper()
	w := newWorld(t)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range nodes {
		name := fmt.Sprintf("gpu-%s-%04d", []string{"east", "west"}[i*2/nodes], i)
		if i%4 == 3 {
			w.node(name, gcuMemory, "S60", 8, 48)
		} else {
			w.node(name, gpuMemory, "NVIDIA A100-SXM4-80GB", 8, 80)
		}
		if rng.IntN(25) == 0 {
			w.share(name, rng.IntN(8)).Health = accel.Health{Unhealthy: true, Reason: "XID 79: the GPU has fallen off the bus",
				Cause: "xid-79"}
		}
		if rng.IntN(60) == 0 {
			w.nodes[i].Spec.Unschedulable = true
		}
	}
	held := map[accel.DeviceID]accel.Units{}
	for i := range pods {
		for range 20 {
			node := &w.nodes[rng.IntN(nodes)]
			inv := w.inventories[node.Name][0]
			device := rng.IntN(8)
			s := inv.Shares[device]
			units := s.Units * accel.Units(1+rng.IntN(4)) / 4
			if held[s.ID]+units > s.Units || s.Health.Unhealthy {
				continue
			}
			held[s.ID] += units
			w.run(fmt.Sprintf("job-%05d", i), string(inv.Resource), int64(units), min(rng.Float64()*1.3, 1), node.Name, device)
			break
		}
	}
	const none = "0/500 nodes are available: 500 Insufficient nvidia.com/gpu-memory."
	w.wait("train-0", gpuMemory, 96, none)
	w.wait("finetune-mib", gpuMemory, 40960, none)
	w.wait("prep-1", "nvidia.com/gpumem", 10, "0/500 nodes are available: 500 Insufficient nvidia.com/gpumem.")
	w.wait("eval-on-ssd", gpuMemory, 20, "0/500 nodes are available: 500 node(s) didn't match Pod's node affinity/selector.").
		Spec.NodeSelector = map[string]string{"disk": "ssd"}
	w.wait("queued-12", gcuMemory, 24, "").Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
	w.wait("whole", gpu, 2, "0/500 nodes are available: 500 Insufficient nvidia.com/gpu.")
	return w
}

// choose selects a value of a filter, as a person does.
func choose(p *Page, id, value string) {
	p.t.Helper()
	Eval[bool](p, fmt.Sprintf("((e) => { e.value = %q; return e.dispatchEvent(new Event('input')); })(document.getElementById(%q))", value,
		id))
}

// focused is what the element with the focus says to a reader of the screen.
func focused(p *Page) string {
	return Eval[string](p, "document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText")
}

// drawn waits until a page shows so many tiles, in which the use of devices is measured.
func drawn(p *Page, tiles int) {
	p.t.Helper()
	p.Until(fmt.Sprintf("document.querySelectorAll('.tile').length >= %d && document.body.innerText.includes('In use')", tiles))
}

// TestPage goes through the page of a small cluster.
func TestPage(t *testing.T) {
	w := small(t)
	s := w.serve(true)
	p := Open(t, 1400, 800)
	p.Go(s.URL())
	p.Until("document.querySelectorAll('.tile').length === 4")
	drawn(p, 4)
	if at := Eval[string](p, "location.href + document.cookie"); strings.Contains(at, "token") || !strings.HasSuffix(at, "/") {
		t.Errorf("a script of the page sees %q; want neither token nor cookie", at)
	}
	for _, text := range []string{"a100-1", "train-llm", "notebook-7", "unhealthy", "quarantine", "60 / 80",
		"4 × NVIDIA A100-SXM4-80GB · nvidia.com/gpu-memory in units of 1 GB", "finetune-1",
		"120 units of nvidia.com/gpu-memory (120 GB) are more than any device has"} {
		p.Text(text)
	}
	picture(p, "ui-small.png")

	t.Run("a pod comes and goes without a new picture", func(t *testing.T) {
		cell := `document.querySelector('[data-node="gcu-2"] [data-key="gcu-2-07/0"]')`
		Eval[bool](p, "window.kept = [...document.querySelectorAll('.tile, .cell')], true")
		pod := w.running("arrives", gcuMemory, 24, 0, "gcu-2", 7)
		w.watches.Add(&pod)
		p.Until(cell + ".innerText.includes('24 / 48') && " + cell + ".innerText.includes('arrives')")
		w.watches.Delete(&pod)
		p.Until(cell + ".innerText.includes('0 / 48')")
		if !Eval[bool](p, "kept.every((e) => e.isConnected) && kept.length === document.querySelectorAll('.tile, .cell').length") {
			t.Error("elements of the picture were replaced")
		}
	})
	t.Run("a device, by keyboard alone", func(t *testing.T) {
		p.Keys("/gcu-1-03") // nothing has a slash before that
		p.Text("1 of 4 nodes")
		p.Until("document.querySelectorAll('.cell:not(.other)').length === 1")
		p.Keys(kb.Escape) // to the picture
		p.Keys(kb.ArrowDown + kb.ArrowDown + kb.ArrowDown)
		if got := focused(p); !strings.HasPrefix(got, "Device 3, S60, 16 of 48 allocated as enflame.com/gcu-memory, 1 pod, ") {
			t.Errorf("the focus is on %q, want device 3", got)
		}
		p.Keys(kb.Enter)
		p.Until(`location.hash === '#device/gcu-1/gcu-1-03%2F0'`)
		for _, text := range []string{"16 of 48, 32 free", "team-c/infer-03", "uses 12.8 GiB of 16.0 GiB",
			"kubectl divvy inspect gcu-1 -o wide"} {
			p.Text(text)
		}
		p.Keys(kb.Escape) // closes the panel
		p.Text("Waiting pods 2")
		p.Keys("/" + kb.Backspace)
		p.Until("document.querySelectorAll('.tile').length === 4")
		p.Keys(kb.Escape + kb.Home)
		if got := focused(p); !strings.HasSuffix(got, "node a100-1") || !strings.HasPrefix(got, "Device 0,") {
			t.Errorf("Home leads to %q", got)
		}
		p.Keys(kb.ArrowRight + kb.ArrowUp + kb.End)
		if got := focused(p); !strings.HasSuffix(got, "node gcu-2") || !strings.HasPrefix(got, "Device 7,") {
			t.Errorf("End leads to %q", got)
		}
	})
	t.Run("a pod that waits, by keyboard alone", func(t *testing.T) {
		p.Keys("w" + kb.Tab)
		if got := focused(p); !strings.HasPrefix(got, "train-0") {
			t.Fatalf("the focus is on %q", got)
		}
		p.Keys(kb.Enter)
		for _, text := range []string{"largerThanDevice", "spread over 2 devices (28 each)", "✓ verified",
			"kubectl annotate pod -n team-b train-0 divvy.dev/devices=2", "What would help", "Does waiting help?"} {
			p.Text(text)
		}
		picture(p, "ui-waiting.png")
		p.Keys(kb.Escape)
		p.Text("Waiting pods 2")
	})
	t.Run("filters and groups", func(t *testing.T) {
		choose(p, "state", "bad")
		p.Text("2 of 4 nodes")
		choose(p, "resource", gcuMemory)
		p.Text("1 of 4 nodes")
		p.Do(chromedp.Click(chromedp.CSS("#clear")))
		choose(p, "group", "model")
		p.Until("[...document.querySelectorAll('#sheet h2')].map((h) => h.firstChild.innerText).join() === 'NVIDIA A100-SXM4-80GB,S60'")
		choose(p, "group", "")
		choose(p, "sort", "full")
		p.Until("Math.min(...[...document.querySelectorAll('.tile')].map((e) => e.getBoundingClientRect().top)) === " +
			"document.querySelector('[data-node=\"a100-1\"]').getBoundingClientRect().top")
		p.Keys("/nothing-like-this")
		p.Text("No device matches.")
		p.Do(chromedp.Click(chromedp.CSS("#clear")))
		p.Until("document.querySelectorAll('.tile').length === 4")
	})
	t.Run("an unknown pod, node and device", func(t *testing.T) {
		for hash, text := range map[string]string{
			"#pod/team-a/nothing": `namespace team-a has no pod "nothing".`, "#node/nothing": "There is no node nothing with devices",
			"#device/gcu-1/x": "Node gcu-1 has no such device", "#device/%E0/x": "Waiting pods 2",
			"#pod/team-c/infer-03": "Nothing keeps this pod waiting.",
		} {
			Eval[string](p, fmt.Sprintf("location.hash = %q", hash))
			p.Text(text)
		}
	})
	t.Run("dark", func(t *testing.T) {
		light := Eval[string](p, "getComputedStyle(document.body).backgroundColor")
		p.Dark(true)
		if dark := Eval[string](p, "getComputedStyle(document.body).backgroundColor"); dark == light {
			t.Errorf("the background is %s, light and dark", dark)
		}
		choose(p, "sort", "name")
		Eval[bool](p, "document.activeElement.blur(), true")
		Eval[string](p, "location.hash = '#device/a100-2/a100-2-00%2F0'")
		p.Text("12: containers use more than their allocations")
		p.Text("60 of 80, 8 free")
		time.Sleep(2 * time.Second) // until no tile is marked as changed
		picture(p, "ui-dark.png")
	})
	t.Run("a device in quarantine has nothing free", func(t *testing.T) {
		Eval[string](p, "location.hash = '#device/a100-2/a100-2-03%2F0'")
		p.Text("In quarantine: XID 79")
		p.Text("0 of 80")
		if text := Eval[string](p, "document.getElementById('side').innerText"); strings.Contains(text, "free") ||
			strings.Contains(text, "Withheld") {
			t.Errorf("the panel says %s", text)
		}
		Eval[string](p, "location.hash = ''")
	})
	t.Run("the list of waiting pods changes without new rows", func(t *testing.T) {
		Eval[bool](p, "window.kept = [...document.querySelectorAll('.waiting li')], kept[1].firstChild.focus(), true")
		pod := w.newPod("queued", gpuMemory, 8)
		pod.CreationTimestamp = metav1.Now()
		w.watches.Add(&pod)
		p.Text("Waiting pods 3")
		if !Eval[bool](p, "kept.every((e) => e.isConnected) && document.activeElement === kept[1].firstChild") {
			t.Error("rows were replaced")
		}
		w.watches.Delete(&pod)
		p.Text("Waiting pods 2")
	})
	t.Run("the address works once", func(t *testing.T) {
		w.openedAgain = true
		p.Go(s.URL())
		drawn(p, 4) // in this browser, which has the cookie
		other := Open(t, 800, 600)
		other.Go(s.URL())
		other.Text("This address was opened before.")
		p.Text("not connected")
	})
}

// TestUnplaced: pods whose devices are not known, boards that are offered whole as well, and nodes
// without devices.
func TestUnplaced(t *testing.T) {
	w := newWorld(t)
	w.node("a", gcuMemory, "S60", 2, 48)
	w.node("board", gpuMemory, "BI-150", 4, 32)
	w.boards("board", "iluvatar.com/gpu")
	w.node("broken", gcuMemory, "S60", 1, 48)
	w.node("z", gcuMemory, "S60", 2, 48)
	lost := w.running("lost", gcuMemory, 48, 0, "a", 0)
	lost.Annotations = nil
	w.pods = append(w.pods, lost)
	delete(w.inventories, "broken")
	w.nodes[2].Annotations["divvy.dev/inventory"] = "{"
	p := Open(t, 1400, 800)
	p.Go(w.serve(false).URL())
	p.Until("document.querySelectorAll('.tile').length === 4")
	p.Text("1 pod on a device that the node has not named")
	amount := func(node string) string {
		return Eval[string](p, fmt.Sprintf("document.querySelector('[data-node=%q] .amount').innerText", node))
	}
	if got := amount("a"); got != "50%" {
		t.Errorf("a node of two devices with a pod on one is %s allocated", got)
	}
	if got := Eval[string](p, "[...document.querySelectorAll('#sums dd')].map((e) => e.innerText).join()"); got != "4,8,13%,7,0,0" {
		t.Errorf("the header says %s", got)
	}
	choose(p, "resource", "iluvatar.com/gpu")
	p.Text("1 of 4 nodes")
	choose(p, "resource", "")
	p.Until("document.querySelectorAll('.tile').length === 4")

	p.Keys("/" + kb.Escape + kb.Home)
	for _, step := range []struct{ key, node string }{{kb.ArrowRight, "board"}, {kb.ArrowRight, "z"},
		{kb.ArrowLeft, "board"}, {kb.End, "z"}} {
		p.Keys(step.key)
		if got := focused(p); !strings.HasSuffix(got, "node "+step.node) {
			t.Errorf("the focus is on %q, want one of node %s", got, step.node)
		}
	}
	Eval[bool](p, "document.querySelector('[data-node=broken] .name').focus(), true")
	if got := Eval[int](p, "document.activeElement.tabIndex"); got != 0 {
		t.Error("Tab does not reach a node without devices")
	}
	p.Keys(kb.Enter)
	p.Text("What the node publishes cannot be read: ")

	choose(p, "view", "dense")
	p.Until("[...document.querySelectorAll('.dense .noted')].map((e) => e.dataset.node).sort().join() === 'a,broken'")
	if got := Eval[string](p, "getComputedStyle(document.querySelector('.noted .name'), '::before').content"); got != `"! "` {
		t.Errorf("the mark is %s", got)
	}
}

// TestMarkup: names and reasons that look like markup are text.
func TestMarkup(t *testing.T) {
	w := newWorld(t)
	const markup = `<img src=x onerror="document.title='bad'">`
	w.node("node-1", gcuMemory, markup, 2, 48)
	w.share("node-1", 0).Health = accel.Health{Unhealthy: true, Reason: markup + "\u202egnp.exe"}
	w.wait("waits", gcuMemory, 64, markup).Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: markup}}
	p := Open(t, 1200, 700)
	p.Go(w.serve(false).URL())
	p.Text("2 × " + markup)
	p.Text("the scheduling gate " + markup)
	Eval[string](p, "location.hash = '#device/node-1/node-1-00%2F0'")
	p.Text("Unhealthy: " + markup + "\ufffdgnp.exe")
	Eval[string](p, "location.hash = '#pod/team-c/waits'")
	p.Text("spec.schedulingGates: " + markup)
	if n := Eval[int](p, "document.images.length"); n > 0 {
		t.Errorf("the page has %d images", n)
	}
	refused := "(() => { try { document.body.innerHTML = '<b>x</b>'; return '' } catch (e) { return e.name } })()"
	if got := Eval[string](p, refused); got != "TypeError" {
		t.Errorf("the browser lets a script write markup: %q", got)
	}
}

// TestFewRights: a person sees what may be read, and a sentence about the rest.
func TestFewRights(t *testing.T) {
	for name, tt := range map[string]struct {
		denied []string
		want   []string
		tiles  int
	}{
		"no nodes":                    {[]string{"list nodes"}, []string{"You may not list and watch nodes", "train-llm", "80 / 80"}, 4},
		"no pods of other namespaces": {[]string{"list pods in "}, []string{"only those of namespace team-a are shown"}, 4},
		"nothing": {[]string{"list nodes", "watch pods"},
			[]string{"You may not list and watch nodes", "neither of all namespaces nor of namespace team-a",
				"Nothing to show with your permissions."}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := small(t)
			w.deny(tt.denied...)
			p := Open(t, 1400, 800)
			p.Go(w.serve(false).URL())
			p.Until(fmt.Sprintf("document.querySelectorAll('.tile').length === %d", tt.tiles))
			for _, text := range tt.want {
				p.Text(text)
			}
		})
	}
}

// TestWithoutDivvy: one sentence says that no node has devices.
func TestWithoutDivvy(t *testing.T) {
	w := newWorld(t)
	w.nodes = []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "plain", Annotations: map[string]string{}}}}
	w.wait("waits", gcuMemory, 8, "0/1 nodes are available: 1 Insufficient enflame.com/gcu-memory.")
	p := Open(t, 1200, 700)
	p.Go(w.serve(false).URL())
	p.Text("No node publishes devices that Divvy shares. To find out why, run: kubectl divvy doctor")
	p.Text("no node offers enflame.com/gcu-memory")
}

// TestSizes measures the page in large clusters: when the first picture is complete, since the
// address was opened, and how long a change takes until it is drawn. Neither is a bound here, since
// machines differ; what must hold is that a change draws one tile and keeps all elements.
func TestSizes(t *testing.T) {
	for _, size := range []struct{ nodes, pods int }{{500, 6000}, {5000, 20000}} {
		t.Run(fmt.Sprintf("%d nodes", size.nodes), func(t *testing.T) {
			w := large(t, size.nodes, size.pods)
			s := w.serve(true)
			p := Open(t, 1440, 900)
			p.CountCPU()
			before := p.CPU()
			p.Go(s.URL())
			p.Until("performance.getEntriesByName('drawn').length > 0")
			cpu := p.CPU() - before
			first := Eval[float64](p, "(({startTime, duration}) => startTime + duration)(performance.getEntriesByName('drawn')[0])")
			drawn(p, 100)
			tiles := Eval[int](p, "document.querySelectorAll('.tile').length")
			if shown := Eval[string](p, "document.querySelector('#sums dd').innerText"); shown != strconv.Itoa(size.nodes) {
				t.Errorf("the page counts %s nodes, want %d", shown, size.nodes)
			}
			// Until what is in use and why pods wait has been drawn, so that nothing else changes.
			p.Until("performance.now() - performance.getEntriesByName('drawn').at(-1).startTime > 4000")
			if size.nodes == 500 {
				p.Until("!document.body.innerText.includes('nodes are available')") // each has its reason
				picture(p, "ui-500.png")
			}

			name := w.nodes[1].Name
			cell := fmt.Sprintf(`document.querySelector('[data-node=%q] [data-key="%s-00/0"]')`, name, name)
			Eval[bool](p, `(() => {
				window.kept = [...document.querySelectorAll('.tile, .cell')];
				window.touched = new Set();
				new MutationObserver((all) => all.forEach((m) => touched.add(m.target.closest('.tile')?.dataset.node)))
					.observe(document.getElementById('sheet'), {subtree: true, attributes: true, attributeFilter: ['title', 'style'],
						childList: true});
				performance.clearMeasures();
				return true;
			})()`)
			var updates, updateCPU []float64
			for i := range 5 {
				pod := w.running(fmt.Sprintf("arrives-%d", i), gpuMemory, 1, 0, name, 0)
				shown := Eval[string](p, cell+".title")
				before = p.CPU()
				began := time.Now()
				w.watches.Add(&pod)
				p.Until(fmt.Sprintf("%s.title !== %q", cell, shown))
				updates = append(updates, float64(time.Since(began).Milliseconds()))
				updateCPU = append(updateCPU, p.CPU()-before)
			}
			if !Eval[bool](p, "kept.every((e) => e.isConnected) && kept.length === document.querySelectorAll('.tile, .cell').length") {
				t.Error("elements of the picture were replaced")
			}
			if got := Eval[[]string](p, "[...touched]"); !slices.Equal(got, []string{name}) {
				t.Errorf("a change of one node changed the tiles of %q", got)
			}
			Eval[bool](p, "performance.clearMeasures(), true")
			before = p.CPU()
			p.Keys("/j")
			p.Until("performance.getEntriesByName('drawn').length > 0")
			t.Logf("%d nodes of 8 devices, %d pods: first picture %.0f ms after the address was opened (%.0f ms of a processor in the "+
				"page), %d tiles exist; a change is drawn after %.0f ms, of which 250 ms are a wait for others (%.0f ms of a processor); "+
				"a search takes %.0f ms of a processor", size.nodes, size.pods, first, cpu, tiles, slices.Max(updates),
				slices.Max(updateCPU), p.CPU()-before)
		})
	}
}
