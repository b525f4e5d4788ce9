package demos

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/cluster"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// The daemon's folders on the node.
const (
	stateFolder = "/var/lib/divvy"
	cdiFolder   = "/var/run/cdi"
)

// folderFault is something that happens to a folder of the daemon.
type folderFault struct {
	title, text string
	// mounted is true for a fault of the small file systems that are mounted over
	// both folders.
	mounted bool
	// inflict and end change the folder; end may be nil where the daemon gets over
	// it by itself.
	inflict, end func(*faults, context.Context) error
	// withheld is in the reason why a card that is new takes no pods meanwhile, ""
	// where it does.
	withheld string
}

var folderFaults = []folderFault{
	{
		title:   "The state folder is full",
		text:    `A file system of 256 kB holds it, and a file fills it to the last byte.`,
		mounted: true, withheld: "no space left on device",
		inflict: func(*faults, context.Context) error { return fill(filepath.Join(stateFolder, "filling")) },
		end:     func(*faults, context.Context) error { return os.Remove(filepath.Join(stateFolder, "filling")) },
	},
	{
		title:   "The CDI folder is read-only",
		text:    `Containers get their cards by CDI names, and no specification can be written.`,
		mounted: true, withheld: "write the CDI specification",
		inflict: func(*faults, context.Context) error {
			return unix.Mount("", cdiFolder, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")
		},
		end: func(*faults, context.Context) error { return unix.Mount("", cdiFolder, "", unix.MS_REMOUNT, "") },
	},
	{
		title: "State files of zero bytes",
		text: `As a power failure leaves them on some file systems: the daemon is stopped, its files
are emptied, it is killed, and kubelet starts it again.`,
		mounted: true,
		inflict: (*faults).emptyState,
	},
	{
		title: "The state folder is removed under the running daemon",
		text: `The daemon's mount of it leads nowhere. It asks to be restarted, and the container
runtime makes the folder again.`,
		inflict: func(*faults, context.Context) error { return os.RemoveAll(stateFolder) },
	},
}

// folders plays the faults of the daemon's folders.
func (f *faults) folders(ctx context.Context) (err error) {
	f.times = nil
	f.Title("Faults of the daemon's folders")
	f.Say(`Small file systems are mounted over the state folder and the CDI folder of the node, and
containers get their cards by CDI names.`)
	mounted := []string{}
	unmount := func() error {
		var errs []error
		for _, folder := range mounted {
			errs = append(errs, unix.Unmount(folder, unix.MNT_DETACH))
		}
		mounted = nil
		return errors.Join(errs...)
	}
	defer func() {
		ctx := context.WithoutCancel(ctx)
		err = errors.Join(err, unmount(), f.SetHardware(ctx, f.hardware), f.Pods.DeleteAll(ctx), f.remount(ctx, "deviceNodes"))
	}()
	for folder, options := range map[string]string{stateFolder: "size=256k,mode=0755", cdiFolder: "size=1m,mode=0755"} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			return err
		}
		if err := unix.Mount("tmpfs", folder, "tmpfs", 0, options); err != nil {
			return fmt.Errorf("mount a small file system over %s: %w", folder, err)
		}
		mounted = append(mounted, folder)
	}
	if err := f.remount(ctx, "cdi"); err != nil {
		return err
	}
	for i, one := range folderFaults {
		if !one.mounted && mounted != nil {
			if err := errors.Join(unmount(), f.remount(ctx, "cdi")); err != nil {
				return err
			}
		}
		if err := f.folder(ctx, fmt.Sprintf("folder%d", i+1), one); err != nil {
			return err
		}
	}
	f.Title("Faults of folders: what kubelet was told")
	for _, line := range f.times {
		f.Tell("%s", line)
	}
	return nil
}

// remount has containerd and a new pod of the daemon, which injects in a way, see the
// folders as they are mounted now: containerd watches those that were there when it
// started. NVIDIA's GPUs get no CDI names: the node has none of the driver's libraries that
// their specification needs.
func (f *faults) remount(ctx context.Context, injection string) error {
	return errors.Join(f.Cluster.Restart(ctx, cluster.Containerd),
		f.Divvy.Upgrade(ctx, "node.injection="+injection, "node.vendors.nvidia.injection[0]=deviceNodes"),
		f.Divvy.DeletePods(ctx, testenv.NodeDaemon), f.Divvy.Wait(ctx, configTimeout))
}

