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

// Ledger is what a State writes into. *ledger.Ledger is one.
type Ledger interface {
	SetNode(node string, inventory []accel.Inventory)
	DeleteNode(node string)
	Observe(h ledger.Holding)
	// Nominate says which node a pod that is not bound waits for, "" for none.
	Nominate(podUID, node string, request accel.Request)
	// Unbound says how the attempts to place the same pod went, before Nominate.
	Unbound(podUID, nominated string, attempt ledger.Attempt)
	Forget(podUID string)
}

// Capacity is where a State writes the CPU and memory of nodes and of the pods without a
// shared resource; those of other pods are in what Observe and Reserve get.
// *ledger.Ledger is one. Amounts are millicores and MiB.
type Capacity interface {
	SetCapacity(node string, cpu, memory int64)
	// Charge counts a pod on its node until it is forgotten; it may be repeated
	// with other amounts.
	Charge(podUID, node string, cpu, memory int64)
}

// Learner hears of every pod that is placed, once, also of those that were placed
// before: for a placement policy that learns what is usual. It does not hear of pods that
// come with a node (of a DaemonSet, or of kubelet's own), nor of those that replace one
// that failed: a controller may make them without end. It is called under the State's lock.
type Learner interface {
	// Learn gets what a pod requests.
	Learn(request accel.Request)
	// LearnBeside gets the CPU in millicores and the memory in MiB of a pod without a
	// shared resource, on a node that publishes the resource.
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

// Config is what a State needs. Ledger and Grants are required.
type Config struct {
	Ledger Ledger
	Grants Grants
	// Capacity is nil where no placement policy looks at CPU and memory. Then less of
	// the nodes is followed, and only the pods that request a shared resource.
	Capacity Capacity
	// Learner may be nil. It hears of pods without a shared resource only where there
	// is a Capacity.
	Learner Learner
	// Resources are the shared ones; others are ignored.
	Resources []accel.Resource
	// NodeLabels are the labels without any of which a node's inventory of a
	// resource does not count. A resource that is not in it needs none.
	NodeLabels map[accel.Resource]Labels
	// Now is the clock; time.Now when nil.
	Now func() time.Time
	// ConfigLabels are the labels of a node that name its configuration, the first
	// that is set decides.
	ConfigLabels []string
	// KeepOveruse keeps what nodes list of memory overuse, for Overuse.
	KeepOveruse bool
}

// State follows the nodes and pods of a cluster and updates a ledger from them.
// All methods are safe for concurrent use.
type State struct {
	config Config
	// reflector is that of the pods; nil before Run.
	reflector atomic.Pointer[cache.Reflector]

	mu          sync.RWMutex // guards what follows; the ledger's lock nests in it
	logger      klog.Logger
	nodes       map[string]nodeRecord
	pods        map[string]podRecord  // by namespace/name; only pods that request a shared resource
	others      map[string]struct{}   // by UID; the other pods that are charged, where CPU and memory are counted
	ending      map[string]*endingPod // by UID
	learning    learning
	nodesSynced bool
	podsSynced  bool
}

// nodeRecord is what a State remembers of a node.
type nodeRecord struct {
	// digest is over all that the ledger got; the node is decoded again only when it
	// changes.
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
	// overuse is the annotation wire.OveruseAnnotation; "" where it is not kept.
	overuse string
}

// podRecord is what a State remembers of a pod.
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

// NewState returns an empty one.
func NewState(c Config) *State {
	if c.Now == nil {
		c.Now = time.Now
	}
	return &State{
		config: c,
		logger: klog.Background(),
		nodes:  map[string]nodeRecord{},
		pods:   map[string]podRecord{},
		others: map[string]struct{}{},
		ending: map[string]*endingPod{},

		learning: learning{learner: c.Learner, failures: map[types.UID]int{}},
	}
}

// nodesResource and running say what is read: all nodes, by their metadata alone, a
// tenth of their size, unless CPU and memory are counted; and all pods. A watch of
// running pods alone would show how a pod was before it ended, and not whether its
// containers have; the state forgets what ended. LoadView reads running ones only.
var (
	nodesResource = v1.SchemeGroupVersion.WithResource("nodes")
	running       = fields.AndSelectors(
		fields.OneTermNotEqualSelector("status.phase", string(v1.PodSucceeded)),
		fields.OneTermNotEqualSelector("status.phase", string(v1.PodFailed)),
	).String()
)

// Run follows the API server until the context ends.
func (s *State) Run(ctx context.Context, clients kube.Clients) {
	s.mu.Lock()
	s.logger = klog.FromContext(ctx)
	s.mu.Unlock()
	pods := clients.Kubernetes.CoreV1().Pods(metav1.NamespaceAll)

	var group wait.Group
	if s.config.Capacity != nil {
		nodes := clients.Kubernetes.CoreV1().Nodes()
		group.StartWithContext(ctx, kube.NewReflector("nodes", &v1.Node{}, s.Nodes(), kube.ListWatch(clients.Kubernetes, "", nodes.List,
			nodes.Watch)).RunWithContext)
	} else {
		nodes := clients.Metadata.Resource(nodesResource)
		group.StartWithContext(ctx, kube.NewReflector("nodes", &metav1.PartialObjectMetadata{}, s.Nodes(),
			kube.ListWatch(clients.Metadata, "", nodes.List, nodes.Watch)).RunWithContext)
	}
	reflector := kube.NewReflector("pods", &v1.Pod{}, s.Pods(), kube.ListWatch(clients.Kubernetes, "", pods.List, pods.Watch))
	s.reflector.Store(reflector)
	group.StartWithContext(ctx, reflector.RunWithContext)
	group.Wait()
}

// Synced reports whether the ledger has everything that the API server had at the
// start.
func (s *State) Synced() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.nodesSynced && s.podsSynced
}

