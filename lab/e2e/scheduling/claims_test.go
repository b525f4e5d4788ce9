//go:build e2e

package scheduling

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	quantity "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/sharing"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/node/alloc"
	"github.com/divvy-gpu/divvy/internal/node/dra"
	"github.com/divvy-gpu/divvy/internal/testing/charttest"
	"github.com/divvy-gpu/divvy/lab/internal/controlplane"
	"github.com/divvy-gpu/divvy/lab/internal/simnodes"
)

const gcuClass = "gcu.enflame.divvy.dev"

// reviewed starts two extenders that review claims, and makes what the chart has for it. The API
// server asks the one that does not lead.
func (w *world) reviewed() {
	w.Helper()
	ctx := w.Context()
	text, err := charttest.Render(ctx, "--set", "node.allocationPath=dra,claims.admission.enabled=true")
	if err != nil {
		w.Fatal(err)
	}
	var mutating admissionregistrationv1.MutatingWebhookConfiguration
	var validating admissionregistrationv1.ValidatingWebhookConfiguration
	for doc := range bytes.SplitSeq(text, []byte("\n---\n")) {
		var head metav1.PartialObjectMetadata
		var class resourceapi.DeviceClass
		err := yaml.Unmarshal(doc, &head)
		switch head.Kind {
		case "MutatingWebhookConfiguration":
			err = yaml.UnmarshalStrict(doc, &mutating)
		case "ValidatingWebhookConfiguration":
			err = yaml.UnmarshalStrict(doc, &validating)
		case "DeviceClass":
			if err = yaml.UnmarshalStrict(doc, &class); err == nil {
				_, err = w.client.ResourceV1().DeviceClasses().Create(ctx, &class, metav1.CreateOptions{})
			}
		}
		if err != nil {
			w.Fatal(err)
		}
	}
	if err := w.plane.Prepare(ctx); err != nil {
		w.Fatal(err)
	}
	// The API server goes to the name of such a Service as it is.
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.Namespace, Name: controlplane.Service},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "127.0.0.1"}}
	if _, err := w.client.CoreV1().Services(controlplane.Namespace).Create(ctx, service, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	var all []*controlplane.Extender
	for n := range 2 {
		name := fmt.Sprint("extender-", n)
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: controlplane.Namespace, Name: name}, Spec: corev1.PodSpec{
			SchedulerName: "none", Containers: []corev1.Container{{Name: "extender", Image: "example.com/divvy:1"}}}}
		if _, err := w.client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			w.Fatal(err)
		}
		e, err := w.plane.StartExtender(ctx, controlplane.ExtenderOptions{
			Name: name, Program: programs.Control, Resources: []string{resource},
			Args: []string{"--leader-elect", "--leader-elect-namespace=" + controlplane.Namespace,
				"--claim-units=" + resource + "=enflame:1",
				"--mutating-config=" + mutating.Name, "--validating-config=" + validating.Name},
			Env: []string{"POD_NAME=" + name, "POD_IP=127.0.0.1"},
		})
		if err != nil {
			w.Fatal(err)
		}
		w.Cleanup(func() { w.end(e.Process) })
		all = append(all, e)
	}
	var follower *controlplane.Extender
	w.eventually("one of two extenders leads", func(ctx context.Context) error {
		for n, e := range all {
			if leads, err := e.Leads(ctx); err == nil && leads {
				follower = all[1-n]
				return nil
			}
		}
		return errors.New("none does")
	})
	own, err := url.Parse(follower.Entry.URL)
	if err != nil {
		w.Fatal(err)
	}
	port, err := strconv.ParseInt(own.Port(), 10, 32)
	if err != nil {
		w.Fatal(err)
	}
	for i := range mutating.Webhooks {
		mutating.Webhooks[i].ClientConfig.Service.Port = new(int32(port))
	}
	for i := range validating.Webhooks {
		validating.Webhooks[i].ClientConfig.Service.Port = new(int32(port))
	}
	api := w.client.AdmissionregistrationV1()
	if _, err := api.MutatingWebhookConfigurations().Create(ctx, &mutating, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
	if _, err := api.ValidatingWebhookConfigurations().Create(ctx, &validating, metav1.CreateOptions{}); err != nil {
		w.Fatal(err)
	}
}

