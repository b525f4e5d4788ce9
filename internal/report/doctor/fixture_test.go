package doctor

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/pool"
)

const (
	claimDriver = "enflame.divvy.dev"

	system  = "divvy-system"
	bwki    = "bwki"
	memory  = "enflame.com/gcu-memory"
	theNode = "node-a"
)

// now is when all snapshots of the tests were taken.
var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// pair is a certificate with its key.
type pair struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func (p pair) crt() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: p.cert.Raw})
}

func (p pair) pem(t testing.TB) []byte {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(p.key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// issue makes a certificate, of a CA when by is nil.
func issue(t testing.TB, by *pair, from, to time.Time, names ...string) pair {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(from.UnixNano()), Subject: pkix.Name{CommonName: "test"},
		NotBefore: from, NotAfter: to, DNSNames: names, BasicConstraintsValid: true, IsCA: by == nil,
	}
	parent, signer := template, key
	if by != nil {
		parent, signer = by.cert, by.key
	} else {
		template.KeyUsage = x509.KeyUsageCertSign
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return pair{cert, key}
}

const (
	day  = 24 * time.Hour
	year = 365 * day
)

// world is a healthy installation on one node, with everything that Divvy has.
type world struct {
	*Snapshot
	t testing.TB
	// ca signs served, which is for both services.
	ca, served, client pair
}

func ofDivvy(namespace, name, program string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: namespace, Name: name, Generation: 1,
		Labels: map[string]string{labelName: program, labelInstance: "divvy", labelPartOf: partOf, labelVersion: "0.1.0"},
		Annotations: map[string]string{
			annotationRelease: "divvy", annotationNamespace: system,
		},
	}
}

func template(program, image string, args ...string) corev1.PodTemplateSpec {
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{labelName: program, labelInstance: "divvy", labelPartOf: partOf}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "ghcr.io/divvy-gpu/" + image, Args: args}}},
	}
}

func selector(program string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{labelName: program, labelInstance: "divvy"}}
}

// running makes a pod of a template that is ready.
func running(namespace, name string, from corev1.PodTemplateSpec) corev1.Pod {
	p := corev1.Pod{ObjectMeta: *from.ObjectMeta.DeepCopy(), Spec: *from.Spec.DeepCopy()}
	p.Namespace, p.Name, p.UID = namespace, name, types.UID("uid-of-"+name)
	p.CreationTimestamp = metav1.NewTime(now.Add(-time.Hour))
	p.Spec.NodeName = theNode
	p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.9", Conditions: []corev1.PodCondition{
		{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, {Type: corev1.PodReady, Status: corev1.ConditionTrue},
	}}
	return p
}

func (w *world) daemons(namespace, name, program, image string, edit func(*appsv1.DaemonSet), args ...string) {
	d := appsv1.DaemonSet{ObjectMeta: ofDivvy(namespace, name, program)}
	d.Spec.Selector, d.Spec.Template = selector(program), template(program, image, args...)
	d.Status = appsv1.DaemonSetStatus{ObservedGeneration: 1, DesiredNumberScheduled: 1, NumberReady: 1, UpdatedNumberScheduled: 1}
	if edit != nil {
		edit(&d)
	}
	w.DaemonSets = append(w.DaemonSets, d)
	w.Pods = append(w.Pods, running(namespace, name+"-x", d.Spec.Template))
}

func (w *world) replicas(namespace, name, program, image string, edit func(*appsv1.Deployment), args ...string) {
	d := appsv1.Deployment{ObjectMeta: ofDivvy(namespace, name, program)}
	d.Spec.Replicas = ptr.To[int32](1)
	d.Spec.Selector, d.Spec.Template = selector(program), template(program, image, args...)
	d.Status = appsv1.DeploymentStatus{ObservedGeneration: 1, Replicas: 1, ReadyReplicas: 1, UpdatedReplicas: 1}
	if edit != nil {
		edit(&d)
	}
	w.Deployments = append(w.Deployments, d)
	w.Pods = append(w.Pods, running(namespace, name+"-x", d.Spec.Template))
}

func (w *world) serve(namespace, name, program string) {
	w.Objects.Services = append(w.Objects.Services, corev1.Service{ObjectMeta: ofDivvy(namespace, name, program),
		Spec: corev1.ServiceSpec{Selector: selector(program).MatchLabels}})
	w.Objects.Endpoints = append(w.Objects.Endpoints, discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace,
			Name: name + "-1", Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.9"}}},
	})
}

