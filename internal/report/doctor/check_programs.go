package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/divvy-gpu/divvy/api/config/v1alpha1"
	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
)

// minKubernetes is the oldest version that the chart installs on.
var minKubernetes = version.MustParseGeneric("1.30.0")

func ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

func condition(p *corev1.Pod, kind corev1.PodConditionType) *corev1.PodCondition {
	for i := range p.Status.Conditions {
		if p.Status.Conditions[i].Type == kind {
			return &p.Status.Conditions[i]
		}
	}
	return nil
}

func checkWorkloads(s *Snapshot, f *findings) {
	r := s.Release()
	for i := range s.DaemonSets {
		if d := &s.DaemonSets[i]; r.of(d) {
			checkDaemonSet(s, f, d)
		}
	}
	for i := range s.Deployments {
		if d := &s.Deployments[i]; r.of(d) {
			checkDeployment(s, f, d)
		}
	}
}

func checkDaemonSet(s *Snapshot, f *findings, d *appsv1.DaemonSet) {
	object := "DaemonSet " + d.Namespace + "/" + d.Name
	st := d.Status
	if st.ObservedGeneration < d.Generation {
		f.add(Warning, object, "its latest settings have not been rolled out yet", "Check again in a few seconds.").Transient = true
		return
	}
	told := checkPods(s, f, d.Namespace, d.Spec.Selector)
	if st.NumberReady < st.DesiredNumberScheduled && !told {
		f.add(Error, object, fmt.Sprintf("%d of %d pods are ready", st.NumberReady, st.DesiredNumberScheduled),
			fmt.Sprintf("See its events: kubectl describe daemonset %s -n %s", d.Name, d.Namespace)).Transient = true
	}
	if st.DesiredNumberScheduled == 0 && d.Labels[labelName] != nameNode {
		f.add(Error, object, "it runs on no node: no node has the required labels"+selectorOf(d),
			"Label a node, or change the chart's value that selects nodes.")
	}
}

func selectorOf(d *appsv1.DaemonSet) string {
	var words []string
	for _, key := range slices.Sorted(maps.Keys(d.Spec.Template.Spec.NodeSelector)) {
		words = append(words, key+"="+d.Spec.Template.Spec.NodeSelector[key])
	}
	if len(words) == 0 {
		return ""
	}
	return " (" + strings.Join(words, ",") + ")"
}

func checkDeployment(s *Snapshot, f *findings, d *appsv1.Deployment) {
	object := "Deployment " + d.Namespace + "/" + d.Name
	replicas := int32(1)
	if d.Spec.Replicas != nil {
		replicas = *d.Spec.Replicas
	}
	if replicas == 0 {
		f.add(Error, object, "it is scaled to 0 replicas, so nothing responds", "Scale it up again.",
			fmt.Sprintf("kubectl scale deployment/%s -n %s --replicas=%d", d.Name, d.Namespace, s.replicasOf(d)))
		return
	}
	st := d.Status
	if st.ObservedGeneration < d.Generation {
		f.add(Warning, object, "its latest settings have not been rolled out yet", "Check again in a few seconds.").Transient = true
		return
	}
	for _, c := range st.Conditions {
		if c.Type == appsv1.DeploymentReplicaFailure && c.Status == corev1.ConditionTrue {
			f.add(Error, object, "its pods cannot be created: "+c.Message,
				"Fix the problem that the message describes: a quota, a pod security level or a webhook rejects them.")
			return
		}
	}
	if st.ReadyReplicas >= replicas {
		checkPods(s, f, d.Namespace, d.Spec.Selector)
		return
	}
	if st.ReadyReplicas > 0 && d.Labels[labelName] == nameExtender && s.waitsForNode(d) {
		f.add(Warning, object, fmt.Sprintf("%d of %d replicas are ready, and another one cannot be scheduled, so nothing takes over if "+
			"these fail", st.ReadyReplicas, replicas),
			"Allow more nodes with the chart's values extender.nodeSelector, extender.tolerations and extender.affinity; or reduce "+
				"extender.replicas to the number of nodes: with extender.hostNetwork a node can run one replica.")
		return
	}
	if !checkPods(s, f, d.Namespace, d.Spec.Selector) {
		f.add(Error, object, fmt.Sprintf("%d of %d replicas are ready", st.ReadyReplicas, replicas),
			fmt.Sprintf("See its events: kubectl describe deployment %s -n %s", d.Name, d.Namespace)).Transient = true
	}
}

