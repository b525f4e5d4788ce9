package schedconf

import (
	"bytes"
	"errors"
	"io/fs"
	"strings"
	"testing"
)

// refused lets Wire fail, and checks what it says and that Inspect does not end
// otherwise than with a sentence.
func refused(t *testing.T, n *node, e Extender, want ...string) {
	t.Helper()
	c, err := Wire(n.input(), e)
	if err == nil {
		t.Fatalf("no error; it became\n%s", c.Manifest)
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q, want %q", err, w)
		}
	}
	if c.Manifest != nil || c.Files != nil {
		t.Errorf("there is a change beside the error: %+v", c)
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("the error has more than one line: %q", err)
	}
}

func TestManifestsThatCannotBeWired(t *testing.T) {
	scheduler := "    command: [kube-scheduler]\n"
	edited := func(from, to string) []byte {
		m := manifest(image131, scheduler).manifest
		if !bytes.Contains(m, []byte(from)) {
			t.Fatalf("nothing to edit: %s", from)
		}
		return bytes.Replace(m, []byte(from), []byte(to), 1)
	}
	with := func(fields string) []byte { return manifest(image131, fields).manifest }
	tests := map[string]struct {
		manifest []byte
		want     string
	}{
		"empty":         {nil, "kube-scheduler.yaml: empty"},
		"not YAML":      {[]byte("}{"), "neither YAML nor JSON"},
		"binary":        {[]byte("\x7fELF\x02\x01\x01\x00\xff\xfe"), "not text in UTF-8"},
		"a list":        {[]byte("- a\n"), "not a mapping"},
		"ten megabytes": {bytes.Repeat([]byte("# comment\n"), 1<<20), "10485760 bytes, but a file of kube-scheduler has at most"},
		"two documents": {edited("  hostNetwork: true\n", "  hostNetwork: true\n---\nkind: Pod\n"), "a second document"},
		"tabs":          {edited("  hostNetwork", "\thostNetwork"), "(the line begins with a tab; indent with spaces)"},
		"a key twice": {edited("  hostNetwork: true\n", "  hostNetwork: true\n  hostNetwork: false\n"),
			`line 11: duplicate key "hostNetwork", first in line 10`},
		"a Deployment":       {edited("kind: Pod", "kind: Deployment"), `holds "Deployment" of apiVersion "v1", not a Pod of v1`},
		"no kind":            {edited("kind: Pod\n", ""), "holds nothing of apiVersion"},
		"no spec":            {[]byte("apiVersion: v1\nkind: Pod\nmetadata: {name: s}\n"), "spec.containers is not a list"},
		"no name":            {[]byte("apiVersion: v1\nkind: Pod\nmetadata: {}\n"), "metadata.name is missing"},
		"a spec that is off": {[]byte("apiVersion: v1\nkind: Pod\nmetadata: {name: s}\nspec: [1]\n"), "spec.containers is not a list"},
		"containers of text": {[]byte("apiVersion: v1\nkind: Pod\nmetadata: {name: s}\nspec: {containers: [a]}\n"),
			"spec.containers[0] is not a mapping"},
		"no scheduler": {edited("  - name: kube-scheduler\n    image: "+image131+"\n"+scheduler,
			"  - name: etcd\n    command: [etcd]\n"), "no container runs kube-scheduler"},
		"two schedulers": {
			edited("  hostNetwork", "  - name: second\n    command: [/bin/kube-scheduler]\n  hostNetwork"),
			"2 containers run kube-scheduler",
		},
		"another program in it": {with("    command: [/opt/start.sh, --v=2]\n"),
			"does not run kube-scheduler directly, so its flags cannot be read: /opt/start.sh --v=2"},
		"a command that is no list": {with("    command: kube-scheduler\n"), "command of the container is not a list"},
		"a command of maps":         {with("    command: [{a: b}]\n"), "command[0] of the container is not a text"},
		"a script": {with("    command: [sh, -c, \"exec kube-scheduler --v=2\"]\n"),
			"does not run kube-scheduler directly, so its flags cannot be read: sh -c exec"},
		"a script without flags": {with("    command: [/bin/sh, -c, kube-scheduler]\n"), "does not run kube-scheduler directly"},
		"a variable of kubelet": {with("    command: [kube-scheduler, --config=$(F)]\n"),
			"--config cannot be determined: kubelet puts an environment variable into it"},
		"a carried flag of kubelet": {with("    command: [kube-scheduler, --kubeconfig=$(F)]\n"),
			"--kubeconfig must be moved into the configuration, but kubelet puts"},
		"a switch that is wrong": {with("    command: [kube-scheduler, --leader-elect=perhaps]\n"),
			"--leader-elect=perhaps: not true or false"},
		"a number that is wrong":   {with("    command: [kube-scheduler, --kube-api-qps=many]\n"), "--kube-api-qps=many: not a number"},
		"a duration that is wrong": {with("    command: [kube-scheduler, --leader-elect-retry-period=5]\n"), "not a duration"},
		"a config without a value": {with("    command: [kube-scheduler, --config, --v=2]\n"),
			"--config cannot be determined: it has no value; set it explicitly"},
		"a config not mounted": {with("    command: [kube-scheduler, --config=/srv/s.yaml]\n"),
			"--config=/srv/s.yaml is not in a volume of the container"},
		"a config of a ConfigMap": {
			with("    command: [kube-scheduler, --config=/srv/s.yaml]\n    volumeMounts: [{name: s, mountPath: /srv}]\n  volumes: " +
				"[{name: s, configMap: {name: s}}]\n"),
			`--config=/srv/s.yaml is in volume "s", which is not a hostPath`,
		},
		"a config that is not there": {
			with("    command: [kube-scheduler, --config=/srv/s.yaml]\n    volumeMounts: [{name: s, mountPath: /srv}]\n  volumes: " +
				"[{name: s, hostPath: {path: /x}}]\n"),
			"--config=/srv/s.yaml: file /x/s.yaml does not exist on the node",
		},
		"a config relative to nothing": {with("    command: [kube-scheduler, --config=s.yaml]\n"),
			"is not an absolute path, and the container has no workingDir"},
		"volumes that are an alias": {
			[]byte("x: &v [{name: a, hostPath: {path: /a}}]\napiVersion: v1\nkind: Pod\nmetadata: {name: s}\nspec:\n  containers:\n  - " +
				"name: kube-scheduler\n    image: " + image131 + "\n  volumes: *v\n"),
			"spec.volumes is an anchor or an alias",
		},
		"volumes of another type": {with("    volumeMounts: {a: b}\n"), "volumeMounts is not a list"},
		"aliases that multiply": {
			[]byte("a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d " +
				"[*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e]\n"),
			"not a Pod of v1",
		},
		"a remembered flag that is wrong": {
			edited("metadata:\n", "metadata:\n  annotations: {divvy.dev/scheduler-config-hash: x, divvy.dev/scheduler-config-before: "+
				"\"[--config]\"}\n"),
			"not a JSON list of flags",
		},
		"a remembered flag of somebody else": {
			edited("metadata:\n", "metadata:\n  annotations: {divvy.dev/scheduler-config-hash: x, divvy.dev/scheduler-config-before: "+
				"'[\"--v=2\"]'}\n"),
			`"--v=2" is not the replaced flag`,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := &node{manifest: tt.manifest, files: map[string][]byte{}}
			refused(t, n, unsecured, tt.want)
			if _, _, err := Unwire(n.input(), nil); err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("Unwire: %q", err)
			}
		})
	}
}

