package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/backend"
	"github.com/divvy-gpu/divvy/internal/testing/vendorsim"
	"github.com/divvy-gpu/divvy/lab/internal/demos"
	"github.com/divvy-gpu/divvy/lab/internal/limitshost"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// limitsEnvironment has two GPUs of 40 GB beside cards of other vendors.
var limitsEnvironment = testenv.Options{
	Topology: demos.Mixed, MemoryUnit: "1", Values: []string{demos.MixedValues}, Label: demos.Present,
}

const (
	// limitValues are for the node that limitshost makes: limits, and use is measured.
	limitValues = demos.LimitValues + ",node.usage.enabled=true,node.usage.interval=5s"
	unitMiB     = 1 << 10
	// limitSampleInterval is the pause between two looks at all containers.
	limitSampleInterval = time.Second
	// attestedWithin is how old an attestation may be that counts, as for the extender.
	attestedWithin = time.Minute
)

// playLimits lets pods come and go of which each tries for more memory than its allocation,
// restarts parts of the cluster meanwhile, and compares what the driver says of each
// container with its allocation, and what the node states with its configuration.
func playLimits(ctx context.Context, s *testenv.Env, o options, out io.Writer) (err error) {
	plain, err := s.Cards(demos.Mixed)
	if err != nil {
		return err
	}
	hardware, err := limitshost.SetUp(ctx, plain)
	defer func() {
		if !o.keep {
			ctx := context.WithoutCancel(ctx)
			err = errors.Join(err, s.Pods.DeleteAll(ctx), s.SetHardware(ctx, plain), limitshost.TearDown(ctx))
		}
	}()
	if err := errors.Join(err, s.SetHardware(ctx, hardware)); err != nil {
		return err
	}
	if err := s.Divvy.Reconfigure(ctx, nil, "--set", limitValues); err != nil {
		return err
	}
	if err := s.Divvy.AddArgument(ctx, limitshost.Argument); err != nil {
		return err
	}
	var gpus []accel.DeviceID
	var capacity int64
	var tiers []accel.Tier
	for _, card := range hardware.Cards {
		if card.Vendor == vendorsim.NVIDIA {
			gpus, tiers = append(gpus, accel.DeviceID(card.UUID)), append(tiers, accel.TierDriver)
			capacity += card.MemoryMiB / unitMiB
		}
	}
	if err := s.Node.WaitTiers(ctx, 2*time.Minute, demos.GPUMemory, tiers...); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nFor %s pods come and go on %d GPUs whose driver limits them, and parts of the cluster are restarted. Seed %d.\n",
		o.duration, len(gpus), o.seed)

	watch := &limitWatch{lab: s, gpus: gpus, broken: map[string]int{}}
	churn := newChurn(s, rand.New(rand.NewPCG(o.seed, 1)), capacity, kind{make: newGreedyPod, units: greedyUnits}) //nolint:gosec // chance
	var work sync.WaitGroup
	running, stop := context.WithTimeout(ctx, o.duration)
	defer stop()
	var restarts map[string]int
	var disturbed error
	work.Go(func() { churn.run(running) })
	work.Go(func() { watch.run(running) })
	work.Go(func() {
		defer stop()
		rng := rand.New(rand.NewPCG(o.seed, 2)) //nolint:gosec // chance, not secrecy
		restarts, disturbed = disturb(running, s.Restarts, rng, out)
	})
	work.Wait()
	if err := errors.Join(ctx.Err(), disturbed, churn.settle(ctx), watch.look(ctx)); err != nil {
		return errors.Join(err, watch.faults())
	}
	if usage, err := s.CLI.Kubectl(ctx, "divvy", "inspect", "--usage"); err == nil {
		fmt.Fprintf(out, "\n%s\n", usage)
	}
	times := 0
	for _, name := range slices.Sorted(maps.Keys(restarts)) {
		fmt.Fprintf(out, "  %-24s %d times\n", name, restarts[name])
		times += restarts[name]
	}
	fmt.Fprintf(out, "soak: %d pods run, %d restarts done, %s\n", len(churn.ran), times, watch)
	if times < minRestarts || watch.full == 0 || watch.statements == 0 {
		err = fmt.Errorf("this shows nothing: %d restarts, %d readings of a container at its limit, %d of what the node states",
			times, watch.full, watch.statements)
	}
	return errors.Join(err, watch.faults())
}

// newGreedyPod returns a pod that allocates some or all of its memory, and then maybe more.
func newGreedyPod(s *testenv.Env, rng *rand.Rand, name string) *corev1.Pod {
	units := 1 + rng.Int64N(8)
	args := []string{"--mib", fmt.Sprint(units * unitMiB), "--mib", "1", "--hold"}
	if rng.IntN(3) == 0 {
		args = []string{"--mib", fmt.Sprint(1 + rng.Int64N(units*unitMiB)), "--hold"}
	}
	pod := limitshost.Allocate(s.Pods.New(name, testenv.Asking("app", demos.GPUMemory, units)), args...)
	app := &pod.Spec.Containers[0]
	app.Command = append([]string{"sh", "-c", onItsGPU}, app.Command...)
	if rng.IntN(2) == 0 {
		pod.Annotations = map[string]string{wire.IsolationAnnotation: string(accel.TierDriver)}
	}
	return pod
}