// Pod returns a pod that requests a shared resource.
func (s *State) Pod(namespace, name string) (Pod, bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	r, ok := s.pods[namespace+"/"+name]
	return r.pod, ok
}

// Placed is a pod on a node, and what the node's label says of its configuration.
type Placed struct {
	Pod
	// Config names the node's configuration; "" when no label does.
	Config string
}

// Placed returns the pods on nodes that request a shared resource and have not
// ended, in no order.
func (s *State) Placed() []Placed {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var out []Placed
	for _, r := range s.pods {
		if r.pod.Node != "" {
			out = append(out, Placed{Pod: r.pod, Config: s.nodes[r.pod.Node].config})
		}
	}
	return out
}

// Problem says, for people, why nothing can be placed on a node; "" when no
// reason is known.
func (s *State) Problem(node string) string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.nodes[node].problem
}

// Several reports whether the node can give a pod several devices of the
// resource.
func (s *State) Several(node string, resource accel.Resource) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Contains(s.nodes[node].several, resource)
}

// Hindered returns the pods that kube-scheduler finds too little for, and those whose
// condition Waits says why, in no order.
func Hindered(s *State) []Pod {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var out []Pod
	for _, r := range s.pods {
		if r.pod.Said.Short || r.pod.Said.Reason != "" {
			out = append(out, r.pod)
		}
	}
	return out
}

// Size is how much a State holds.
type Size struct {
	// Nodes are all nodes of the cluster, BadNodes those with a Problem.
	Nodes, BadNodes int
	// The pods that request a shared resource: waiting for a node, and on a node with
	// and without a grant that verifies.
	Waiting, Granted, Ungranted int
}

// Size counts.
func (s *State) Size() Size {
	s.mu.RLock()
	defer s.mu.RUnlock()
	size := Size{Nodes: len(s.nodes)}
	for _, n := range s.nodes {
		if n.problem != "" {
			size.BadNodes++
		}
	}
	for _, p := range s.pods {
		switch {
		case p.pod.Node == "":
			size.Waiting++
		case p.granted:
			size.Granted++
		default:
			size.Ungranted++
		}
	}
	return size
}