func TestConfigurationsThatCannotBeMerged(t *testing.T) {
	const head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
	tests := map[string]struct {
		config string
		want   string
	}{
		"empty":         {"", existing + ": empty"},
		"not YAML":      {"a: [", existing + ": neither YAML nor JSON"},
		"ten megabytes": {strings.Repeat("# comment\n", 1<<20), "10485760 bytes"},
		"two documents": {head + "---\n" + head, "a second document"},
		"another kind": {"apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n",
			`holds "KubeProxyConfiguration" of apiVersion "kubeproxy.config.k8s.io/v1alpha1", not a KubeSchedulerConfiguration`},
		"a policy":   {"apiVersion: v1\nkind: Policy\n", `holds "Policy"`},
		"no version": {"kind: KubeSchedulerConfiguration\n", "of apiVersion nothing"},
		"a version that is not served": {
			strings.Replace(head, "/v1", "/v1beta3", 1), "kube-scheduler does not serve apiVersion kubescheduler.config.k8s.io/v1beta3; " +
				"it serves kubescheduler.config.k8s.io/v1. Convert the file first",
		},
		"a version of the future": {strings.Replace(head, "/v1", "/v2", 1), "does not serve apiVersion kubescheduler.config.k8s.io/v2"},
		"extenders of a map":      {head + "extenders: {a: b}\n", "line 3: extenders is not a list"},
		"extenders of texts":      {head + "extenders: [a]\n", "extenders[0] is not a mapping"},
		"a key twice":             {head + "parallelism: 1\nparallelism: 2\n", `duplicate key "parallelism"`},
		"another that binds": {
			head + "extenders:\n- urlPrefix: http://x/y\n  bindVerb: bind\n  managedResources: [{name: example.com/x}]\n",
			existing + ": line 4: the extender http://x/y binds pods, and kube-scheduler allows only one such extender",
		},
		"another with the resource": {
			head + "extenders:\n- urlPrefix: http://x/y\n  managedResources:\n  - name: enflame.com/gcu-memory\n",
			existing + ": line 4: the extender http://x/y already manages enflame.com/gcu-memory",
		},
		"extenders that are an alias": {head + "x: &e [{urlPrefix: http://x/y}]\nextenders: *e\n", "is an anchor or an alias"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := kubeadm(t, 31).withConfig(existing, []byte(tt.config))
			refused(t, n, unsecured, tt.want)
		})
	}
	t.Run("ours, broken by hand", func(t *testing.T) {
		n := kubeadm(t, 31)
		n.wire(t, unsecured)
		n.files[newFile] = append(n.files[newFile], "\t:"...)
		refused(t, n, unsecured, newFile+": neither YAML nor JSON", "it was edited after it was created")
		original := kubeadm(t, 31)
		n.unwire(t, original.manifest)
		same(t, original, n)
	})
	t.Run("a folder that cannot be read", func(t *testing.T) {
		n := kubeadm(t, 31)
		in := n.input()
		in.ReadFile = func(string) ([]byte, error) { return nil, fs.ErrPermission }
		if _, err := Wire(in, unsecured); !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), newFile) {
			t.Errorf("error %v", err)
		}
	})
}