// What each fault of a folder is shown with: a chip that fails under a pod, a GCU
// that is replaced by a new one, and pods on the other cards.
const (
	sickCards = IXMemory
	newCards  = GCUMemory
	newCard   = 7 // its place in the topology
	newUUID   = "U53000090199"
)

// folder inflicts a fault, has a card fail and pods start meanwhile, and ends it.
func (f *faults) folder(ctx context.Context, name string, one folderFault) error {
	f.Title(one.title)
	f.Say(one.text)
	if _, err := f.Offer(ctx, sickCards, 128); err != nil {
		return err
	}
	if _, err := f.Offer(ctx, newCards, 32); err != nil {
		return err
	}
	if err := f.forgotten(ctx); err != nil {
		return err
	}
	before := name + "-before"
	vendor := fault{vendor: vendorsim.Iluvatar, what: sickCards, variable: "IX_VISIBLE_DEVICES"}
	number, alive, err := f.hold(ctx, before, vendor)
	if err != nil {
		return err
	}
	if err := one.inflict(f, ctx); err != nil {
		return fmt.Errorf("%s: %w", one.title, err)
	}
	inflicted := time.Now()

	// A whole card that is given out changes the state.
	during := name + "-during"
	if one.end != nil {
		if err := f.Start(ctx, f.One(during, GPU, 1)); err != nil {
			return err
		}
	}
	hardware := f.hardware.Clone()
	hardware.Cards[number].HealthBits = 1 << 2
	if one.withheld != "" {
		hardware.Cards[newCard].UUID = newUUID
	}
	broken := time.Now()
	if err := f.SetHardware(ctx, hardware); err != nil {
		return err
	}
	if _, err := f.Offer(ctx, sickCards, 128-32+held); err != nil {
		return err
	}
	told := time.Since(broken)
	others := []*corev1.Pod{f.One(name+"-chip", sickCards, held), f.One(name+"-gpu", GPUMemory, held), f.One(name+"-gcu", newCards, held)}
	if err := f.Start(ctx, others...); err != nil {
		return err
	}
	running := 0
	for _, pod := range others {
		if now, err := f.Pods.API.Get(ctx, pod.Name, metav1.GetOptions{}); err == nil && now.Status.Phase == corev1.PodRunning {
			running++
		}
	}
	f.Checks.Equal("pods on other cards that run", running, len(others))
	other, err := f.cardOf(ctx, others[0].Name, vendor)
	if err != nil {
		return err
	}
	f.Checks.True("a new pod is on another chip", other != number, fmt.Sprintf("chip %d, not %d", f.index(other), f.index(number)))
	reason, err := f.waitReason(ctx, sickCards, hardware.Cards[number], true, "temperature")
	if err != nil {
		return err
	}
	f.Checks.True("what the node says of the chip", strings.Contains(reason, "temperature"), reason)
	if one.withheld != "" {
		if err := f.withheld(ctx, one); err != nil {
			return err
		}
	}
	if one.end != nil {
		if err := one.end(f, ctx); err != nil {
			return err
		}
	}
	hardware.Cards[number].HealthBits = 0
	if err := f.SetHardware(ctx, hardware); err != nil {
		return err
	}
	if _, err := f.Offer(ctx, sickCards, 128); err != nil {
		return err
	}
	if _, err := f.Offer(ctx, newCards, 32); err != nil {
		return err
	}
	if err := f.restored(ctx); err != nil {
		return err
	}
	line := fmt.Sprintf("%s: kubelet shows the chip's free memory as gone after %.1f s; ", one.title, told.Seconds())
	if one.end == nil {
		line += fmt.Sprintf("the files were back after %.1f s at most; ", time.Since(inflicted).Seconds())
	}
	line += fmt.Sprintf("pods on other cards: %d of %d ran", running, len(others))
	f.times = append(f.times, line)
	now, err := f.lives(ctx, before)
	if err != nil {
		return err
	}
	f.Checks.Equal("the pod that was there", now, alive)
	if err := errors.Join(f.Pods.DeleteAll(ctx), f.SetHardware(ctx, f.hardware)); err != nil {
		return err
	}
	_, err = f.Offer(ctx, newCards, 32)
	return err
}