// shares are two cards of 16 GB.
func shares() []accel.Share {
	var out []accel.Share
	for i, id := range []accel.DeviceID{"card-0", "card-1"} {
		out = append(out, accel.Share{Device: accel.Device{Index: i, ID: id, MemoryBytes: 16 << 30, NUMANode: accel.NoNUMA}, Units: 16})
	}
	return out
}

// quarantine makes the first node show a device in quarantine.
func (w *world) quarantine(q accel.Quarantine) {
	text, err := wire.EncodeQuarantine(wire.QuarantineStatus{Devices: []accel.Quarantine{q}})
	if err != nil {
		w.t.Fatal(err)
	}
	w.Nodes[0].Annotations[wire.QuarantineAnnotation] = text
}

func (w *world) publish(inventories ...accel.Inventory) {
	w.t.Helper()
	text, err := wire.EncodeInventory(inventories)
	if err != nil {
		w.t.Fatal(err)
	}
	w.Nodes[0].Annotations[wire.InventoryAnnotation] = text
}

// object makes an entry of the release's manifest of a typed object.
func (w *world) object(apiVersion, kind string, typed any) Object {
	w.t.Helper()
	data, err := json.Marshal(typed)
	if err != nil {
		w.t.Fatal(err)
	}
	o := Object{APIVersion: apiVersion, Kind: kind}
	if err := json.Unmarshal(data, &o.Content); err != nil {
		w.t.Fatal(err)
	}
	m, _ := o.Content["metadata"].(map[string]any)
	o.Name, _ = m["name"].(string)
	o.Namespace, _ = m["namespace"].(string)
	return o
}

