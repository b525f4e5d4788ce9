package cluster

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// Ledger is what the books write into. *ledger.Ledger is one.
type Ledger interface {
	SetNode(node string, inventory []accel.Inventory)
	DeleteNode(node string)
	Observe(h ledger.Holding)
	// Nominate tells of a pod that is not bound which node it waits for, "" for
	// none.
	Nominate(podUID, node string, request accel.Request)
	// Unbound tells of the same pod how the attempts to place it went, before Nominate.
	Unbound(podUID, nominated string, attempt ledger.Attempt)
	Forget(podUID string)
}

// Capacity is where the books write the CPU and memory of nodes and of the pods
// that ask for nothing of ours; those of other pods are in what Observe and
// Reserve get. *ledger.Ledger is one. Amounts are millicores and MiB.
type Capacity interface {
	SetCapacity(node string, cpu, memory int64)
	// Charge counts a pod on its node until it is forgotten; it may be repeated
	// with other amounts.
	Charge(podUID, node string, cpu, memory int64)
}

// Learner is told of every pod that is placed, once, also of those that were there
// before the books: for a placement policy that learns what is usual. Pods that
// come with a node (of a DaemonSet, or of kubelet's own) are not told of, and
// neither are those that take the place of one that failed: a controller may make them
// without end. It is called under the books' lock.
type Learner interface {
	// Learn is told what a pod asks for.
	Learn(request accel.Request)
	// LearnBeside is told of a pod that asks for nothing of ours, on a node that
	// publishes the resource: of its CPU in millicores and its memory in MiB.
	LearnBeside(resource accel.Resource, cpu, memory int64)
}

// Grants verifies the grant annotation of a pod. *kube.Keyring is one.
type Grants interface {
	DecodeGrant(podUID, value string) (accel.Grant, error)
}

// Label is a label that a node may carry.
type Label struct{ Key, Value string }

func (l Label) String() string { return l.Key + "=" + l.Value }

// Labels are labels of which a node must carry any one; none asks for nothing.
type Labels []Label

// ParseLabels reads key=value, several joined by commas.
func ParseLabels(s string) (Labels, error) {
	var out Labels
	for one := range strings.SplitSeq(s, ",") {
		key, value, ok := strings.Cut(one, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("node label %q: must be key=value", one)
		}
		out = append(out, Label{Key: key, Value: value})
	}
	return out, nil
}

// allow reports whether a node with these labels carries what l asks for.
func (l Labels) allow(carried map[string]string) bool {
	return len(l) == 0 || slices.ContainsFunc(l, func(one Label) bool {
		value, ok := carried[one.Key]
		return ok && value == one.Value
	})
}

func (l Labels) String() string {
	var all []string
	for _, one := range l {
		all = append(all, one.String())
	}
	return strings.Join(all, " or ")
}

// BooksConfig is what Books need. Ledger and Grants are required.
type BooksConfig struct {
	Ledger Ledger
	Grants Grants
	// Capacity is nil where no placement policy asks for CPU and memory. The
	// books then follow less of the nodes, and only the pods that ask for
	// something of ours.
	Capacity Capacity
	// Learner is nil where nobody learns. Of pods that ask for nothing of ours it
	// is told where there is a Capacity as well.
	Learner Learner
	// Resources are those that are followed; whatever else nodes publish or
	// pods ask for is ignored.
	Resources []accel.Resource
	// NodeLabels are the labels without any of which a node's inventory of a
	// resource does not count. A resource that is not in it needs none.
	NodeLabels map[accel.Resource]Labels
	// Now is the clock; time.Now when nil.
	Now func() time.Time
	// ConfigLabels are the labels of a node that name its configuration, the first
	// that is set decides.
	ConfigLabels []string
}

