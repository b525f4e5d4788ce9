package schedconf

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// asKubernetes reads a text as kubelet and kube-scheduler do.
func asKubernetes(t *testing.T, data []byte) map[string]any {
	t.Helper()
	text, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	dec := json.NewDecoder(strings.NewReader(string(text)))
	dec.UseNumber()
	var out map[string]any
	if err := dec.Decode(&out); err != nil {
		t.Fatal(err)
	}
	return out
}

func mapOf(v any) map[string]any { m, _ := v.(map[string]any); return m }
func listOf(v any) []any         { l, _ := v.([]any); return l }

// withoutOurs takes out of a manifest that was read what Wire put in.
func withoutOurs(m map[string]any) map[string]any {
	annotations := mapOf(mapOf(m["metadata"])["annotations"])
	delete(annotations, AnnotationHash)
	delete(annotations, AnnotationBefore)
	spec := mapOf(m["spec"])
	var volumes []any
	names := map[any]bool{}
	for _, v := range listOf(spec["volumes"]) {
		if path := mapOf(mapOf(v)["hostPath"])["path"]; path == newFile {
			names[mapOf(v)["name"]] = true
			continue
		}
		volumes = append(volumes, v)
	}
	spec["volumes"] = volumes
	for _, c := range listOf(spec["containers"]) {
		c := mapOf(c)
		for _, field := range []string{"command", "args"} {
			c[field] = slices.DeleteFunc(listOf(c[field]), func(w any) bool {
				return strings.HasPrefix(fmt.Sprint(w), "--config=") || w == newFile || w == existing
			})
		}
		c["volumeMounts"] = slices.DeleteFunc(listOf(c["volumeMounts"]), func(m any) bool { return names[mapOf(m)["name"]] })
	}
	prune(m)
	return m
}

func sameManifest(t *testing.T, before, after []byte) {
	t.Helper()
	if diff := cmp.Diff(withoutOurs(asKubernetes(t, before)), withoutOurs(asKubernetes(t, after))); diff != "" {
		t.Errorf("manifest (-before +after):\n%s\n%s", diff, after)
	}
	var pod corev1.Pod
	was := yaml.UnmarshalStrict(before, &pod)
	if err := yaml.UnmarshalStrict(after, &pod); err != nil && was == nil {
		t.Error(err)
	}
}

func sameConfig(t *testing.T, before, after []byte) {
	t.Helper()
	a, b := asKubernetes(t, before), asKubernetes(t, after)
	for _, c := range []map[string]any{a, b} {
		var rest []any
		for _, e := range listOf(c["extenders"]) {
			if !isOurs(fmt.Sprint(mapOf(e)["urlPrefix"])) {
				rest = append(rest, e)
			}
		}
		c["extenders"] = rest
	}
	if diff := cmp.Diff(a, b); diff != "" {
		t.Errorf("configuration (-before +after):\n%s\n%s", diff, after)
	}
}

func sameComments(t *testing.T, before, after []byte) {
	t.Helper()
	for line := range strings.Lines(string(before)) {
		if _, c, ok := strings.Cut(line, "#c"); ok && !strings.Contains(string(after), "#c"+strings.TrimSpace(c)) {
			t.Errorf("comment #c%s is lost", strings.TrimSpace(c))
		}
	}
}

// roundTrip wires a node, and back, with and without the original.
func roundTrip(t *testing.T, n *node, config string) {
	t.Helper()
	before := n.clone()
	if _, err := Wire(n.input(), secured); err != nil {
		t.Errorf("rejected: %v", err)
		return
	}
	n.wire(t, secured)
	sameManifest(t, before.manifest, n.manifest)
	if config != "" {
		sameConfig(t, before.files[config], n.files[newFile])
	}
	other := n.clone()
	n.unwire(t, before.manifest)
	same(t, before, n)
	other.unwire(t, nil)
	sameManifest(t, before.manifest, other.manifest)
}