// waitsForNode reports whether all pods of a Deployment that are not ready wait for a
// node, and there are some.
func (s *Snapshot) waitsForNode(d *appsv1.Deployment) bool {
	waits := false
	for _, p := range s.podsOf(d.Namespace, d.Spec.Selector) {
		if kube.PodReady(p) || p.DeletionTimestamp != nil || ended(p) {
			continue
		}
		c := condition(p, corev1.PodScheduled)
		if c == nil || c.Status != corev1.ConditionFalse {
			return false
		}
		waits = true
	}
	return waits
}

// replicasOf returns how many replicas were installed, at least 1.
func (s *Snapshot) replicasOf(d *appsv1.Deployment) int {
	for _, o := range s.Release().Manifest {
		if o.Kind != "Deployment" || o.Name != d.Name || o.Namespace != d.Namespace {
			continue
		}
		var installed appsv1.Deployment
		if o.into(&installed) && installed.Spec.Replicas != nil {
			return max(1, int(*installed.Spec.Replicas))
		}
	}
	return 1
}

// checkPods says why pods are not ready. It is true when it said anything.
func checkPods(s *Snapshot, f *findings, namespace string, selector *metav1.LabelSelector) bool {
	told := false
	for _, p := range s.podsOf(namespace, selector) {
		if kube.PodReady(p) || p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodSucceeded {
			continue
		}
		told = true
		checkPod(s, f, p)
	}
	return told
}

// young is how long a pod may take to become ready without being told.
const young = 30 // seconds

func checkPod(s *Snapshot, f *findings, p *corev1.Pod) {
	object := "Pod " + p.Namespace + "/" + p.Name
	where := fmt.Sprintf("%s -n %s", p.Name, p.Namespace)
	if c := condition(p, corev1.PodScheduled); c != nil && c.Status == corev1.ConditionFalse {
		f.add(Error, object, "it is not scheduled: "+c.Message,
			"Free capacity for it, or change the nodes and tolerations in the chart's values.")
		return
	}
	if p.Status.Phase == corev1.PodFailed {
		f.add(Warning, object, "it failed: "+cmp.Or(p.Status.Message, p.Status.Reason),
			"Its controller creates a new pod; this command removes the failed one.", "kubectl delete pod "+where)
		return
	}
	if waitsForOperator(p) && !s.hasOperator() {
		f.add(Error, object, fmt.Sprintf("it waits for files that NVIDIA's GPU operator writes, but this cluster has no DaemonSet %s, "+
			"which writes them", operatorValidator),
			"If driver and toolkit were installed without the operator, upgrade with node.gpuOperator.enabled=false, as in "+
				"examples/values/nvidia.yaml. With the operator, check its ClusterPolicy: docs/gpu-operator.md.")
		return
	}
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if w := c.State.Waiting; w != nil {
			switch w.Reason {
			case "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull":
				f.add(Error, object, fmt.Sprintf("image %s cannot be pulled: %s", c.Image, cmp.Or(w.Message, w.Reason)),
					"Push the images to the registry of the value image.registry: make images push IMAGE_REPO=REGISTRY, then helm "+
						"upgrade with -f dist/images/values.yaml. Set image.pullSecrets for credentials. See docs/install.md.")
				return
			case "CrashLoopBackOff":
				why := w.Message
				if t := c.LastTerminationState.Terminated; t != nil {
					why = fmt.Sprintf("it exited with code %d, %d times: %s", t.ExitCode, c.RestartCount,
						cmp.Or(lastLine(t.Message), t.Reason))
				}
				f.add(Error, object, fmt.Sprintf("container %s keeps exiting: %s", c.Name, why),
					fmt.Sprintf("Fix the reported problem; see its log: kubectl logs %s -c %s --previous", where, c.Name))
				return
			case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
				f.add(Error, object, fmt.Sprintf("container %s cannot start: %s", c.Name, cmp.Or(w.Message, w.Reason)),
					"Restore the object that the message reports as missing, or fix the problem.")
				return
			}
		}
		if t := c.State.Terminated; t != nil && t.ExitCode != 0 {
			f.add(Error, object, fmt.Sprintf("container %s exited with code %d: %s", c.Name, t.ExitCode,
				cmp.Or(lastLine(t.Message), t.Reason)),
				fmt.Sprintf("See its log: kubectl logs %s -c %s", where, c.Name))
			return
		}
	}
	if answer, ok := s.Objects.Readiness[p.Namespace+"/"+p.Name]; ok {
		if !answer.OK {
			f.add(Error, object, "it is not ready: "+answer.Text,
				"Fix the reported problem; docs/troubleshooting.md explains what a daemon waits for.").Transient = true
			return
		}
		f.add(Warning, object, "it reports that it is ready, but kubelet has not updated its status yet",
			"Check again in a few seconds.").Transient = true
		return
	}
	for _, c := range p.Status.InitContainerStatuses {
		if c.State.Running != nil && (c.Started == nil || !*c.Started) {
			f.add(Error, object, "its init container "+c.Name+" has not completed",
				fmt.Sprintf("Its log shows what it waits for: kubectl logs %s -c %s", where, c.Name)).Transient = true
			return
		}
	}
	problem := "it is not ready"
	if s.Taken.Sub(p.CreationTimestamp.Time).Seconds() < young {
		problem = "it has just started"
	}
	f.add(Error, object, problem, fmt.Sprintf("See its events and its log: kubectl describe pod %s; kubectl logs %s", where,
		where)).Transient = true
}

