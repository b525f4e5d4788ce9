package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	config "github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/node/cgroup"
	"github.com/divvy-gpu/divvy/internal/node/dra"
	"github.com/divvy-gpu/divvy/internal/node/state"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// claimsFile is the file of the state folder that has what claims hold.
const claimsFile = "claims.json"

// claimsCollect is the pause between two looks for claims that hold something for no pod.
const claimsCollect = time.Minute

// claimsRetry is the pause between two attempts at what the API server or the host lacks.
const claimsRetry = 5 * time.Second

// claimDesk serves ResourceClaims from the engine: it implements dra.Keeper. It is safe
// for concurrent use.
type claimDesk struct {
	node, driverRoot string
	client           kubernetes.Interface
	records          *records
	cdi              *cdiWriter
	backends         map[string]backend.Backend
	discoveries      *discoveries
	// withdrawn is called when the pools may have to offer something else.
	withdrawn func()
	// serves is true if the node offers devices to claims. servers are the drivers by vendor: those of
	// the devices that are offered, and of those that claims still hold.
	serves  bool
	servers map[string]*dra.Server
	// units are the vendors of the resources that kubelet is offered.
	units map[accel.Resource]string

	// saving is held while what claims hold changes, until it is saved.
	saving sync.Mutex
	file   *state.Document[alloc.ClaimsState]

	mu sync.Mutex
	// shown are the devices that were published last, by vendor.
	shown map[string][]alloc.ClaimDevice

	reports claimReports
	limits  *claimLimits

	// recovered is closed when it is known what claims hold.
	recovered chan struct{}
	// abandoned are the claims that no pod used at the last look, for collect alone.
	abandoned map[alloc.ClaimKey]bool
	// cgroups is the folder of the host's control groups.
	cgroups string
}

// newClaimDesk returns the desk of an agent whose engine is made. It knows what claims hold, also
// where the node does not serve claims: their devices are not for kubelet.
func newClaimDesk(ctx context.Context, a *Agent) *claimDesk {
	c := &a.o.Config
	d := &claimDesk{
		node: a.o.Node, driverRoot: c.DriverRoot, client: a.o.Client, records: a.records, cdi: a.cdi, backends: a.o.Backends,
		discoveries: a.discoveries, withdrawn: a.signals.withdraw.raise, servers: map[string]*dra.Server{}, recovered: make(chan struct{}),
		file: state.NewDocument[alloc.ClaimsState](c.StateDir, claimsFile), shown: map[string][]alloc.ClaimDevice{},
		cgroups: a.endings.cgroups, serves: c.AllocationPath != config.PathPlugin, units: map[accel.Resource]string{},
	}
	d.reports, d.limits = newClaimReports(a), newClaimLimits(a)
	saved, exists, err := d.file.Load()
	if err != nil {
		aside, moveErr := d.file.Quarantine()
		klog.FromContext(ctx).Error(errors.Join(err, moveErr), "Recovering claim allocations from the API server", "movedTo", aside)
	}
	saved.Partial = saved.Partial || err != nil || d.serves && !exists
	for _, r := range a.offerings {
		d.units[r.name] = r.vendor
	}
	e, done := a.records.owner.use()
	defer done()
	e.Claims.Restore(saved)
	e.Claims.Attest(d.limits.attested)
	for _, vendor := range accel.VendorNames() {
		var ways []alloc.Config
		if d.serves && a.o.Backends[vendor] != nil {
			ways = waysOf(c, vendor)
		}
		// Claims that hold something are released by the driver, on whatever path the node is. Where the
		// node has served claims, the driver stays, without devices: kube-scheduler must not allocate
		// those that it has published.
		stays := exists && a.o.Backends[vendor] != nil && dra.Registers(c.KubeletDir)
		if len(ways) > 0 || stays || slices.ContainsFunc(saved.Claims, func(c alloc.Claim) bool { return c.Vendor == vendor }) {
			e.Claims.Serve(vendor, ways...)
			server := dra.NewServer(dra.Options{Vendor: vendor, Node: a.o.Node, KubeletDir: c.KubeletDir, CDIDir: c.CDIDir,
				Client: a.o.Client, Keeper: d, Answered: d.reports.answered(vendor), Misused: d.reports.misused,
				Predecessor: a.o.Handoff.Sockets[socketKey(vendor)]})
			d.servers[vendor] = server
			// As for containers of the device plugin: where the vendor's runtime is to do the rest, the
			// host need not have what complete descriptions take.
			if in, err := newInjector(c, vendor, accel.Resource(vendor)); err == nil && in.cdi() {
				a.cdi.describesFor(vendor, a.o.Backends[vendor], server.Redescribe)
			}
		}
	}
	return d
}

