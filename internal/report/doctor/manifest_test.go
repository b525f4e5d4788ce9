package doctor

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestDecodeRelease(t *testing.T) {
	const two = `# Source: a
---
apiVersion: v1
kind: ConfigMap
metadata: {name: a, namespace: b, labels: {app.kubernetes.io/name: x}}
data: {text: "a\n--- b"}
---
# nothing
--- # Source: b
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: c
`
	objects, err := decodeRelease(&corev1.Secret{Data: map[string][]byte{"release": packed(t, two)}})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, o := range objects {
		names = append(names, o.APIVersion+" "+o.String())
	}
	if got, want := strings.Join(names, "; "), "v1 ConfigMap b/a; rbac.authorization.k8s.io/v1 ClusterRole c"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if label := objects[0].label(labelName); label != "x" {
		t.Errorf("label %q", label)
	}
	plain, err := json.Marshal(map[string]string{"manifest": two})
	if err != nil {
		t.Fatal(err)
	}
	objects, err = decodeRelease(&corev1.Secret{Data: map[string][]byte{"release": []byte(base64.StdEncoding.EncodeToString(plain))}})
	if err != nil || len(objects) != 2 {
		t.Errorf("without compression: %d objects, %v", len(objects), err)
	}
}

func TestDecodeReleaseRefuses(t *testing.T) {
	encode := func(text string) []byte { return []byte(base64.StdEncoding.EncodeToString([]byte(text))) }
	tests := map[string]struct {
		data []byte
		want string
	}{
		"nothing":                {nil, "no entry release"},
		"no base64":              {[]byte("%%%"), "illegal base64"},
		"no JSON":                {encode("x"), "invalid character"},
		"cut off":                {encode("\x1f\x8bxxxxxxxx"), "gzip"},
		"no YAML":                {packed(t, "---\n\tx: [\n"), "document 1 of the manifest"},
		"no name":                {packed(t, "---\nkind: X\napiVersion: v1\n"), "no apiVersion, kind or name"},
		"a list":                 {packed(t, "---\n- a\n"), "document 1 of the manifest"},
		"a manifest without end": {packed(t, strings.Repeat("a", maxManifest+1)), "bytes, more than"},
		"a release without end":  {packed(t, strings.Repeat("a", maxRelease+1)), "more than 33554432 bytes"},
		"objects without an end": {packed(t, strings.Repeat("---\n{kind: X, apiVersion: v1, metadata: {name: x}}\n", maxObjects+1)),
			"more than 2000 objects"},
		"an alias that multiplies": {packed(t, "---\na: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c "+
			"[*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f "+
			"[*e,*e,*e,*e,*e,*e,*e,*e,*e]\ng: &g [*f,*f,*f,*f,*f,*f,*f,*f,*f]\n"), "document 1 of the manifest"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := decodeRelease(&corev1.Secret{Data: map[string][]byte{"release": tt.data}})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
		})
	}
}

func TestDiffers(t *testing.T) {
	parse := func(text string) map[string]any {
		var m map[string]any
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			t.Fatal(err)
		}
		return m
	}
	tests := map[string]struct{ kind, want, have, at string }{
		"the same":        {"Role", `{"rules":[{"verbs":["get"]}]}`, `{"rules":[{"verbs":["get"]}]}`, ""},
		"a verb less":     {"Role", `{"rules":[{"verbs":["get","list"]}]}`, `{"rules":[{"verbs":["get"]}]}`, "rules[0].verbs"},
		"a verb more":     {"Role", `{"rules":[{"verbs":["get"]}]}`, `{"rules":[{"verbs":["get","*"]}]}`, "rules[0].verbs"},
		"another verb":    {"Role", `{"rules":[{"verbs":["get"]}]}`, `{"rules":[{"verbs":["list"]}]}`, "rules[0].verbs[0]"},
		"no rules at all": {"Role", `{"rules":[{"verbs":["get"]}]}`, `{}`, "rules"},
		"a default that was added": {"MutatingWebhookConfiguration", `{"webhooks":[{"name":"a"}]}`,
			`{"webhooks":[{"name":"a","timeoutSeconds":10,"clientConfig":{"caBundle":"eA=="}}]}`, ""},
		"numbers of both kinds": {"MutatingWebhookConfiguration", `{"webhooks":[{"timeoutSeconds":10}]}`,
			`{"webhooks":[{"timeoutSeconds":10.0}]}`, ""},
		"an empty text left out": {"Role", `{"rules":[{"apiGroups":[""],"resourceNames":[]}]}`, `{"rules":[{"apiGroups":[""]}]}`, ""},
		"another failure policy": {"ValidatingWebhookConfiguration", `{"webhooks":[{"failurePolicy":"Fail"}]}`,
			`{"webhooks":[{"failurePolicy":"Ignore"}]}`, "webhooks[0].failurePolicy"},
		"other subjects": {"ClusterRoleBinding", `{"subjects":[{"name":"a"}]}`, `{"subjects":[{"name":"b"}]}`,
			"subjects[0].name"},
		"a kind that is not compared": {"Deployment", `{"spec":{"replicas":1}}`, `{"spec":{"replicas":3}}`, ""},
		"something else entirely":     {"ClusterRole", `{"rules":[{"verbs":["get"]}]}`, `{"rules":"x"}`, "rules"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if at := differs(tt.kind, parse(tt.want), parse(tt.have)); at != tt.at {
				t.Errorf("differs at %q, want %q", at, tt.at)
			}
		})
	}
}

// Whatever a Secret holds, there are objects or there is an error.
func FuzzDecodeRelease(f *testing.F) {
	f.Add([]byte(""))
	f.Add([]byte("eA=="))
	f.Add(packed(f, "---\napiVersion: v1\nkind: A\nmetadata: {name: b}\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		objects, err := decodeRelease(&corev1.Secret{Data: map[string][]byte{"release": data}})
		if err == nil {
			for _, o := range objects {
				if o.Kind == "" || o.Name == "" {
					t.Errorf("an object without a name: %+v", o)
				}
			}
			wantedAccess(objects)
		}
	})
}

// The list of units is as long as kubelet's message is.
func TestListBytes(t *testing.T) {
	for units, want := range map[int64]int64{0: 0, 1: 14, 64: 64 * 14, 65: 64*14 + 15, 128000: 64*14 + 4096*15 + 123840*16,
		384000: 64*14 + 4096*15 + 262144*16 + 117696*17} {
		if got := listBytes(units); got != want {
			t.Errorf("%d units: %d bytes, want %d", units, got, want)
		}
	}
}