// hardValues are values that a layout can change.
var hardValues = []string{
	"yes", "no", "on", "off", "y", "n", "True", "NULL", "~", "", "null", "0644", "0o644", "0b11", "0x1F", "1e3", ".5", "-.5", "+1",
	"1_000", "1:30", "190:20:30", "12345678901234567890123", "18446744073709551615", "-9223372036854775808", "1.0", "1.10", "1e400",
	"2024-01-01", "2001-12-14t21:59:43.10-05:00", "'2024-01-01'", `"yes"`, `"0644"`, "'1e3'", "'~'", "''",
	`"a\tb\u00e9\x41\/ \U0001F600"`, "\U0001F600 smile", "é ü 漢字", `"line\nline\n"`, `'it''s'`, "a: b", "!!str 123", "!!int \"5\"",
	"!!float 3", "!!binary aGVsbG8=", "!!str yes", "!!timestamp 2024-01-01", "!local x", "!<tag:yaml.org,2002:str> 7",
	"|\n          lit\n            more\n\n          end", "|-\n          lit # no comment\n", "|+\n          keep\n\n\n",
	"|2\n            lead\n          x",
	">\n          fold " + strings.Repeat("word ", 60) + "\n          next\n\n          para\n            indented\n          back",
	">-\n          f\n", ">+\n          f\n\n", ">1\n           x", "plain\n          continued\n\n          more",
	"'sq\n          cont\n\n          x'", "\"dq \\\n          cont\n          x\"", strings.Repeat("long ", 100) + "end",
	"'" + strings.Repeat("long ", 100) + "end'", `"` + strings.Repeat("long ", 100) + `end"`, strings.Repeat("x", 5000), "{}", "[]",
	"{a: b, c: [d, {e: f}]}", "[a, 'b', \"c\", yes, 1.0]", "{\"a\":\"b\",\"c\":1}", "[\n          a, #cflow\n          b ]",
	"{a: b, #cflow\n          c: d}", "<<", "'<<'", "=", "'='", "-", "'- a'", "'#x'", "'# x'", "a#b", "'a #b'", "\"trail \"",
	"' lead'", "\"\"", "'%x'", "'@x'", "'`x'", "'&a'", "'*a'", "'!a'", "'|'", "'>'", "'?'", "'? a'", "?a", "':'", "a:b", "'a:'", ":a",
	"'{'", "'}'", "'---'", "'...'", "\"\\0\\a\\e\\_\\N\\L\\P\"", "\"\u0085x\"", "'a\u00a0b'", "5s", "100m", "1Gi", "0x", ".inf",
	"-.inf", "!!null ''", "!!str", "!!map {a: b}", "!!seq [a]", "0.1e-5", "1.", "0.", "00", "09", "0_1", "+0x1",
	"-0b1", "1e+3", "1E3", "_1", "1__0",
}

// rejectedValues have tags that the encoder does not keep.
var rejectedValues = []string{"!!bool yes", "!!set {a, b}", "! 5"}

func TestHardValues(t *testing.T) {
	const head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
	for i, v := range slices.Concat(hardValues, rejectedValues) {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			n := manifest(image131, "    command: [kube-scheduler, --config="+existing+"]\n    volumeMounts: [{mountPath: "+existing+
				", name: o}]\n  volumes: [{name: o, hostPath: {path: "+existing+"}}]\n  x:\n    k:\n      l: "+v+
				"\n    \"q\": '1' # why\n    l:\n      - "+v+"\n      -   - "+v+"\n")
			config := head + "profiles:\n- pluginConfig:\n  - args:\n      a: " + v + "\n      l:\n        - " + v +
				"\n        -   b: " + v + "\n    name: X\n"
			n.files[existing] = []byte(config)
			for _, text := range [][]byte{n.manifest, n.files[existing]} {
				if _, err := yaml.YAMLToJSONStrict(text); err != nil {
					refused(t, n, secured) // Kubernetes cannot read it either
					return
				}
			}
			if slices.Contains(rejectedValues, v) {
				refused(t, n, secured, "written in a form that cannot be changed")
				return
			}
			roundTrip(t, n, existing)
			if t.Failed() {
				t.Logf("value %q", v)
			}
		})
	}
}

// commented puts comments in a text, at random places.
func commented(r *rand.Rand, text string) string {
	var b strings.Builder
	count := 0
	next := func() string { count++; return fmt.Sprintf("#c%d ä", count) }
	for line := range strings.Lines(text) {
		body := strings.TrimRight(line, "\n")
		indent := len(body) - len(strings.TrimLeft(body, " "))
		for r.IntN(4) == 0 {
			switch r.IntN(4) {
			case 0:
				b.WriteString("\n")
			default:
				b.WriteString(strings.Repeat(" ", max(0, indent+2*(r.IntN(4)-2))) + next() + "\n")
			}
		}
		if r.IntN(5) == 0 && !strings.Contains(body, "#") {
			body += "   " + next()
		}
		b.WriteString(body + "\n")
	}
	for r.IntN(2) == 0 {
		b.WriteString(next() + "\n")
	}
	return b.String()
}

// TestCommentsEverywhere puts comments in every place. The parser loses some that are indented
// otherwise than what follows; what is read has to stay.
func TestCommentsEverywhere(t *testing.T) {
	for seed := range uint64(130) {
		r := rand.New(rand.NewPCG(seed, 1))
		n, config := configured(t, 31), existing
		if r.IntN(2) == 0 {
			n, config = kubeadm(t, 31), ""
		}
		n.manifest = []byte(commented(r, string(n.manifest)))
		if config != "" {
			n.files[existing] = []byte(commented(r, string(n.files[existing])))
		}
		roundTrip(t, n, config)
	}
}