// claimOf is a claim for memory of one GCU.
func claimOf(name, memory string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
			Name: "m", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: gcuClass, Capacity: &resourceapi.CapacityRequirements{
				Requests: map[resourceapi.QualifiedName]quantity.Quantity{wire.MemoryCapacity: quantity.MustParse(memory)}}},
		}}}}}
}

// unitsOf is a pod with a container for each amount.
func unitsOf(name string, amounts ...string) *corev1.Pod {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	for i, amount := range amounts {
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{Name: fmt.Sprint("c", i), Image: "example.com/a:1",
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{resource: quantity.MustParse(amount)}}})
	}
	return pod
}

// Pods with units become pods with claims, which kube-scheduler places; claims that cannot be served
// and those beyond the quota are rejected. The reviews are those of the chart, asked of the replica
// that does not lead.
func TestClaimReviews(t *testing.T) {
	w := newWorld(t, simnodes.Group{Count: 1, Cards: 1, Units: 16})
	if err := w.nodes.Create(t.Context(), w.client); err != nil {
		t.Fatal(err)
	}
	node := w.nodes.NodeName(0)
	w.offer(node)
	w.reviewed()
	scheduler, err := w.plane.StartScheduler(t.Context(), programs.Kubernetes, controlplane.SchedulerOptions{Name: "default-scheduler",
		QPS: 5000})
	if err != nil {
		t.Fatal(err)
	}
	w.Cleanup(func() { w.end(scheduler.Process) })
	claims, pods := w.client.ResourceV1().ResourceClaims(namespace), w.client.CoreV1().Pods(namespace)
	templates := w.client.ResourceV1().ResourceClaimTemplates(namespace)
	w.eventually("claims are reviewed", func(ctx context.Context) error {
		_, err := claims.Create(ctx, claimOf("first", "0"), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil || !strings.Contains(err.Error(), "must be at least 1Mi") {
			return fmt.Errorf("a claim of no memory is answered with %w", errors.Join(err, errors.New("nothing")))
		}
		return nil
	})

	t.Run("bad claims", func(t *testing.T) {
		parameters := claimOf("c", "1Gi")
		parameters.Spec.Devices.Config = []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
			Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: "enflame.divvy.dev"}}}}
		parameters.Spec.Devices.Config[0].Opaque.Parameters.Raw = []byte(`{"kind":"Sharing"}`)
		for _, tt := range []struct {
			claim *resourceapi.ResourceClaim
			want  string
		}{
			{claimOf("c", "10G"),
				"spec.devices.requests[0].exactly.capacity.requests[memory]: Invalid value: \"10G\": must be a multiple of 1Mi"},
			{parameters, "spec.devices.config[0].opaque: Forbidden: driver enflame.divvy.dev takes no parameters"},
		} {
			if _, err := claims.Create(t.Context(), tt.claim, metav1.CreateOptions{}); err == nil || !strings.Contains(err.Error(),
				tt.want) {
				t.Errorf("%v, want %s", err, tt.want)
			}
			template := &resourceapi.ResourceClaimTemplate{ObjectMeta: tt.claim.ObjectMeta,
				Spec: resourceapi.ResourceClaimTemplateSpec{Spec: tt.claim.Spec}}
			want := strings.Replace(tt.want, "spec.devices", "spec.spec.devices", 1)
			if _, err := templates.Create(t.Context(), template, metav1.CreateOptions{}); err == nil || !strings.Contains(err.Error(),
				want) {
				t.Errorf("template: %v, want %s", err, want)
			}
		}
	})

	t.Run("classes", func(t *testing.T) { w.classes(node) })

	t.Run("a claim and units", func(t *testing.T) {
		if _, err := claims.Create(t.Context(), claimOf("there", "1Gi"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		pod := unitsOf("both", "2")
		pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "c", ResourceClaimName: new("there")}}
		pod.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "c"}}
		if _, err := pods.Create(t.Context(), pod, metav1.CreateOptions{}); err == nil ||
			!strings.Contains(err.Error(),
				"container c0 has both a claim (c, class gcu.enflame.divvy.dev) and units (enflame.com/gcu-memory)") {
			t.Errorf("a container with both: %v", err)
		}
		if err := claims.Delete(t.Context(), "there", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	})

	t.Run("units in a namespace that did not opt in", func(t *testing.T) {
		made, err := pods.Create(t.Context(), unitsOf("units", "1"), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil || made.Spec.ResourceClaims != nil {
			t.Errorf("%+v, %v", made, err)
		}
	})

	patch := []byte(`{"metadata":{"labels":{"divvy.dev/memory-units":"claims"}}}`)
	if _, err := w.client.CoreV1().Namespaces().Patch(t.Context(), namespace, "application/merge-patch+json", patch,
		metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Run("units become claims", func(t *testing.T) { w.translated(node) })

	t.Run("a burst and a quota", func(t *testing.T) {
		// 14 units are those of the pod before.
		quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "q"},
			Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"requests." + resource: quantity.MustParse("24")}}}
		if _, err := w.client.CoreV1().ResourceQuotas(namespace).Create(t.Context(), quota, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("the quota is known", func(ctx context.Context) error {
			_, err := claims.Create(ctx, claimOf("large", "11Gi"), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			want := "exceeded quota q: the claim needs 11 units of enflame.com/gcu-memory (1 GB), and of 24 units 14 are used, " +
				"14 by claims"
			if err == nil || !strings.Contains(err.Error(), want) {
				return fmt.Errorf("it is answered with %w", errors.Join(err, errors.New("not what is wanted")))
			}
			return nil
		})
		var admitted, rejected atomic.Int64
		var all sync.WaitGroup
		for i := range 40 {
			all.Go(func() {
				_, err := claims.Create(t.Context(), claimOf(fmt.Sprint("burst-", i), "1Gi"), metav1.CreateOptions{})
				switch {
				case err == nil:
					admitted.Add(1)
				case strings.Contains(err.Error(), "exceeded quota q"):
					rejected.Add(1)
				default:
					t.Error(err)
				}
			})
		}
		all.Wait()
		if admitted.Load() != 10 || rejected.Load() != 30 {
			t.Errorf("%d admitted and %d rejected of 40, want 10 and 30", admitted.Load(), rejected.Load())
		}
		list, err := claims.List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range list.Items {
			if strings.HasPrefix(one.Name, "burst-") {
				if err := claims.Delete(t.Context(), one.Name, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				break
			}
		}
		w.eventually("another claim fits", func(ctx context.Context) error {
			_, err := claims.Create(ctx, claimOf("after", "1Gi"), metav1.CreateOptions{})
			return err
		})
	})
}