// operatorValidator is the DaemonSet by which NVIDIA's GPU operator writes the files
// that say what is ready on a node.
const operatorValidator = "nvidia-operator-validator"

func (s *Snapshot) hasOperator() bool {
	return slices.ContainsFunc(s.DaemonSets, func(d appsv1.DaemonSet) bool { return d.Name == operatorValidator })
}

// waitsForOperator reports whether an init container of the pod waits for those files.
func waitsForOperator(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Spec.InitContainers, func(c corev1.Container) bool {
		return slices.ContainsFunc(c.Args, func(arg string) bool { return strings.HasPrefix(arg, "--validations=") }) &&
			slices.ContainsFunc(p.Status.InitContainerStatuses, func(st corev1.ContainerStatus) bool {
				return st.Name == c.Name && (st.State.Terminated == nil || st.State.Terminated.ExitCode != 0)
			})
	})
}

// lastLine is the end of a text of several lines, where a program says why it
// ended.
func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

// image parts a reference into the program, which is the last word of its name,
// and the tag or digest.
func image(reference string) (program, tag string) {
	name, digest, _ := strings.Cut(reference, "@")
	slash := strings.LastIndex(name, "/")
	program, tag, _ = strings.Cut(name[slash+1:], ":")
	return program, cmp.Or(digest, tag)
}

func checkVersions(s *Snapshot, f *findings) {
	r := s.Release()
	type use struct{ object, tag string }
	programs, charts := map[string][]use{}, map[string][]string{}
	for _, w := range s.workloads() {
		if !r.of(w) {
			continue
		}
		if v := w.Labels[labelVersion]; v != "" {
			charts[v] = append(charts[v], w.String())
		}
		for _, c := range w.pods.Containers {
			if program, tag := image(c.Image); strings.HasPrefix(program, "divvy-") {
				programs[program] = append(programs[program], use{w.String(), tag})
			}
		}
		checkRollout(s, f, w)
	}
	for _, program := range slices.Sorted(maps.Keys(programs)) {
		tags := map[string][]string{}
		for _, u := range programs[program] {
			tags[u.tag] = append(tags[u.tag], u.object)
		}
		if len(tags) < 2 {
			continue
		}
		var words []string
		for _, tag := range slices.Sorted(maps.Keys(tags)) {
			words = append(words, fmt.Sprintf("%s in %s", cmp.Or(tag, "no tag"), list(tags[tag])))
		}
		remedy, commands := "Use the same tag for all: the value image.tag of the chart.", []string(nil)
		if len(s.tagsInstalled(program)) == 1 {
			remedy, commands = s.restore("")
		}
		f.add(Warning, "image "+program, "several versions are running: "+strings.Join(words, "; "), remedy, commands...)
	}
	if len(charts) > 1 {
		var words []string
		for _, v := range slices.Sorted(maps.Keys(charts)) {
			words = append(words, v+" of "+list(charts[v]))
		}
		f.add(Warning, "release "+r.Name, "its objects have several versions of the chart: "+strings.Join(words, "; "),
			"Run helm upgrade again, with the chart of the desired version.")
	}
	if server, err := version.ParseGeneric(s.Kubernetes); err == nil && server.LessThan(minKubernetes) {
		f.add(Error, "API server", fmt.Sprintf("it has version %s; Divvy requires %s", s.Kubernetes, minKubernetes), "Upgrade Kubernetes.")
	}
	answer, asked := s.Objects.Extender["version"]
	if theirs, _, _ := strings.Cut(answer.Text, " "); asked && answer.OK && theirs != "" && theirs != s.Tool {
		f.add(Warning, "kubectl-divvy", fmt.Sprintf("this program has version %s, but the extender %s, so findings may be wrong where "+
			"they differ", s.Tool, answer.Text),
			"Use the kubectl-divvy of the installed version.")
	}
}