// forgotten waits until no specification describes the new card of the fault before: one
// that does needs no writing, so the card would not be withheld.
func (f *faults) forgotten(ctx context.Context) error {
	return poll.Until(ctx, offerTimeout, "specifications without "+newUUID, func(context.Context) error {
		files, err := filepath.Glob(cdiFolder + "/divvy-*.yaml")
		if err != nil {
			return err
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			if strings.Contains(string(text), newUUID) {
				return fmt.Errorf("%s describes it", file)
			}
		}
		return nil
	})
}

// withheld checks that the new card takes no pods, and that the reason is where
// an administrator looks.
func (f *faults) withheld(ctx context.Context, one folderFault) error {
	hardware := f.hardware.Clone()
	card := hardware.Cards[newCard]
	card.UUID = newUUID
	reason, err := f.waitReason(ctx, newCards, card, true, one.withheld)
	if err != nil {
		return err
	}
	f.Checks.Contains("the reason of the new GCU", reason, one.withheld)
	if _, err := f.Offer(ctx, newCards, 16); err != nil {
		return err
	}
	f.Checks.Contains("readiness", fmt.Sprint(f.Divvy.Ready(ctx)), one.withheld)
	var messages []string
	err = poll.Until(ctx, offerTimeout, "an event of the node", func(ctx context.Context) error {
		events, err := f.Client.CoreV1().Events("").List(ctx, metav1.ListOptions{FieldSelector: "reason=ResourceNotOffered"})
		if err != nil {
			return err
		}
		messages = nil
		for _, e := range events.Items {
			messages = append(messages, e.Message)
		}
		if !strings.Contains(strings.Join(messages, "\n"), one.withheld) {
			return fmt.Errorf("events say %q", messages)
		}
		return nil
	})
	f.Checks.NoError("an event of the node says so", err)
	text, err := f.CLI.Kubectl(ctx, "divvy", "doctor")
	if err == nil {
		text = "doctor finds nothing: " + text
	} else {
		text += err.Error()
	}
	f.Checks.Contains("kubectl divvy doctor", text, one.withheld)
	return ctx.Err()
}

// restored waits until the daemon is ready and both its folders have its files.
func (f *faults) restored(ctx context.Context) error {
	if err := f.Divvy.Wait(ctx, configTimeout); err != nil {
		return err
	}
	err := poll.Until(ctx, offerTimeout, "the files of the daemon", func(context.Context) error {
		for pattern, want := range map[string]int{ // a file of each vendor; NVIDIA's GPUs get no CDI names
			stateFolder + "/units-*.json": 3, stateFolder + "/slots-*.json": 3, cdiFolder + "/divvy-*.yaml": 2,
		} {
			files, err := filepath.Glob(pattern)
			if err != nil {
				return err
			}
			if len(files) != want {
				return fmt.Errorf("%s: %q", pattern, files)
			}
			for _, file := range files {
				if info, err := os.Stat(file); err != nil || info.Size() == 0 {
					return fmt.Errorf("%s is empty: %w", file, err)
				}
			}
		}
		return nil
	})
	f.Checks.NoError("the daemon is ready, and its folders have its files", err)
	return ctx.Err()
}

// emptyState empties the state files and kills the daemon before it notices.
func (f *faults) emptyState(ctx context.Context) error {
	pod, err := f.Divvy.Pod(ctx, testenv.NodeDaemon)
	if err != nil {
		return err
	}
	pid, err := testenv.ContainerPID(pod.Status.ContainerStatuses[0].ContainerID)
	if err != nil {
		return err
	}
	files, err := filepath.Glob(stateFolder + "/*.json")
	if err != nil {
		return err
	}
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return fmt.Errorf("stop the daemon: %w", err)
	}
	errs := []error{}
	for _, file := range files {
		errs = append(errs, os.Truncate(file, 0))
	}
	f.Checks.Equal("state files that were emptied", len(files), 7)
	return errors.Join(append(errs, syscall.Kill(pid, syscall.SIGKILL))...)
}

// fill writes a file until the file system is full.
func fill(path string) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	for err == nil {
		_, err = file.Write(make([]byte, 4096))
	}
	if errors.Is(err, unix.ENOSPC) {
		err = nil
	}
	return errors.Join(err, file.Close())
}