// waysOf returns how the resources of the configuration offer a vendor's devices.
func waysOf(c *config.NodeConfig, vendor string) []alloc.Config {
	var out []alloc.Config
	for i := range c.Resources {
		r := &c.Resources[i]
		if r.Vendor != vendor || c.PathOf(r) != config.PathDRA {
			continue
		}
		way := alloc.Config{ID: alloc.ID{Resource: accel.Resource(r.Name), Kind: alloc.Memory}, Vendor: vendor,
			Chooses: chooserOf(r, c.Vendors[vendor].Partitions())}
		if r.Allocation != config.DistributedAllocation {
			way.Cut.Policy = sharing.Packed // as the scheduler does by default
		}
		if r.Mode != config.ModeMemory {
			way.Kind, way.Cut = alloc.Slots, cutOf(r)
		}
		out = append(out, way)
	}
	return out
}

// run keeps what claims hold in order until ctx ends.
func (d *claimDesk) run(ctx context.Context) {
	d.repeat(ctx, "Could not recover claim allocations", d.recover)
	if ctx.Err() != nil {
		return
	}
	close(d.recovered)
	for sleep(ctx, claimsCollect) {
		if err := d.collect(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Could not determine which claims are in use")
		}
	}
}

// serve serves claims until ctx ends, once it is known what they hold.
func (d *claimDesk) serve(ctx context.Context) {
	select {
	case <-d.recovered:
	case <-ctx.Done():
		return
	}
	var work sync.WaitGroup
	defer work.Wait()
	for _, s := range d.servers {
		work.Go(func() { d.repeat(ctx, "Could not serve claims", s.Run) })
	}
}

// repeat calls do until it succeeds or ctx ends.
func (d *claimDesk) repeat(ctx context.Context, failure string, do func(context.Context) error) {
	for {
		err := do(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		klog.FromContext(ctx).Error(err, failure)
		if !sleep(ctx, claimsRetry) {
			return
		}
	}
}

// discovered takes the outcome of a discovery of a vendor's devices.
func (d *claimDesk) discovered(vendor string, found backend.Found, err error) {
	e, done := d.records.owner.use()
	e.Claims.Discover(vendor, discoveryOf(found, err))
	done()
	d.refresh()
	if s := d.servers[vendor]; s != nil {
		s.Redescribe()
	}
}

// refresh publishes devices that are not as they were published last.
func (d *claimDesk) refresh() {
	for vendor, s := range d.servers {
		now := d.Devices(vendor)
		d.mu.Lock()
		same := reflect.DeepEqual(d.shown[vendor], now)
		d.shown[vendor] = now
		d.mu.Unlock()
		if !same {
			s.Changed()
		}
	}
}

// recover finds out from the API server what the claims of this node's pods hold, if what was
// saved is lost.
func (d *claimDesk) recover(ctx context.Context) error {
	e, done := d.records.owner.use()
	partial := e.Claims.State().Partial
	done()
	if !partial {
		return nil
	}
	pods, err := d.records.pods.Fresh(ctx)
	if err != nil {
		return err
	}
	var found []alloc.Claim
	for _, pod := range pods {
		if terminal(pod) {
			continue
		}
		for _, name := range kube.ClaimsOf(pod) {
			claim, err := d.client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				continue
			} else if err != nil {
				return fmt.Errorf("get claim %s/%s of pod %s: %w", pod.Namespace, name, pod.Name, err)
			}
			for _, vendor := range accel.VendorNames() {
				// Of a claim that cannot be read no container has anything.
				one, err := dra.Read(claim, vendor, dra.PoolName(d.node, vendor))
				if err == nil && len(one.Parts) > 0 {
					one.Prepared = true // as far as is known
					found = append(found, one)
				}
			}
		}
	}
	d.saving.Lock()
	defer d.saving.Unlock()
	e, done = d.records.owner.use()
	e.Claims.Recover(found)
	done()
	klog.FromContext(ctx).Info("Recovered claim allocations", "claims", len(found))
	d.withdrawn()
	return d.save()
}