// onItsGPU runs its arguments with the number of the one GPU that the container has.
const onItsGPU = `exec "$0" "$@" --device "$(ls /dev | sed -n 's/^nvidia\([0-9]*\)$/\1/p')"`

func greedyUnits(pod *corev1.Pod) int64 {
	limit := pod.Spec.Containers[0].Resources.Limits[demos.GPUMemory]
	return limit.Value()
}

// limitWatch compares limits and allocations, again and again.
type limitWatch struct {
	lab  *testenv.Env
	gpus []accel.DeviceID

	// samples are the looks that got all answers. readings are those of one container each,
	// and full those of a container that used all that its limit allows. statements are those
	// of a device as the node publishes it.
	samples, readings, full, statements int
	broken                              map[string]int // what was wrong, and how often it was seen
}

// String is the summary.
func (w *limitWatch) String() string {
	return fmt.Sprintf("%d samples, %d containers read, %d of them at their limit, %d tiers read, %d mismatches",
		w.samples, w.readings, w.full, w.statements, len(w.broken))
}

// faults returns everything that must not be, or nil.
func (w *limitWatch) faults() error {
	var errs []error
	for _, text := range slices.Sorted(maps.Keys(w.broken)) {
		errs = append(errs, fmt.Errorf("mismatch: %s (seen %d times)", text, w.broken[text]))
	}
	return errors.Join(errs...)
}

// run looks until ctx ends. Answers that do not come, because a part is being restarted, are
// no mismatch.
func (w *limitWatch) run(ctx context.Context) {
	wait.NonSlidingUntilWithContext(ctx, func(ctx context.Context) { _ = w.look(ctx) }, limitSampleInterval)
}

// look takes a sample. Its error says that there was no answer.
func (w *limitWatch) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	pods, err := w.lab.Pods.API.List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	stated, err := w.lab.Node.Isolations(ctx, demos.GPUMemory)
	if err != nil {
		return err
	}
	for i := range pods.Items {
		if err := w.read(ctx, &pods.Items[i]); err != nil {
			return err
		}
	}
	for i, one := range stated {
		w.statements++
		if one.Memory != accel.TierDriver {
			w.broken[fmt.Sprintf("GPU %d: the node states tier %q, configured is %q", i, one.Memory, accel.TierDriver)]++
		}
		if age := time.Since(one.Attested); age > attestedWithin {
			w.broken[fmt.Sprintf("GPU %d: the attestation is older than %v", i, attestedWithin)]++
		}
	}
	w.samples++
	return nil
}

// read compares the limits of a container that runs.
func (w *limitWatch) read(ctx context.Context, pod *corev1.Pod) error {
	statuses := pod.Status.ContainerStatuses
	group, err := limitshost.Group(pod)
	if err != nil || statuses[0].State.Running == nil {
		return nil //nolint:nilerr // it does not run: its group may be there before its limit and after its end
	}
	limits, err := limitshost.Limits(ctx, w.gpus, group)
	if _, gone := os.Stat(group); errors.Is(gone, fs.ErrNotExist) {
		return nil // it ended meanwhile
	}
	w.readings++
	if err != nil {
		w.broken[err.Error()]++
		return nil //nolint:nilerr // an answer, and a wrong one
	}
	verdict, full := judge(limits, uint64(greedyUnits(pod))*unitMiB<<20) //nolint:gosec // positive
	if verdict != "" {
		w.broken[fmt.Sprintf("pod %s, container %s since %s: %s", pod.Name, statuses[0].ContainerID,
			statuses[0].State.Running.StartedAt.Format(time.TimeOnly), verdict)]++
	}
	if full {
		w.full++
	}
	return nil
}

// judge says what is wrong with the limits of a container that may use so many bytes of one
// GPU, "" for nothing, and whether it uses them all.
func judge(limits map[accel.DeviceID]backend.MemoryLimit, bytes uint64) (wrong string, full bool) {
	var texts []string
	if len(limits) != 1 {
		texts = append(texts, fmt.Sprintf("limits on %d GPUs, want one", len(limits)))
	}
	for gpu, limit := range limits {
		if limit.Bytes != bytes {
			texts = append(texts, fmt.Sprintf("the limit on %s is %d bytes, allocated are %d", gpu, limit.Bytes, bytes))
		}
		if limit.UsedBytes > limit.Bytes || limit.UsedBytes > bytes {
			texts = append(texts, fmt.Sprintf("%d bytes of %s are in use, allocated are %d", limit.UsedBytes, gpu, bytes))
		}
		full = limit.UsedBytes == bytes
	}
	return strings.Join(texts, "; "), full
}