// Books follow the nodes and pods of a cluster and keep a ledger true to them.
// All methods are safe for concurrent use.
type Books struct {
	config BooksConfig
	// reflector is that of the pods; nil before Run.
	reflector atomic.Pointer[cache.Reflector]

	mu          sync.RWMutex // guards what follows; the ledger's lock nests in it
	logger      klog.Logger
	nodes       map[string]nodeRecord
	pods        map[string]podRecord  // by namespace/name; only pods that ask for something of ours
	others      map[string]struct{}   // by UID; the other pods that are charged, where CPU and memory are counted
	ending      map[string]*endingPod // by UID
	unlearned   []*slimPod            // pods on nodes that came before all nodes and pods were read; the Learner hears of them then
	failures    map[types.UID]int     // by the owner's UID; pods that failed and were not replaced yet
	nodesSynced bool
	podsSynced  bool
}

// nodeRecord is what the books remember of a node.
type nodeRecord struct {
	// digest is over all that the ledger was told from; the node is looked at
	// again only when it changes.
	digest [sha256.Size]byte
	// problem says, for people, why the node's inventory does not count; ""
	// when it does, and when there is none.
	problem string
	// counted are the resources whose inventory counts, and several those of which
	// the node can give a pod several devices.
	counted, several []accel.Resource
	// config names the node's configuration; "" when no label does.
	config string
	// ending are the pods that the node lists as gone before their containers; nil
	// for none.
	ending *endingList
}

// podRecord is what the books remember of a pod.
type podRecord struct {
	pod Pod
	// unverified is the grant annotation of a bound pod when it did not
	// verify: another key may make it good.
	unverified string
	// granted is true when a grant placed the pod on a device.
	granted bool
	// runs is what MayRun says of the pod, and grace how long its containers may take
	// to end, in seconds.
	runs  bool
	grace int32
}

// NewBooks returns books with nothing in them.
func NewBooks(c BooksConfig) *Books {
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Books{
		config: c,
		logger: klog.Background(),
		nodes:  map[string]nodeRecord{},
		pods:   map[string]podRecord{},
		others: map[string]struct{}{},
		ending: map[string]*endingPod{},

		failures: map[types.UID]int{},
	}
}

// nodesResource and running say what the books are made of: all nodes, by
// their metadata alone, a tenth of their size, unless CPU and memory are counted;
// and all pods. A watch of those alone that have not ended would show how a pod was
// before it ended, and not whether its containers have; the books forget what ended.
// Who reads once does without those.
var (
	nodesResource = v1.SchemeGroupVersion.WithResource("nodes")
	running       = fields.AndSelectors(
		fields.OneTermNotEqualSelector("status.phase", string(v1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(v1.PodFailed)),
	).String()
)

// Run follows the API server until the context ends.
func (b *Books) Run(ctx context.Context, clients kube.Clients) {
	b.mu.Lock()
	b.logger = klog.FromContext(ctx)
	b.mu.Unlock()
	pods := clients.Kubernetes.CoreV1().Pods(metav1.NamespaceAll)

	var group wait.Group
	if b.config.Capacity != nil {
		nodes := clients.Kubernetes.CoreV1().Nodes()
		group.StartWithContext(ctx, kube.NewReflector("nodes", &v1.Node{}, b.Nodes(), kube.ListWatch(clients.Kubernetes, "", nodes.List,
			nodes.Watch)).RunWithContext)
	} else {
		nodes := clients.Metadata.Resource(nodesResource)
		group.StartWithContext(ctx, kube.NewReflector("nodes", &metav1.PartialObjectMetadata{}, b.Nodes(),
			kube.ListWatch(clients.Metadata, "", nodes.List, nodes.Watch)).RunWithContext)
	}
	group.StartWithContext(ctx, b.following(kube.NewReflector("pods", &v1.Pod{}, b.Pods(), kube.ListWatch(clients.Kubernetes, "", pods.List,
		pods.Watch))))
	group.Wait()
}

// Nodes returns the books as a reflector of node metadata writes into them.
func (b *Books) Nodes() cache.TransformingStore { return nodeStore{b} }

// Pods returns the books as a reflector of pods writes into them.
func (b *Books) Pods() cache.TransformingStore { return podStore{b} }

// Synced reports whether the ledger has everything that the API server had
// when the books were opened.
func (b *Books) Synced() bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.nodesSynced && b.podsSynced
}

// Pod returns what the books know of a pod that asks for something of ours.
func (b *Books) Pod(namespace, name string) (Pod, bool) {
	b.mu.RLock()
	defer b.mu.RUnlock()
	r, ok := b.pods[namespace+"/"+name]
	return r.pod, ok
}