// tagsInstalled are the tags of a program in the release's manifest.
func (s *Snapshot) tagsInstalled(program string) map[string]bool {
	tags := map[string]bool{}
	for _, o := range s.Release().Manifest {
		var workload struct {
			Spec struct {
				Template corev1.PodTemplateSpec `json:"template"`
			} `json:"spec"`
		}
		if (o.Kind != "DaemonSet" && o.Kind != "Deployment") || !o.into(&workload) {
			continue
		}
		for _, c := range workload.Spec.Template.Spec.Containers {
			if p, tag := image(c.Image); p == program {
				tags[tag] = true
			}
		}
	}
	return tags
}

// checkRollout compares the images of pods with those that they are to have.
func checkRollout(s *Snapshot, f *findings, w workload) {
	images := map[string]string{}
	for _, c := range w.pods.Containers {
		images[c.Name] = c.Image
	}
	var old []string
	for _, p := range s.podsOf(w.Namespace, w.selector) {
		if p.DeletionTimestamp != nil || ended(p) {
			continue
		}
		for _, c := range p.Spec.Containers {
			if want, ok := images[c.Name]; ok && want != c.Image {
				old = append(old, p.Name)
				break
			}
		}
	}
	if len(old) > 0 {
		kind := strings.ToLower(w.kind)
		f.add(Warning, kind+" "+w.Namespace+"/"+w.Name, "an image other than the specified one still runs in "+list(old),
			"Wait for the rollout; this command waits and reports its progress.",
			fmt.Sprintf("kubectl rollout status %s/%s -n %s --timeout=120s", kind, w.Name, w.Namespace)).Transient = true
	}
}

// configurationsOf returns the configurations that a daemon reads: the text by
// name of the file; named are those that a node's label chooses.
func (s *Snapshot) configurationsOf(d *appsv1.DaemonSet) (files map[string]string, named map[string]string, from map[string]string,
	missing []string) {
	files, named, from = map[string]string{}, map[string]string{}, map[string]string{}
	for _, v := range d.Spec.Template.Spec.Volumes {
		if v.ConfigMap == nil || v.Name != "config" && v.Name != "configs" {
			continue
		}
		cm := lookup(s.Objects.ConfigMaps, d.Namespace, v.ConfigMap.Name)
		if cm == nil {
			if v.ConfigMap.Optional == nil || !*v.ConfigMap.Optional {
				missing = append(missing, v.ConfigMap.Name)
			}
			continue
		}
		for key, text := range cm.Data {
			from[key] = cm.Name
			if v.Name == "config" {
				files[key] = text
			} else {
				named[key] = text
			}
		}
	}
	return files, named, from, missing
}

// nodeConfig is the configuration that holds where no other is named.
func (s *Snapshot) nodeConfig() (v1alpha1.NodeConfig, bool) {
	d := program(s.Release(), s.DaemonSets, nameNode)
	if d == nil {
		return v1alpha1.NodeConfig{}, false
	}
	files, _, _, _ := s.configurationsOf(d)
	c, err := v1alpha1.Parse([]byte(files["config.yaml"]), "config.yaml", accel.VendorNames())
	return c, err == nil
}