// classes checks what is answered to a class whose extended resource the device plugin of a node offers.
func (w *world) classes(node string) {
	w.Helper()
	const name = "example.com/gcu"
	ctx, nodes, classes := w.Context(), w.client.CoreV1().Nodes(), w.client.ResourceV1().DeviceClasses()
	status := fmt.Appendf(nil, `{"status":{"capacity":{%q:"1"},"allocatable":{%[1]q:"1"}}}`, name)
	if _, err := nodes.Patch(ctx, node, "application/merge-patch+json", status, metav1.PatchOptions{}, "status"); err != nil {
		w.Fatal(err)
	}
	path := func(value string) {
		w.Helper()
		label := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, wire.PathLabel, value)
		if _, err := nodes.Patch(ctx, node, "application/merge-patch+json", label, metav1.PatchOptions{}); err != nil {
			w.Fatal(err)
		}
	}
	class, err := classes.Get(ctx, gcuClass, metav1.GetOptions{})
	if err != nil {
		w.Fatal(err)
	}
	class.Spec.ExtendedResourceName = new(name)
	path(`"both"`)
	_, err = classes.Update(ctx, class, metav1.UpdateOptions{})
	want := "the device plugin of node " + node + " offers it beside devices for claims of class " + gcuClass
	if err == nil || !strings.Contains(err.Error(), want) {
		w.Errorf("on a node with both: %v, want %s", err, want)
	}
	path("null")
	if _, err := classes.Update(ctx, class, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
		w.Errorf("on a node of the device plugin: %v", err)
	}
}