// Placed is a pod on a node, and what the node's label says of its configuration.
type Placed struct {
	Pod
	// Config names the node's configuration; "" when no label does.
	Config string
}

// Placed returns the pods on nodes that ask for something of ours and have not
// ended, in no order.
func (b *Books) Placed() []Placed {
	b.mu.RLock()
	defer b.mu.RUnlock()
	var out []Placed
	for _, r := range b.pods {
		if r.pod.Node != "" {
			out = append(out, Placed{Pod: r.pod, Config: b.nodes[r.pod.Node].config})
		}
	}
	return out
}

// Problem says, for people, why nothing can be placed on a node; "" when no
// reason is known. It tells an unlabelled node and a broken inventory from a
// node that publishes nothing.
func (b *Books) Problem(node string) string {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return b.nodes[node].problem
}

// Several reports whether the node can give a pod several devices of the
// resource.
func (b *Books) Several(node string, resource accel.Resource) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	return slices.Contains(b.nodes[node].several, resource)
}

// Size is how much the books hold.
type Size struct {
	// Nodes are all nodes of the cluster, BadNodes those with a Problem.
	Nodes, BadNodes int
	// Pods are those that ask for something of ours: waiting for a node, and
	// on a node with and without a grant that verifies.
	Waiting, Granted, Ungranted int
}

// Size counts what the books hold.
func (b *Books) Size() Size {
	b.mu.RLock()
	defer b.mu.RUnlock()
	s := Size{Nodes: len(b.nodes)}
	for _, n := range b.nodes {
		if n.problem != "" {
			s.BadNodes++
		}
	}
	for _, p := range b.pods {
		switch {
		case p.pod.Node == "":
			s.Waiting++
		case p.granted:
			s.Granted++
		default:
			s.Ungranted++
		}
	}
	return s
}

// KeyChanged looks again at the grants that did not verify.
func (b *Books) KeyChanged() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, r := range b.pods {
		if r.unverified != "" {
			b.setPod(&slimPod{Pod: r.pod, grant: r.unverified, runs: r.runs, grace: r.grace})
		}
	}
}

// setPod takes in the newest state of a pod. b.mu is held.
func (b *Books) setPod(p *slimPod) {
	key := p.Ref.String()
	old, known := b.pods[key]
	if known && old.pod.Ref.UID != p.Ref.UID {
		// Re-created under its name, and the deletion was not seen.
		b.forgetPod(key, old, unseenGrace)
	}
	_, charged := b.others[p.Ref.UID]
	if known && old.pod.Ref.UID == p.Ref.UID || charged {
		b.noteFailure(p)
	}
	if p.Ended || len(p.Requests) == 0 {
		b.deletePod(p, p.Ended)
		if b.config.Capacity != nil && !p.Ended && p.Node != "" {
			if !charged {
				b.learn(p)
			}
			b.config.Capacity.Charge(p.Ref.UID, p.Node, p.cpu, p.memory)
			b.others[p.Ref.UID] = struct{}{}
		}
		return
	}
	if !known || old.pod.Ref.UID != p.Ref.UID || old.pod.Node == "" {
		b.learn(p)
	}
	delete(b.ending, p.Ref.UID)
	record := podRecord{pod: p.Pod, runs: p.runs, grace: p.grace}
	if p.Node != "" {
		var grant accel.Grant
		if p.grant != "" {
			var err error
			if grant, err = b.config.Grants.DecodeGrant(p.Ref.UID, p.grant); err != nil {
				// Told once; it counts on its node, on no device.
				if old.unverified != p.grant {
					b.logger.Info("Ignoring a planned allocation with an invalid signature", "pod", p.Ref.String(), "reason", err.Error())
				}
				grant, record.unverified = accel.Grant{}, p.grant
			}
		}
		for _, request := range p.Requests {
			h := ledger.Holding{
				Pod: p.Ref, Node: p.Node, Resource: request.Resource, Units: request.Peak(), Created: p.Created,
				Priority: request.Priority, Ending: p.Ending, CPU: request.CPU, Memory: request.Memory,
			}
			if grant.Node == p.Node && grant.Resource == request.Resource {
				h.Confirmed = grant.Confirmed
				h.SetDevices(grant.Devices())
				record.granted = true
			}
			b.config.Ledger.Observe(h)
		}
	} else if len(p.Requests) == 1 && p.Mistake == nil {
		b.config.Ledger.Unbound(p.Ref.UID, p.Nominated, p.attempt)
		b.config.Ledger.Nominate(p.Ref.UID, p.Nominated, p.Requests[0])
	}
	b.pods[key] = record
}

