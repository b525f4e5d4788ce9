package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// Where the node's records of claims are.
const (
	daemonClaims  = "/var/lib/divvy/claims.json"
	kubeletClaims = "/var/lib/kubelet/dra_manager_state"
	claimSpecs    = "/var/run/cdi/divvy-claim-"
)

// driverSuffix ends the names of the drivers, which begin with the vendor.
const driverSuffix = ".divvy.dev"

// Sample is what all sources say at about one time of a node whose devices pods have by units,
// whole or by ResourceClaims. Sources that did not answer are nil.
type Sample struct {
	Chips []Chip
	// Units say which unit belongs to which GCU.
	Units Units
	// Users are the containers that ran from the first to the last look at the pods.
	Users []User
	// API are the claims of the API server that have an allocation. Daemon are those of the record
	// of divvy-node, and Checkpoint those of kubelet's.
	API, Daemon, Checkpoint []Claim
	// Kubelet is its pod-resources API, by container as namespace/pod/container.
	Kubelet map[string]Held
	// Specs are the CDI specifications of claims, as vendor-UID.
	Specs []string
}

// Chip is a device of the hardware.
type Chip struct {
	Vendor, UUID, Board string
	// Number is that among the devices of the vendor, and in /dev.
	Number int
	Bytes  int64
}

// User is a running container that uses devices.
type User struct {
	// Name is namespace/pod/container, and ID that of the container.
	Name, ID string
	Uses     []Use
	// Asks are the amounts of extended resources.
	Asks  map[string]int64
	Sight testenv.Sight
}

// Use is a claim as namespace/name, and the request of it that a container uses, "" for all.
type Use struct{ Claim, Request string }

// Claim is a ResourceClaim as a source has it. What the source does not have is empty.
type Claim struct {
	UID, Name string // Name is namespace/name
	Has       []Allocation
	// Users is for how many pods the claim is reserved.
	Users    int
	Prepared bool
}

// Allocation is what a claim has of a device.
type Allocation struct {
	Driver, Device, Share, Request string
	Bytes                          int64 // 0 for the whole device
}

// Held is what kubelet says that a container has.
type Held struct {
	Claims map[string][]Allocation // by namespace/name
	Units  map[string][]string     // by resource
}

// ChipsOf returns the devices of a machine.
func ChipsOf(hardware vendorsim.Topology) []Chip {
	var out []Chip
	for i := range hardware.Cards {
		card := &hardware.Cards[i]
		chip := Chip{Vendor: card.Vendor, UUID: card.UUID, Board: card.Board, Bytes: card.MemoryMiB << 20}
		for _, other := range out {
			if other.Vendor == chip.Vendor {
				chip.Number++
			}
		}
		out = append(out, chip)
	}
	return out
}

// Sample reads all sources. What the API server or kubelet do not answer is missing in it.
func (a *Auditor) Sample(ctx context.Context, chips []Chip) (s Sample, err error) {
	s.Chips = chips
	if s.Units, err = readUnits(unitsFile); err != nil {
		return s, err
	}
	before, down := a.usingPods(ctx)
	if down == nil {
		s.API, down = a.claims(ctx)
	}
	for i := range before {
		s.Users = append(s.Users, look(&before[i])...)
	}
	asking, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if pods, err := listKubelet(asking); err == nil {
		s.Kubelet = heldBy(pods)
	}
	if s.Checkpoint, err = readCheckpoint(kubeletClaims); err != nil {
		return s, err
	}
	if s.Daemon, err = readDaemon(daemonClaims); err != nil {
		return s, err
	}
	if s.Specs, err = specNames(); err != nil {
		return s, err
	}
	if down == nil {
		var after []corev1.Pod
		if after, down = a.usingPods(ctx); down == nil {
			s.Users = stayed(s.Users, after)
		}
	}
	if down != nil {
		s.API, s.Users = nil, nil
	}
	return s, nil
}

// heldBy returns what kubelet says, by container.
func heldBy(pods []*podresources.PodResources) map[string]Held {
	out := map[string]Held{}
	for _, pod := range pods {
		for _, c := range pod.GetContainers() {
			held := Held{Claims: map[string][]Allocation{}, Units: map[string][]string{}}
			for _, d := range c.GetDevices() {
				held.Units[d.GetResourceName()] = append(held.Units[d.GetResourceName()], d.GetDeviceIds()...)
			}
			for _, r := range c.GetDynamicResources() {
				name := r.GetClaimNamespace() + "/" + r.GetClaimName()
				for _, d := range r.GetClaimResources() {
					held.Claims[name] = append(held.Claims[name], Allocation{
						Driver: d.GetDriverName(), Device: d.GetDeviceName(), Share: d.GetShareId(),
					})
				}
			}
			out[pod.GetNamespace()+"/"+pod.GetName()+"/"+c.GetName()] = held
		}
	}
	return out
}

// usingPods returns the node's pods that have not ended and are not being deleted.
func (a *Auditor) usingPods(ctx context.Context) ([]corev1.Pod, error) {
	asking, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	onNode := metav1.ListOptions{FieldSelector: "spec.nodeName=" + layout.NodeName}
	list, err := a.lab.Client.CoreV1().Pods(metav1.NamespaceAll).List(asking, onNode)
	if err != nil {
		return nil, fmt.Errorf("list the node's pods: %w", err)
	}
	return slices.DeleteFunc(list.Items, func(pod corev1.Pod) bool { return pod.DeletionTimestamp != nil || testenv.Ended(&pod) }), nil
}