// TestConfigurationsOfManyForms are those that can be merged, however odd.
func TestConfigurationsOfManyForms(t *testing.T) {
	tests := map[string]struct{ config, want string }{
		"extenders null": {
			"apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nextenders: null # none\nparallelism: 4\n",
			"extenders: # none\n- urlPrefix: http://127.0.0.1:32766/gcushare-scheduler\n",
		},
		"extenders empty": {
			"apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nextenders: []\n",
			"extenders:\n- urlPrefix: http",
		},
		"JSON": {
			`{"apiVersion":"kubescheduler.config.k8s.io/v1","kind":"KubeSchedulerConfiguration","parallelism":4}`,
			"\"parallelism\": 4\nextenders:\n- urlPrefix: http",
		},
		"line ends of Windows": {
			"apiVersion: kubescheduler.config.k8s.io/v1\r\nkind: KubeSchedulerConfiguration\r\nparallelism: 4\r\n",
			"\nparallelism: 4\nextenders:\n- urlPrefix: http",
		},
		"a byte order mark": {
			"\ufeffapiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n", "extenders:\n- urlPrefix: http",
		},
		"anchors elsewhere": {
			"apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nprofiles:\n- &p {schedulerName: a}\n- <<: " +
				"*p\n  schedulerName: b\n",
			"- <<: *p\n  schedulerName: b\nextenders:\n- urlPrefix: http",
		},
		"a document's marks": {
			"---\napiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n...\n",
			"KubeSchedulerConfiguration\nextenders:\n- urlPrefix: http",
		},
		"ours behind a byte order mark": {
			"\ufeffapiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nextenders:\n- " +
				"{urlPrefix: http://127.0.0.1:32766/gcushare-scheduler, filterVerb: filter, preemptVerb: preempt, " +
				"prioritizeVerb: prioritize, weight: 1, bindVerb: bind, httpTimeout: 10s, nodeCacheCapable: true, ignorable: false, " +
				"managedResources: [{name: enflame.com/gcu-memory, ignoredByScheduler: false}]}\n",
			"goes back to it.\napiVersion: kubescheduler",
		},
		"two of ours": {
			"apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nextenders:\n- urlPrefix: " +
				"http://a/gcushare-scheduler\n- urlPrefix: http://c/d\n- urlPrefix: http://b/gcushare-scheduler/\nparallelism: 4\n",
			"ignoredByScheduler: false\n- urlPrefix: http://c/d\nparallelism: 4\n",
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			n := kubeadm(t, 31).withConfig(existing, []byte(tt.config))
			before := n.clone()
			n.wire(t, unsecured)
			if got := string(n.files[newFile]); !strings.Contains(got, tt.want) {
				t.Errorf("no %q in %q", tt.want, got)
			}
			n.unwire(t, before.manifest)
			same(t, before, n)
		})
	}
}

func TestExtendersThatCannotBe(t *testing.T) {
	change := func(f func(*Extender)) Extender {
		e := secured
		f(&e)
		return e
	}
	tests := map[string]struct {
		e    Extender
		want string
	}{
		"no URL":    {change(func(e *Extender) { e.URL = "" }), "not of the form https://"},
		"no scheme": {change(func(e *Extender) { e.URL = "10.0.0.1:32765/gcushare-scheduler" }), "the extender's URL"},
		"no routes": {change(func(e *Extender) { e.URL = "https://10.0.0.1:32765" }),
			"does not end in /gcushare-scheduler"},
		"a query":      {change(func(e *Extender) { e.URL += "?a" }), "does not end in /gcushare-scheduler"},
		"no resources": {change(func(e *Extender) { e.Resources = nil }), "the extender has no resources"},
		"a resource of Kubernetes": {change(func(e *Extender) { e.Resources = []string{"memory"} }),
			`"memory" is not an extended resource`},
		"a resource twice": {change(func(e *Extender) { e.Resources = []string{"a.b/c", "a.b/c"} }), "listed twice"},
		"certificates and no TLS": {change(func(e *Extender) { e.URL = "http://10.0.0.1/gcushare-scheduler" }),
			"is http, for which there are no certificates"},
		"half of a client's":        {change(func(e *Extender) { e.ClientKey = nil }), "a client's certificate without its key"},
		"a CA that is none":         {change(func(e *Extender) { e.CA = []byte("CA") }), "the extender's CA is not PEM"},
		"a weight that is none":     {change(func(e *Extender) { e.Weight = -1 }), "weight -1 is not from 1 to 10000"},
		"a time that runs backward": {change(func(e *Extender) { e.Timeout = -1 }), "is negative"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) { refused(t, kubeadm(t, 31), tt.e, tt.want) })
	}
}