// collect releases claims that no pod uses any more: kubelet forgets to unprepare those that it has
// lost its own record of. Two looks have to agree, and nothing follows from a call that failed.
func (d *claimDesk) collect(ctx context.Context) error {
	e, done := d.records.owner.use()
	held := e.Claims.All()
	done()
	before := d.abandoned
	d.abandoned = map[alloc.ClaimKey]bool{}
	if len(held) == 0 {
		return nil
	}
	pods, err := d.records.pods.Fresh(ctx)
	if err != nil {
		return err
	}
	alive := map[string]bool{}
	for _, pod := range pods {
		alive[string(pod.UID)] = !terminal(pod)
	}
	for i := range held {
		claim := &held[i]
		used, err := d.used(ctx, claim, alive)
		if err != nil {
			return fmt.Errorf("claim %s/%s: %w", claim.Namespace, claim.Name, err)
		}
		switch server := d.servers[claim.Vendor]; {
		case used, server == nil:
		case !before[claim.Key()]:
			d.abandoned[claim.Key()] = true
		default:
			if err := server.Release(ctx, claim.Key()); err != nil {
				return err
			}
			klog.FromContext(ctx).Info("Released a claim that no pod uses and that kubelet did not release", "claim",
				klog.KRef(claim.Namespace, claim.Name), "uid", claim.UID)
		}
	}
	return nil
}

// used reports whether a pod uses what a claim holds: one that is alive by the API server, or one
// whose containers run although it is gone there.
func (d *claimDesk) used(ctx context.Context, held *alloc.Claim, alive map[string]bool) (bool, error) {
	users := slices.Clone(held.Pods)
	claim, err := d.client.ResourceV1().ResourceClaims(held.Namespace).Get(ctx, held.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return false, err
	case string(claim.UID) == held.UID:
		for _, user := range claim.Status.ReservedFor {
			users = append(users, string(user.UID))
		}
	}
	if slices.ContainsFunc(users, func(uid string) bool { return alive[uid] }) {
		return true, nil
	}
	running, err := cgroup.RunningPods(d.cgroups, users)
	return slices.ContainsFunc(users, func(uid string) bool { return running[uid] }), err
}

// save makes the file hold what claims hold. The caller holds saving.
func (d *claimDesk) save() error {
	e, done := d.records.owner.use()
	s := e.Claims.State()
	done()
	if err := d.file.Save(s); err != nil {
		return fmt.Errorf("save claim allocations: %w", err)
	}
	return nil
}