// claims returns the claims that have an allocation.
func (a *Auditor) claims(ctx context.Context) ([]Claim, error) {
	asking, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	list, err := a.lab.Client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(asking, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list claims: %w", err)
	}
	out := []Claim{}
	for i := range list.Items {
		if claim := &list.Items[i]; claim.Status.Allocation != nil {
			out = append(out, claimOf(claim))
		}
	}
	return out, nil
}

func claimOf(claim *resourceapi.ResourceClaim) Claim {
	out := Claim{UID: string(claim.UID), Name: claim.Namespace + "/" + claim.Name, Users: len(claim.Status.ReservedFor)}
	for i := range claim.Status.Allocation.Devices.Results {
		r := &claim.Status.Allocation.Devices.Results[i]
		has := Allocation{Driver: r.Driver, Device: r.Device, Request: r.Request}
		if r.ShareID != nil {
			has.Share = string(*r.ShareID)
		}
		if memory, part := r.ConsumedCapacity["memory"]; part {
			has.Bytes = memory.Value()
		}
		out.Has = append(out.Has, has)
	}
	return out
}

// look returns the containers of a pod that use devices and run.
func look(pod *corev1.Pod) []User {
	claims := map[string]string{}
	for one, name := range kube.ClaimsOf(pod) {
		claims[one] = pod.Namespace + "/" + name
	}
	var users []User
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		user := User{Name: pod.Namespace + "/" + pod.Name + "/" + c.Name, ID: runningID(pod, c.Name), Asks: map[string]int64{}}
		for name, amount := range c.Resources.Limits {
			if vendor, _, found := strings.Cut(string(name), ".com/"); found && vendors[vendor].prefix != "" {
				user.Asks[string(name)] = amount.Value()
			}
		}
		for _, use := range c.Resources.Claims {
			user.Uses = append(user.Uses, Use{claims[use.Name], use.Request})
		}
		if user.ID == "" || len(user.Uses)+len(user.Asks) == 0 {
			continue
		}
		pid, err := testenv.ContainerPID(user.ID)
		if err != nil {
			continue // it ended meanwhile
		}
		if user.Sight, err = testenv.Look(pid); err != nil {
			continue // it ended meanwhile
		}
		users = append(users, user)
	}
	return users
}

// runningID is the ID of a running container, "" for others.
func runningID(pod *corev1.Pod, container string) string {
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if status.Name == container && status.State.Running != nil {
			return status.ContainerID
		}
	}
	return ""
}

// stayed returns those that run in the pods, too.
func stayed(users []User, pods []corev1.Pod) []User {
	running := map[string]bool{}
	for _, pod := range pods {
		for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			running[runningID(&pod, c.Name)] = true
		}
	}
	return slices.DeleteFunc(users, func(u User) bool { return !running[u.ID] || !alive(u.ID) })
}

// alive reports whether a container's first process runs.
func alive(id string) bool {
	pid, err := testenv.ContainerPID(id)
	if err != nil {
		return false
	}
	_, err = testenv.Look(pid)
	return err == nil
}

// readDaemon reads divvy-node's record.
func readDaemon(path string) ([]Claim, error) {
	var file struct {
		State struct {
			Claims []struct {
				Vendor, UID, Namespace, Name string
				Prepared                     bool
				Parts                        []struct {
					Request, Device, Share string
					Bytes                  int64
				}
			}
		}
	}
	if err := readFile(path, &file); err != nil {
		return nil, err
	}
	out := []Claim{}
	for _, c := range file.State.Claims {
		claim := Claim{UID: c.UID, Name: c.Namespace + "/" + c.Name, Prepared: c.Prepared}
		for _, p := range c.Parts {
			claim.Has = append(claim.Has, Allocation{c.Vendor + driverSuffix, p.Device, p.Share, p.Request, p.Bytes})
		}
		out = append(out, claim)
	}
	return out, nil
}

// readCheckpoint reads kubelet's record.
func readCheckpoint(path string) ([]Claim, error) {
	var file struct{ Data string }
	var data struct {
		ClaimInfoStateList []struct {
			ClaimUID, ClaimName, Namespace string
			PodUIDs                        map[string]any
			DriverState                    map[string]struct {
				Devices []struct {
					DeviceName string
					ShareID    *string
				}
			}
		}
	}
	if err := readFile(path, &file); err != nil || file.Data == "" {
		return []Claim{}, err
	}
	if err := json.Unmarshal([]byte(file.Data), &data); err != nil {
		return nil, fmt.Errorf("read what kubelet records of claims: %s: %w", path, err)
	}
	out := []Claim{}
	for _, c := range data.ClaimInfoStateList {
		claim := Claim{UID: c.ClaimUID, Name: c.Namespace + "/" + c.ClaimName, Users: len(c.PodUIDs)}
		for driver, state := range c.DriverState {
			for _, d := range state.Devices {
				has := Allocation{Driver: driver, Device: d.DeviceName}
				if d.ShareID != nil {
					has.Share = *d.ShareID
				}
				claim.Has = append(claim.Has, has)
			}
		}
		out = append(out, claim)
	}
	return out, nil
}

// readFile reads JSON, nothing where there is no file.
func readFile(path string, into any) error {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		return fmt.Errorf("read what is recorded of claims: %s: %w", path, err)
	}
	return nil
}

func specNames() ([]string, error) {
	files, err := filepath.Glob(claimSpecs + "*.json")
	for i := range files {
		files[i] = strings.TrimSuffix(strings.TrimPrefix(files[i], claimSpecs), ".json")
	}
	return files, err
}