func healthy(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, Snapshot: &Snapshot{
		Taken: now, Tool: "v0.1.0", Kubernetes: "v1.37.0",
		Failed: map[Source]string{},
		Copies: map[string][]string{"team": {pool.CASecret, pool.ClientSecret, pool.ServersSecret, pool.SingleSecret}},
		Objects: Objects{Readiness: map[string]Answer{}, Extender: map[string]Answer{
			"healthz": {OK: true, Text: "ok"}, "readyz": {OK: true, Text: "ok"}, "version": {OK: true, Text: "v0.1.0"},
		}},
		Releases: []Release{{Name: "divvy", Namespace: system, Helm: true, Status: "deployed", Revision: 3}},
	}}
	w.ca = issue(t, nil, now.Add(-year), now.Add(9*year))
	w.served = issue(t, &w.ca, now.Add(-day), now.Add(89*day), "divvy-extender.divvy-system.svc", "bwki-webhook-svc.bwki.svc")
	w.client = issue(t, &w.ca, now.Add(-year), now.Add(9*year))

	w.Nodes = []corev1.Node{{
		ObjectMeta: metav1.ObjectMeta{
			Name: theNode, Annotations: map[string]string{},
			Labels: map[string]string{"enflame.com/gcushare": "true", "divvy.dev/enflame.present": "true",
				wire.PathLabel: "both", "node-role.kubernetes.io/control-plane": ""},
		},
		Status: corev1.NodeStatus{
			NodeInfo:    corev1.NodeSystemInfo{KubeletVersion: "v1.36.2"},
			Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
			Allocatable: corev1.ResourceList{memory: resource.MustParse("32"), pool.Resource: resource.MustParse("1000")},
		},
	}}
	w.publish(accel.Inventory{Resource: memory, Unit: "1", Shares: shares()})
	w.drivers(wire.ClaimDriver{Driver: claimDriver})
	w.Claims = Claims{Served: true,
		Slices: []resourceapi.ResourceSlice{{ObjectMeta: metav1.ObjectMeta{Name: "node-a-1"}, Spec: resourceapi.ResourceSliceSpec{
			Driver: claimDriver, NodeName: ptr.To(theNode), Devices: []resourceapi.Device{{Name: "gcu-0"}}}}},
		Classes: []resourceapi.DeviceClass{{ObjectMeta: metav1.ObjectMeta{Name: "gcu." + claimDriver}}},
	}
	w.Namespaces = []corev1.Namespace{
		{ObjectMeta: metav1.ObjectMeta{Name: "team", Labels: map[string]string{poolLabel: "allowed"}}},
		{ObjectMeta: metav1.ObjectMeta{Name: kubeSystem}}, {ObjectMeta: metav1.ObjectMeta{Name: system}},
	}

	w.daemons(system, nameNode, nameNode, "divvy-node:1", func(d *appsv1.DaemonSet) {
		configMap := func(name string) corev1.VolumeSource {
			return corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
				LocalObjectReference: corev1.LocalObjectReference{Name: name},
			}}
		}
		d.Spec.Template.Spec.Volumes = []corev1.Volume{
			{Name: "config", VolumeSource: configMap("divvy-node")},
			{Name: "configs", VolumeSource: configMap("divvy-node-configs")},
			{Name: "grant-key", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "divvy-grant-key"}}},
			{Name: "device-plugins", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: pluginDir}}},
		}
		in := func(key, value string) corev1.NodeSelectorTerm {
			return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
				{Key: key, Operator: corev1.NodeSelectorOpIn, Values: []string{value}},
				{Key: enabledLabel, Operator: corev1.NodeSelectorOpNotIn, Values: []string{"false"}},
			}}
		}
		d.Spec.Template.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
				in("enflame.com/gcushare", "true"), in(enabledLabel, "true"),
			}},
		}}
	})
	w.daemons(system, nameSchedconf, nameSchedconf, "divvy-control:1", nil)
	w.daemons(bwki, namePoolNode, namePoolNode, "divvy-node:1", nil)
	w.replicas(system, nameExtender, nameExtender, "divvy-control:1", nil, "extender", "--resources="+memory)
	w.replicas(bwki, "bitfusion-webhook-deployment", namePoolHook, "divvy-control:1", func(d *appsv1.Deployment) {
		d.Spec.Template.Spec.Volumes = []corev1.Volume{{Name: "catalog", VolumeSource: corev1.VolumeSource{
			ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "catalog"}},
		}}}
	}, "webhook", "--source-namespace=kube-system", `--namespace-selector={"matchLabels":{"divvy.dev/pool":"allowed"}}`,
		"--ignored-namespaces=kube-system,bwki")
	w.serve(system, nameExtender, nameExtender)
	w.serve(bwki, "bwki-webhook-svc", namePoolHook)

	scheduler := running(kubeSystem, "kube-scheduler-"+theNode, corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"component": "kube-scheduler"},
			Annotations: map[string]string{annotationWired: "abc"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "kube-scheduler", Command: []string{"kube-scheduler",
			"--config=/etc/kubernetes/x.yaml"}}}},
	})
	w.Pods = append(w.Pods, scheduler)

	config := `apiVersion: config.divvy.dev/v1alpha1
kind: NodeConfig
resources:
- {name: enflame.com/gcu-memory, vendor: enflame, mode: memory, memoryUnit: "1"}
`
	w.Objects.ConfigMaps = []corev1.ConfigMap{
		{ObjectMeta: ofDivvy(system, "divvy-node", nameNode), Data: map[string]string{"config.yaml": config}},
		{ObjectMeta: ofDivvy(system, "divvy-node-configs", nameNode), Data: map[string]string{"training": config}},
		{ObjectMeta: ofDivvy(bwki, "catalog", namePoolHook),
			Data: map[string]string{"bitfusion-client-config.yaml": string(pool.DefaultCatalogYAML())}},
		{ObjectMeta: ofDivvy(system, nameExtenderCA, nameExtender), Data: map[string]string{"ca.crt": string(w.ca.crt())}},
	}
	kept := map[string][]byte{"ca.crt": w.ca.crt(), "ca.key": w.ca.pem(t), "tls.crt": w.served.crt(), "tls.key": w.served.pem(t)}
	copyOf := func() map[string][]byte {
		out := map[string][]byte{}
		for k, v := range kept {
			out[k] = v
		}
		return out
	}
	w.Objects.Secrets = []corev1.Secret{
		{ObjectMeta: ofDivvy(system, "divvy-grant-key", "divvy"), Data: map[string][]byte{"key": make([]byte, 64)}},
		{ObjectMeta: ofDivvy(system, "divvy-extender-certs", nameExtender), Data: copyOf()},
		{ObjectMeta: ofDivvy(system, nameExtenderClient, nameExtender), Data: map[string][]byte{"tls.crt": w.client.crt(),
			"tls.key": w.client.pem(t)}},
		{ObjectMeta: ofDivvy(bwki, "bwki-webhook-certs", namePoolHook), Data: copyOf()},
	}
	hook := func(namespace, name string) admissionv1.WebhookClientConfig {
		return admissionv1.WebhookClientConfig{CABundle: w.ca.crt(), Service: &admissionv1.ServiceReference{Namespace: namespace,
			Name: name}}
	}
	w.Admission.Mutating = []admissionv1.MutatingWebhookConfiguration{{
		ObjectMeta: ofDivvy("", "bwki-webhook-cfg", namePoolHook),
		Webhooks:   []admissionv1.MutatingWebhook{{Name: "bwkimua.bitfusion.io", ClientConfig: hook(bwki, "bwki-webhook-svc")}},
	}}
	w.Admission.Validating = []admissionv1.ValidatingWebhookConfiguration{{
		ObjectMeta: ofDivvy("", "divvy-config", nameExtender),
		Webhooks: []admissionv1.ValidatingWebhook{{
			Name: "config.divvy.dev", ClientConfig: hook(system, nameExtender), FailurePolicy: ptr.To(admissionv1.Ignore),
		}},
	}}
	w.Admission.Policies = []admissionv1.ValidatingAdmissionPolicy{{ObjectMeta: ofDivvy("", "divvy-node", nameNode)}}
	w.Admission.Bindings = []admissionv1.ValidatingAdmissionPolicyBinding{{
		ObjectMeta: ofDivvy("", "divvy-node", nameNode),
		Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: "divvy-node",
			ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}},
	}}
	w.Token = []corev1.Secret{
		{ObjectMeta: metav1.ObjectMeta{Namespace: kubeSystem, Name: pool.CASecret}, Data: map[string][]byte{pool.CAKey: w.ca.crt()}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: kubeSystem, Name: pool.ClientSecret}, Data: map[string][]byte{
			pool.ClientKey: []byte("cacertpath: /etc/bitfusion/tls/ca.crt\ntoken: abc\n"),
		}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: kubeSystem, Name: pool.ServersSecret}, Data: map[string][]byte{
			pool.ServersKey: []byte("servers:\n- addresses:\n  - 10.1.1.1:56001\n"),
		}},
		{ObjectMeta: metav1.ObjectMeta{Namespace: kubeSystem, Name: pool.SingleSecret}},
	}
	w.Pods = append(w.Pods, w.shared("train", "card-0", 4), w.pooled("bench"))
	w.Pods[len(w.Pods)-1].Namespace = "team"

	role := rbacv1.ClusterRole{ObjectMeta: ofDivvy("", "divvy-node", nameNode), Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"nodes", "nodes/status"}, Verbs: []string{"patch"}},
		{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, ResourceNames: []string{"x"}, Verbs: []string{"get"}},
	}}
	binding := rbacv1.ClusterRoleBinding{
		ObjectMeta: ofDivvy("", "divvy-node", nameNode), RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: "divvy-node"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: system, Name: "divvy-node"}},
	}
	manifest := []Object{
		w.object("rbac.authorization.k8s.io/v1", "ClusterRole", role),
		w.object("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", binding),
		w.object("v1", "Secret", w.Objects.Secrets[0]), w.object("v1", "ConfigMap", w.Objects.ConfigMaps[2]),
	}
	for _, d := range w.Deployments {
		d.Spec.Replicas = ptr.To[int32](2)
		manifest = append(manifest, w.object("apps/v1", "Deployment", d))
	}
	for _, d := range w.DaemonSets {
		manifest = append(manifest, w.object("apps/v1", "DaemonSet", d))
	}
	w.Releases[0].Manifest = manifest
	for _, o := range manifest {
		w.Objects.Live = append(w.Objects.Live, Live{Object: o, Found: true})
	}
	w.Objects.Access = wantedAccess(manifest)
	for i := range w.Objects.Access {
		w.Objects.Access[i].Allowed = true
	}
	w.Labelled = []Labelled{{Kind: "clusterrole", Name: "divvy-node", Instance: "divvy"}}
	return w
}