// Hold implements dra.Keeper. It takes part in the order of answers to kubelet: what Allocate is
// about to give out must not be held at the same time. Only kubelet knows what was given back.
func (d *claimDesk) Hold(ctx context.Context, claim alloc.Claim) (alloc.Claim, error) {
	ctx, end := d.records.question(ctx)
	defer end()
	d.saving.Lock()
	defer d.saving.Unlock()
	var before bool
	decide := func() (alloc.Claim, error) {
		e, done := d.records.owner.use()
		defer done()
		_, before = e.Claims.Get(claim.Key())
		return e.Claims.Hold(claim)
	}
	held, err := decide()
	for _, ask := range []askKubelet{d.records.ask, d.records.askFresh} {
		if !alloc.InDoubt(err) {
			break
		}
		if failed := ask(ctx, alloc.RecordedBefore); failed != nil {
			return held, fmt.Errorf("%w; the current owner is unknown: %w", err, failed)
		}
		held, err = decide()
	}
	if err != nil {
		return held, err
	}
	if err := d.save(); err != nil {
		if !before {
			e, done := d.records.owner.use()
			e.Claims.Release(claim.Key())
			done()
		}
		return held, err
	}
	d.withdrawn()
	return held, nil
}

// Prepared implements dra.Keeper.
func (d *claimDesk) Prepared(_ context.Context, claims []alloc.Claim) error {
	return d.change(func(c *alloc.Claims) {
		for i := range claims {
			c.Prepared(claims[i].Key(), claims[i].Together)
		}
	})
}

// Release implements dra.Keeper.
func (d *claimDesk) Release(_ context.Context, key alloc.ClaimKey) error {
	return d.change(func(c *alloc.Claims) { c.Release(key) })
}

func (d *claimDesk) change(do func(*alloc.Claims)) error {
	d.saving.Lock()
	defer d.saving.Unlock()
	e, done := d.records.owner.use()
	do(e.Claims)
	done()
	d.withdrawn()
	return d.save()
}

// Claims implements dra.Keeper.
func (d *claimDesk) Claims(vendor string) []alloc.Claim {
	e, done := d.records.owner.use()
	defer done()
	return slices.DeleteFunc(e.Claims.All(), func(c alloc.Claim) bool { return c.Vendor != vendor })
}

// Devices implements dra.Keeper.
func (d *claimDesk) Devices(vendor string) []alloc.ClaimDevice {
	e, done := d.records.owner.use()
	defer done()
	return e.Claims.Devices(vendor)
}

// Facts implements dra.Keeper.
func (d *claimDesk) Facts(vendor string, devices []alloc.ClaimDevice) dra.Facts {
	_, all, _ := d.discoveries.all()
	found := all[vendor].found
	facts := dra.Facts{Driver: found.Driver, Links: found.Links, PCIeRoots: map[string]string{}}
	for i := range devices {
		pci := devices[i].Card.PCI
		root, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(pci, deviceattribute.WithFSFromRoot(d.driverRoot+"/sys"))
		if pci != "" && err == nil && root.Value.StringValue != nil {
			facts.PCIeRoots[pci] = *root.Value.StringValue
		}
	}
	return facts
}

// Uses implements dra.Keeper. The API server is asked if the watch has not delivered all of the pods.
func (d *claimDesk) Uses(ctx context.Context, pods ...string) ([]dra.Use, error) {
	all := d.records.pods.Cached()
	known := func(uid string) bool {
		return slices.ContainsFunc(all, func(p *corev1.Pod) bool { return string(p.UID) == uid })
	}
	if !d.records.pods.Synced() || slices.ContainsFunc(pods, func(uid string) bool { return !known(uid) }) {
		ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
		defer cancel()
		fresh, err := d.records.pods.Fresh(ctx)
		if err != nil {
			return nil, err
		}
		if all = fresh; len(pods) > 0 && !slices.ContainsFunc(pods, known) {
			return nil, errors.New("none of the pods that it is reserved for is bound to this node")
		}
	}
	var out []dra.Use
	for _, pod := range all {
		if terminal(pod) {
			continue
		}
		for _, use := range dra.Uses(pod) {
			use.Around, use.Units = wayAround(&pod.Spec), d.unitsOf(pod, use.Container)
			out = append(out, use)
		}
	}
	return out, nil
}