// Offering returns the nodes that publish something, in the order of their names.
func (s *State) Offering() []string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := make([]string, 0, len(s.nodes))
	for name, n := range s.nodes {
		if n.digest != [sha256.Size]byte{} {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// KeyChanged looks again at the grants that did not verify.
func (s *State) KeyChanged() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.pods {
		if r.unverified != "" {
			s.setPod(&slimPod{Pod: r.pod, grant: r.unverified, runs: r.runs, grace: r.grace})
		}
	}
}

// setPod takes in the newest state of a pod. s.mu is held.
func (s *State) setPod(p *slimPod) {
	key := p.Ref.String()
	old, known := s.pods[key]
	if known && old.pod.Ref.UID != p.Ref.UID {
		// Re-created under its name, and the deletion was not seen.
		s.forgetPod(key, old, unseenGrace)
	}
	_, charged := s.others[p.Ref.UID]
	if known && old.pod.Ref.UID == p.Ref.UID || charged {
		s.learning.noteFailure(p)
	}
	if p.Ended || len(p.Requests) == 0 {
		s.deletePod(p, p.Ended)
		if s.config.Capacity != nil && !p.Ended && p.Node != "" {
			if !charged {
				s.learn(p)
			}
			s.config.Capacity.Charge(p.Ref.UID, p.Node, p.cpu, p.memory)
			s.others[p.Ref.UID] = struct{}{}
		}
		return
	}
	if !known || old.pod.Ref.UID != p.Ref.UID || old.pod.Node == "" {
		s.learn(p)
	}
	delete(s.ending, p.Ref.UID)
	record := podRecord{pod: p.Pod, runs: p.runs, grace: p.grace}
	if p.Node != "" {
		var grant accel.Grant
		if p.grant != "" {
			var err error
			if grant, err = s.config.Grants.DecodeGrant(p.Ref.UID, p.grant); err != nil {
				// Logged once; it counts on its node, on no device.
				if old.unverified != p.grant {
					s.logger.Info("Ignoring a planned allocation with an invalid signature", "pod", p.Ref.String(), "reason", err.Error())
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
			s.config.Ledger.Observe(h)
		}
	} else if len(p.Requests) == 1 && p.Mistake == nil {
		s.config.Ledger.Unbound(p.Ref.UID, p.Nominated, p.attempt)
		s.config.Ledger.Nominate(p.Ref.UID, p.Nominated, p.Requests[0])
	}
	s.pods[key] = record
}

// deletePod removes a pod that is gone or ended, or requests no shared resource (then
// gone is false). The ledger may know a pod that the watch has not shown yet. s.mu is held.
func (s *State) deletePod(p *slimPod, gone bool) {
	key := p.Ref.String()
	if old, known := s.pods[key]; known && old.pod.Ref.UID == p.Ref.UID {
		old.runs = p.runs
		s.forgetPod(key, old, endingGrace+time.Duration(p.grace)*time.Second)
	} else if len(p.Requests) > 0 {
		s.release(&p.Pod, p.runs && s.ending[p.Ref.UID] != nil, unseenGrace)
	} else if _, charged := s.others[p.Ref.UID]; charged && gone {
		s.discharge(p.Ref.UID)
	}
}

// discharge takes a pod without a shared resource off its node.
func (s *State) discharge(uid string) {
	delete(s.others, uid)
	s.config.Ledger.Forget(uid)
}

// forgetPod removes a pod. What it holds is free once its node has said nothing of it
// for that time.
func (s *State) forgetPod(key string, r podRecord, silence time.Duration) {
	delete(s.pods, key)
	s.release(&r.pod, r.runs, silence)
}

// setNode updates the ledger from what a node publishes, if that changed. s.mu is
// held.
func (s *State) setNode(n *slimNode) {
	if s.config.Capacity != nil {
		s.config.Capacity.SetCapacity(n.name, n.cpu, n.memory)
	}
	digest := s.config.digest(n)
	record := nodeRecord{digest: digest, ending: s.setEnding(n)}
	if s.config.KeepOveruse {
		record.overuse = n.overuse
	}
	for _, key := range s.config.ConfigLabels {
		if record.config = n.labels[key]; record.config != "" {
			break
		}
	}
	if old, known := s.nodes[n.name]; known && old.digest == digest {
		old.config, old.ending, old.overuse = record.config, record.ending, record.overuse
		s.nodes[n.name] = old
		return
	}
	var counted []accel.Inventory
	if n.inventory != "" {
		all, err := n.decoded, error(nil)
		if all == nil {
			all, err = wire.DecodeInventory(n.inventory)
		}
		if err != nil {
			record.problem = "the inventory of the node is invalid"
			s.logger.Error(err, "Ignoring the inventory of the node", "node", n.name)
		}
		for _, inv := range all {
			if !slices.Contains(s.config.Resources, inv.Resource) {
				continue
			}
			if labels := s.config.NodeLabels[inv.Resource]; !labels.allow(n.labels) {
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
	s.nodes[n.name] = record
	s.config.Ledger.SetNode(n.name, counted)
}

// digest is over the node's inventory annotation and the labels that matter, zero
// without an annotation.
func (c *Config) digest(n *slimNode) [sha256.Size]byte {
	if n.inventory == "" {
		return [sha256.Size]byte{}
	}
	h := sha256.New()
	for _, resource := range c.Resources {
		fmt.Fprintf(h, "%t\n", c.NodeLabels[resource].allow(n.labels))
	}
	h.Write([]byte(n.inventory))
	return [sha256.Size]byte(h.Sum(nil))
}

// deleteNode removes a node. s.mu is held.
func (s *State) deleteNode(name string) {
	delete(s.nodes, name)
	s.forgetEnding(func(e *endingPod) bool { return e.node == name })
	s.config.Ledger.DeleteNode(name)
}