// shared is a pod that holds units of a card.
func (w *world) shared(name string, card accel.DeviceID, units int64) corev1.Pod {
	w.t.Helper()
	list := corev1.ResourceList{memory: *resource.NewQuantity(units, resource.DecimalSI)}
	p := running("team", name, corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{
		Name: "app", Resources: corev1.ResourceRequirements{Limits: list, Requests: list},
	}}}})
	signer, err := wire.NewSigner(make([]byte, wire.MinKeyBytes))
	if err != nil {
		w.t.Fatal(err)
	}
	text, err := signer.EncodeGrant(string(p.UID), accel.Grant{
		Resource: memory, Node: theNode, Device: card, DeviceUnits: 16, Units: accel.Units(units), At: now.Add(-time.Hour), Confirmed: true,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	p.Annotations = map[string]string{wire.GrantAnnotation: text}
	return p
}

// pooled is a pod that uses the pool.
func (w *world) pooled(name string) corev1.Pod {
	list := corev1.ResourceList{pool.Resource: resource.MustParse("50")}
	p := running("team", name, corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{pool.ConvertedLabel: "true"}},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "app", Resources: corev1.ResourceRequirements{Limits: list, Requests: list}}},
			Volumes: []corev1.Volume{{Name: "ca",
				VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: pool.CASecret}}}},
		},
	})
	return p
}