func checkConfiguration(s *Snapshot, f *findings) {
	d := program(s.Release(), s.DaemonSets, nameNode)
	files, named, from, missing := s.configurationsOf(d)
	remedy, commands := s.restore(nameNode)
	for _, name := range missing {
		f.add(Error, "ConfigMap "+d.Namespace+"/"+name, "it is missing, but divvy-node requires it", remedy, commands...)
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if _, err := v1alpha1.Parse([]byte(files[name]), name, accel.VendorNames()); err != nil {
			f.add(Error, "ConfigMap "+d.Namespace+"/"+from[name], "entry "+name+": "+mistakes(err),
				"Running daemons keep the last valid one, but a daemon that starts now exits. "+remedy, commands...)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(named)) {
		// Files of other plugins are the daemon's to read.
		if !strings.Contains(named[name], v1alpha1.APIVersion) {
			continue
		}
		config := v1alpha1.Base()
		if bad, err := v1alpha1.Decode([]byte(named[name]), &config); err != nil || len(bad) > 0 {
			f.add(Error, "ConfigMap "+d.Namespace+"/"+from[name], "entry "+name+": "+mistakes(errors.Join(err, joined(bad))),
				"Nodes whose label divvy.dev/config selects it keep the last valid one. "+remedy, commands...)
		} else if absent := lacking(s, &config, d); absent != "" {
			f.add(Error, "ConfigMap "+d.Namespace+"/"+from[name], "entry "+name+": "+absent,
				"The chart does not read node.existingConfigMap. Put the entry into node.configs, or such a resource into "+
					"sharedResources, and upgrade the release; see docs/isolation.md.")
		}
	}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if s.daemonOn(n.Name) == nil {
			continue
		}
		for _, label := range []string{"divvy.dev/config", "nvidia.com/device-plugin.config"} {
			name, ok := n.Labels[label]
			if !ok {
				continue
			}
			if _, known := named[name]; !known && name != "" {
				there := "no configuration exists"
				if len(named) > 0 {
					there = "existing configurations: " + list(slices.Collect(maps.Keys(named)))
				}
				f.add(Error, "Node "+n.Name, fmt.Sprintf("its label %s selects the configuration %q, which does not exist; %s", label, name,
					there),
					"Select an existing one, or remove the label with this command.", "kubectl label node "+n.Name+" "+label+"-")
			}
			break // the first that is set decides
		}
	}
}

// lacking returns what the release does not have that the isolation of a resource needs, "" for nothing.
func lacking(s *Snapshot, config *v1alpha1.NodeConfig, d *appsv1.DaemonSet) string {
	for _, r := range config.Resources {
		needs := fmt.Sprintf("resource %s has isolation %s", r.Name, r.Isolation)
		switch {
		case r.Isolation == v1alpha1.IsolationCooperative && program(s.Release(), s.DaemonSets, nameMPS) == nil:
			return needs + ", and the release has no DaemonSet " + nameMPS + ", so its containers are not created"
		case r.Isolation == v1alpha1.IsolationDriver && !slices.ContainsFunc(d.Spec.Template.Spec.Volumes,
			func(v corev1.Volume) bool { return v.Name == "hook" }):
			return needs + ", and the pods of divvy-node cannot install the hook on the host, as they lack volume hook; its containers " +
				"have no limits"
		case r.Isolation != "" && r.Isolation != v1alpha1.IsolationNone && !d.Spec.Template.Spec.HostPID:
			return needs + ", and the pods of divvy-node do not have the host's PID namespace, so no node can prove it"
		}
	}
	return ""
}

func joined(texts []string) error {
	if len(texts) == 0 {
		return nil
	}
	return errors.New(strings.Join(texts, "; "))
}

func mistakes(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

func checkGrantKey(s *Snapshot, f *findings) {
	d := program(s.Release(), s.DaemonSets, nameNode)
	name := "divvy-grant-key"
	for _, v := range d.Spec.Template.Spec.Volumes {
		if v.Secret != nil && v.Name == "grant-key" {
			name = v.Secret.SecretName
		}
	}
	object := "Secret " + d.Namespace + "/" + name
	remedy, commands := s.restore("divvy")
	if !s.Release().installed("Secret", name) {
		remedy, commands = "Create it, with an entry key of 32 random bytes or more; the programs sign the allocations of running pods "+
			"again.", []string{
			fmt.Sprintf("kubectl create secret generic %s -n %s --from-literal=key=\"$(head -c 48 /dev/urandom | base64 -w0)\" "+
				"--dry-run=client -o yaml | kubectl apply -f -", name, d.Namespace),
		}
	}
	secret := lookup(s.Objects.Secrets, d.Namespace, name)
	switch {
	case secret == nil:
		f.add(Error, object, "it is missing, so planned allocations cannot be signed, and programs that start now wait for it", remedy,
			commands...)
	case len(secret.Data["key"]) == 0:
		f.add(Error, object, "it has no entry key, so planned allocations cannot be signed", remedy, commands...)
	case len(secret.Data["key"]) < wire.MinKeyBytes:
		f.add(Error, object, fmt.Sprintf("its entry key has %d bytes, but at least %d are required", len(secret.Data["key"]),
			wire.MinKeyBytes), remedy, commands...)
	}
}