// TestMergeKeys lets what is changed come from a merge key: Wire either takes what is merged for
// what it is, or rejects the file.
func TestMergeKeys(t *testing.T) {
	const head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
	t.Run("a command", func(t *testing.T) {
		n := manifest(image131, "    <<: *c\n")
		n.manifest = append([]byte("x-c: &c\n  command: [kube-scheduler, --leader-elect=false]\n"), n.manifest...)
		refused(t, n, unsecured, "merge key")
	})
	t.Run("volumes", func(t *testing.T) {
		n := manifest(image131, "    command: [kube-scheduler]\n  <<: *v\n")
		n.manifest = append([]byte("x-v: &v\n  volumes: [{name: a, emptyDir: {}}]\n"), n.manifest...)
		refused(t, n, unsecured, "merge key")
	})
	t.Run("extenders", func(t *testing.T) {
		n := kubeadm(t, 31).withConfig(existing, []byte("x: &x\n  extenders: [{urlPrefix: http://a/b}]\n"+head+"<<: *x\n"))
		refused(t, n, unsecured, "merge key")
	})
	t.Run("an extender that binds", func(t *testing.T) {
		n := kubeadm(t, 31).withConfig(existing, []byte(head+"x: &x {bindVerb: bind}\nextenders:\n- {<<: [*x], urlPrefix: http://a/b}\n"))
		refused(t, n, unsecured, "binds pods")
	})
	t.Run("a mapping that merges itself", func(t *testing.T) {
		n := manifest(image131, "    command: [kube-scheduler]\n")
		n.manifest = []byte(strings.Replace(string(n.manifest), "spec:\n", "spec: &s\n  <<: [*s, *s]\n", 1))
		refused(t, n, unsecured, "anchor")
	})
	t.Run("elsewhere", func(t *testing.T) {
		n := manifest(image131, "    <<: *c\n    command: [kube-scheduler]\n")
		n.manifest = append([]byte("x-c: &c {imagePullPolicy: IfNotPresent}\n"), n.manifest...)
		roundTrip(t, n, "")
	})
}

// TestEditsThatOnlyKubernetesSees lets an administrator change what is the same in YAML 1.2, but
// not for kubelet and kube-scheduler.
func TestEditsThatOnlyKubernetesSees(t *testing.T) {
	n := configured(t, 31)
	n.files[existing] = append(n.files[existing], "x: \"yes\"\n"...)
	n.wire(t, secured)
	n.files[existing] = []byte(strings.Replace(string(n.files[existing]), "x: \"yes\"", "x: yes", 1))
	n.wire(t, secured)
	sameConfig(t, n.files[existing], n.files[newFile])

	n = kubeadm(t, 31)
	before := n.clone()
	n.manifest = []byte(strings.Replace(string(n.manifest), "  hostNetwork: true", "  hostNetwork: \"yes\"", 1))
	n.wire(t, secured)
	n.manifest = []byte(strings.Replace(string(n.manifest), "  hostNetwork: \"yes\"", "  hostNetwork: yes", 1))
	edited := n.clone()
	n.unwire(t, []byte(strings.Replace(string(before.manifest), "  hostNetwork: true", "  hostNetwork: \"yes\"", 1)))
	sameManifest(t, edited.manifest, n.manifest)

	// What was edited in our file is kept, too.
	n = configured(t, 31)
	n.files[existing] = append(n.files[existing], "x: \"yes\"\n"...)
	before = n.clone()
	n.wire(t, secured)
	n.files[newFile] = []byte(strings.Replace(string(n.files[newFile]), "x: \"yes\"", "x: yes", 1))
	n.unwire(t, before.manifest)
	if x := asKubernetes(t, n.files[newFile])["x"]; x != true {
		t.Errorf("x is %v", x)
	}
}

// TestCommentsBesideOurs lets an administrator write comments at what Wire put in, which are
// there still when that is brought up to date.
func TestCommentsBesideOurs(t *testing.T) {
	for seed := range uint64(10) {
		r := rand.New(rand.NewPCG(seed, 2))
		n := configured(t, 31)
		original := n.clone()
		n.wire(t, secured)
		n.files[newFile] = []byte(strings.Replace(string(n.files[newFile]), "- urlPrefix: https",
			strings.Repeat(" ", r.IntN(2)*2)+"#c1\n- urlPrefix: https", 1) + "#c2\n")
		was := n.files[newFile]
		n.wire(t, unsecured)
		sameComments(t, was, n.files[newFile])
		sameConfig(t, was, n.files[newFile])
		n.unwire(t, original.manifest)
		same(t, original, n)
	}
}