// Edits implements dra.Keeper: what CDI gives a container with the devices, and the variables that
// name all of them.
func (d *claimDesk) Edits(vendor string, own, all []alloc.Portion) (cdispecs.ContainerEdits, error) {
	b := d.backends[vendor]
	if b == nil {
		return cdispecs.ContainerEdits{}, fmt.Errorf("the vendor %q is not configured any more", vendor)
	}
	named, err := b.Edits(chipsOf(all)...)
	if err != nil {
		return cdispecs.ContainerEdits{}, err
	}
	reached, err := b.Edits(chipsOf(own)...)
	if err != nil {
		return cdispecs.ContainerEdits{}, err
	}
	out := cdi.ContainerEdits{ContainerEdits: &cdispecs.ContainerEdits{}}
	if complete := d.cdi.describers[vendor]; complete != nil {
		for i, chip := range chipsOf(own) {
			common, device, err := complete.edits(chip)
			if err != nil {
				return cdispecs.ContainerEdits{}, err
			}
			if i == 0 {
				out.Append(&cdi.ContainerEdits{ContainerEdits: &common})
			}
			out.Append(&cdi.ContainerEdits{ContainerEdits: &device})
		}
	} else {
		out.DeviceNodes = cdiDevice("", reached.DeviceNodes).ContainerEdits.DeviceNodes
	}
	for _, name := range slices.Sorted(maps.Keys(named.Env)) {
		out.Env = append(out.Env, name+"="+named.Env[name])
	}
	for _, p := range all {
		if slices.Contains(chipsOf(own), p.Chip) {
			hooks, err := d.limits.hooks(vendor, p)
			if err != nil {
				return cdispecs.ContainerEdits{}, err
			}
			out.Hooks = append(out.Hooks, hooks...)
		}
	}
	return *out.ContainerEdits, nil
}

// unitsOf returns the resources of which a container requests units, by vendor. What kube-scheduler has
// turned into a claim is none.
func (d *claimDesk) unitsOf(pod *corev1.Pod, container string) map[string]accel.Resource {
	out := map[string]accel.Resource{}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		if c.Name != container {
			continue
		}
		for name, amount := range c.Resources.Limits {
			if vendor, ok := d.units[accel.Resource(name)]; ok && !amount.IsZero() && !claimed(pod, container, name) {
				out[vendor] = accel.Resource(name)
			}
		}
	}
	return out
}

// claimed reports whether a container has a claim for an extended resource that it requests.
func claimed(pod *corev1.Pod, container string, name corev1.ResourceName) bool {
	s := pod.Status.ExtendedResourceClaimStatus
	return s != nil && slices.ContainsFunc(s.RequestMappings, func(m corev1.ContainerExtendedResourceRequest) bool {
		return m.ContainerName == container && m.ResourceName == string(name)
	})
}

func chipsOf(portions []alloc.Portion) []accel.DeviceID {
	var out []accel.DeviceID
	for _, p := range portions {
		out = append(out, p.Chip)
	}
	return out
}

// ready returns nil once the drivers of the vendors whose devices claims get are known to kubelet and
// their devices are published, and it is known what claims hold. A vendor without devices is not missed
// where another one has some.
func (d *claimDesk) ready() error {
	if !d.serves {
		return nil
	}
	var missing []error
	e, done := d.records.owner.use()
	if e.Claims.State().Partial {
		missing = append(missing, errors.New("claim allocations have not been recovered yet"))
	}
	done()
	_, found, _ := d.discoveries.all()
	present := false
	var absent []error
	for vendor, server := range d.servers {
		missing = append(missing, server.Ready())
		present = present || found[vendor].err == nil && len(found[vendor].found.Devices) > 0
		absent = append(absent, found[vendor].err)
	}
	if !present {
		missing = append(missing, absent...)
	}
	return errors.Join(missing...)
}