// pod returns a pod by its name.
func (w *world) pod(name string) *corev1.Pod {
	w.t.Helper()
	for i := range w.Pods {
		if w.Pods[i].Name == name {
			return &w.Pods[i]
		}
	}
	w.t.Fatalf("there is no pod %s", name)
	return nil
}

func (w *world) ready(name string, ready bool) *corev1.Pod {
	p := w.pod(name)
	for i := range p.Status.Conditions {
		if p.Status.Conditions[i].Type == corev1.PodReady && !ready {
			p.Status.Conditions[i].Status = corev1.ConditionFalse
		}
	}
	return p
}

// startedFor makes a pod one that runs for that long, and that kubelet asks for the
// first time after 10 s, as kubeadm's manifests have it.
func (w *world) startedFor(name string, age time.Duration) *corev1.Pod {
	p := w.ready(name, false)
	p.Spec.Containers[0].StartupProbe = &corev1.Probe{InitialDelaySeconds: 10, PeriodSeconds: 10}
	began := metav1.NewTime(now.Add(-age))
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: p.Spec.Containers[0].Name,
		State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: began}}}}
	return p
}

func (w *world) without(name string) {
	for i := range w.Pods {
		if w.Pods[i].Name == name {
			w.Pods = append(w.Pods[:i:i], w.Pods[i+1:]...)
			return
		}
	}
	w.t.Fatalf("there is no pod %s", name)
}

// waitsForOperator leaves the daemon in its init container, as
// node.gpuOperator.enabled installs it.
func (w *world) waitsForOperator() *corev1.Pod {
	p := w.ready("divvy-node-x", false)
	p.Spec.InitContainers = []corev1.Container{{Name: "wait-for-driver", Args: []string{"wait", "--vendor=nvidia",
		"--validations=/run/nvidia/validations"}}}
	p.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "wait-for-driver",
		State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	return p
}

// drivers publishes what the daemon reports of its drivers.
func (w *world) drivers(all ...wire.ClaimDriver) {
	text, err := wire.EncodeClaimDrivers(all)
	if err != nil {
		panic(err)
	}
	w.Nodes[0].Annotations[wire.ClaimDriversAnnotation] = text
}

// claiming adds a pod that waits for a claim of a class, and returns it.
func (w *world) claiming(class string) *corev1.Pod {
	claim := resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "mine"}}
	claim.Spec.Devices.Requests = []resourceapi.DeviceRequest{{Name: "r", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: class}}}
	w.Claims.Claims = append(w.Claims.Claims, claim)
	p := running("team", "claimer", corev1.PodTemplateSpec{})
	p.Status = corev1.PodStatus{Phase: corev1.PodPending}
	p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "r", ResourceClaimName: ptr.To("mine")}}
	w.Pods = append(w.Pods, p)
	return &w.Pods[len(w.Pods)-1]
}

// event is one of divvy-node on a pod.
func (w *world) event(p *corev1.Pod, reason, message string) {
	w.Claims.Events = append(w.Claims.Events, corev1.Event{Reason: reason, Message: message,
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID}})
}