// deletePod takes a pod that is gone or ended, or asks for nothing of ours (then
// gone is false), out of the books and the ledger.
// The ledger may know a pod that the books do not: one that was bound before
// its watch event came. b.mu is held.
func (b *Books) deletePod(p *slimPod, gone bool) {
	key := p.Ref.String()
	if old, known := b.pods[key]; known && old.pod.Ref.UID == p.Ref.UID {
		old.runs = p.runs
		b.forgetPod(key, old, endingGrace+time.Duration(p.grace)*time.Second)
	} else if len(p.Requests) > 0 {
		b.release(&p.Pod, p.runs && b.ending[p.Ref.UID] != nil, unseenGrace)
	} else if _, charged := b.others[p.Ref.UID]; charged && gone {
		b.discharge(p.Ref.UID)
	}
}

// discharge takes a pod that asks for nothing of ours off its node.
func (b *Books) discharge(uid string) {
	delete(b.others, uid)
	b.config.Ledger.Forget(uid)
}

// forgetPod takes a pod out of the books. What it holds is free after a time at the
// latest of which its node says nothing.
func (b *Books) forgetPod(key string, r podRecord, silence time.Duration) {
	delete(b.pods, key)
	b.release(&r.pod, r.runs, silence)
}

// setNode tells the ledger what a node publishes, if that changed. b.mu is
// held.
func (b *Books) setNode(n *slimNode) {
	if b.config.Capacity != nil {
		b.config.Capacity.SetCapacity(n.name, n.cpu, n.memory)
	}
	inventory, digest := b.published(n)
	record := nodeRecord{digest: digest, ending: b.setEnding(n)}
	for _, key := range b.config.ConfigLabels {
		if record.config = n.labels[key]; record.config != "" {
			break
		}
	}
	if old, known := b.nodes[n.name]; known && old.digest == digest {
		old.config, old.ending = record.config, record.ending
		b.nodes[n.name] = old
		return
	}
	var counted []accel.Inventory
	if inventory != "" {
		all, err := wire.DecodeInventory(inventory)
		if err != nil {
			record.problem = "the inventory of the node is invalid"
			b.logger.Error(err, "Ignoring the inventory of the node", "node", n.name)
		}
		for _, inv := range all {
			if !slices.Contains(b.config.Resources, inv.Resource) {
				continue
			}
			if labels := b.config.NodeLabels[inv.Resource]; !labels.allow(n.labels) {
				record.problem = "the node is not labelled " + labels.String()
				continue
			}
			counted = append(counted, inv)
			record.counted = append(record.counted, inv.Resource)
			if inv.Several {
				record.several = append(record.several, inv.Resource)
			}
		}
	}
	b.nodes[n.name] = record
	b.config.Ledger.SetNode(n.name, counted)
}

// published returns the node's inventory annotation and a digest over it and
// the labels that matter.
func (b *Books) published(n *slimNode) (string, [sha256.Size]byte) {
	inventory := n.inventory
	if inventory == "" {
		return "", [sha256.Size]byte{}
	}
	h := sha256.New()
	for _, resource := range b.config.Resources {
		fmt.Fprintf(h, "%t\n", b.config.NodeLabels[resource].allow(n.labels))
	}
	h.Write([]byte(inventory))
	return inventory, [sha256.Size]byte(h.Sum(nil))
}

// deleteNode takes a node out of the books and the ledger. b.mu is held.
func (b *Books) deleteNode(name string) {
	delete(b.nodes, name)
	b.forgetEnding(func(e *endingPod) bool { return e.node == name })
	b.config.Ledger.DeleteNode(name)
}