// translated checks what becomes of a pod whose containers request 10 and 4 units.
func (w *world) translated(node string) {
	w.Helper()
	ctx := w.Context()
	claims, pods := w.client.ResourceV1().ResourceClaims(namespace), w.client.CoreV1().Pods(namespace)
	templates := w.client.ResourceV1().ResourceClaimTemplates(namespace)
	pod := unitsOf("p", "10", "4")
	pod.Annotations = map[string]string{wire.UseModelsAnnotation: "s6*", wire.AvoidModelsAnnotation: "S61"}
	var tried *corev1.Pod
	w.eventually("the namespace's label is known", func(ctx context.Context) (err error) {
		if tried, err = pods.Create(ctx, pod,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err == nil && tried.Spec.ResourceClaims == nil {
			err = errors.New("a pod has units")
		}
		return err
	})
	made, err := pods.Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		w.Fatal(err)
	}
	for i, c := range made.Spec.Containers {
		want := corev1.ResourceClaim{Name: "divvy-enflame-gcu-memory", Request: fmt.Sprint("memory-", i)}
		if len(c.Resources.Limits)+len(c.Resources.Requests) > 0 || !slices.Equal(c.Resources.Claims, []corev1.ResourceClaim{want}) {
			w.Errorf("container %s has %+v", c.Name, c.Resources)
		}
	}
	name := *made.Spec.ResourceClaims[0].ResourceClaimTemplateName
	if again := *tried.Spec.ResourceClaims[0].ResourceClaimTemplateName; again != name {
		w.Errorf("a dry run names template %s, and the pod %s", again, name)
	}
	var template *resourceapi.ResourceClaimTemplate
	w.eventually("the template exists", func(ctx context.Context) (err error) {
		template, err = templates.Get(ctx, name, metav1.GetOptions{})
		return err
	})
	// Another pod of a Deployment would get the same template.
	same, err := pods.Create(ctx, func() *corev1.Pod { p := pod.DeepCopy(); p.Name = "q"; return p }(), metav1.CreateOptions{})
	if err != nil || *same.Spec.ResourceClaims[0].ResourceClaimTemplateName != name {
		w.Errorf("another pod: %+v, %v", same, err)
	}
	list, err := templates.List(ctx, metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 {
		w.Errorf("%d templates, %v", len(list.Items), err)
	}
	// What kube-controller-manager does.
	claim := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "p-claim",
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: made.Name, UID: made.UID, Controller: new(true)}}},
		Spec: template.Spec.Spec}
	if _, err := claims.Create(ctx, claim, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		w.Fatal(err)
	}
	made.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: made.Spec.ResourceClaims[0].Name,
		ResourceClaimName: new("p-claim")}}
	if _, err := pods.UpdateStatus(ctx, made, metav1.UpdateOptions{}); err != nil {
		w.Fatal(err)
	}
	w.eventually("the pod is bound", func(ctx context.Context) error {
		now, err := pods.Get(ctx, made.Name, metav1.GetOptions{})
		if err == nil && now.Spec.NodeName != node {
			err = fmt.Errorf("its conditions are %+v", now.Status.Conditions)
		}
		return err
	})
	allocated, err := claims.Get(ctx, "p-claim", metav1.GetOptions{})
	if err != nil || allocated.Status.Allocation == nil {
		w.Fatal(allocated, err)
	}
	var parts []string
	for _, r := range allocated.Status.Allocation.Devices.Results {
		memory := r.ConsumedCapacity[wire.MemoryCapacity]
		parts = append(parts, fmt.Sprintf("%s %s %s", r.Request, r.Device, memory.String()))
	}
	if want := []string{"memory-0 gcu-b 10Gi", "memory-1 gcu-b 4Gi"}; !slices.Equal(parts, want) {
		w.Errorf("the claim has %q, want %q", parts, want)
	}
}

// offer publishes three GCUs of a node for claims, of which one has the model S60.
func (w *world) offer(node string) {
	w.Helper()
	var devices []alloc.ClaimDevice
	for name, model := range map[string]string{"a": "S61", "b": "S60", "c": "T20"} {
		id := accel.DeviceID(name)
		devices = append(devices, alloc.ClaimDevice{Name: "gcu-" + name, Type: "gcu", Shared: true,
			Card: sharing.Card{Device: accel.Device{ID: id, Model: model, MemoryBytes: 16 << 30, NUMANode: accel.NoNUMA},
				Chips: []accel.DeviceID{id}}})
	}
	pool := dra.Pool("enflame", devices, dra.Facts{}, dra.Stored{Counters: true, Taints: true, Shares: true})
	for i, s := range pool.Slices {
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(i, "-", node)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: wire.Driver("enflame"), NodeName: &node, Devices: s.Devices, SharedCounters: s.SharedCounters,
				Pool: resourceapi.ResourcePool{Name: dra.PoolName(node, "enflame"), Generation: 1,
					ResourceSliceCount: int64(len(pool.Slices))}}}
		if _, err := w.client.ResourceV1().ResourceSlices().Create(w.Context(), slice, metav1.CreateOptions{}); err != nil {
			w.Fatal(err)
		}
	}
}
