package doctor

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/yaml"
)

// Bounds of what is read of a release, in bytes: a Secret holds 1 MiB, and a
// manifest compresses about tenfold.
const (
	maxRelease  = 32 << 20
	maxObjects  = 2000
	maxDepth    = 64
	maxManifest = 16 << 20
)

// decodeRelease reads the manifest in a Secret in which helm keeps a release:
// base64 of gzip of JSON.
func decodeRelease(secret *corev1.Secret) ([]Object, error) {
	data := secret.Data["release"]
	if len(data) == 0 {
		return nil, errors.New("it has no entry release")
	}
	packed := make([]byte, base64.StdEncoding.DecodedLen(len(data)))
	n, err := base64.StdEncoding.Decode(packed, data)
	if err != nil {
		return nil, fmt.Errorf("entry release: %w", err)
	}
	packed = packed[:n]
	// Releases of helm's first days are not compressed.
	if bytes.HasPrefix(packed, []byte{0x1f, 0x8b}) {
		r, err := gzip.NewReader(bytes.NewReader(packed))
		if err != nil {
			return nil, fmt.Errorf("entry release: %w", err)
		}
		if packed, err = io.ReadAll(io.LimitReader(r, maxRelease+1)); err != nil {
			return nil, fmt.Errorf("entry release: %w", err)
		}
		if len(packed) > maxRelease {
			return nil, fmt.Errorf("entry release: more than %d bytes", maxRelease)
		}
	}
	var release struct {
		Manifest string `json:"manifest"`
	}
	if err := json.Unmarshal(packed, &release); err != nil {
		return nil, fmt.Errorf("entry release: %w", err)
	}
	return parseManifest([]byte(release.Manifest))
}

// parseManifest reads the objects of a manifest in YAML.
func parseManifest(text []byte) ([]Object, error) {
	if len(text) > maxManifest {
		return nil, fmt.Errorf("the manifest has %d bytes, more than %d", len(text), maxManifest)
	}
	var out []Object
	for _, document := range strings.Split("\n"+string(text), "\n---") {
		// The rest of the line may be a comment.
		_, document, _ = strings.Cut(document, "\n")
		var content map[string]any
		if err := yaml.Unmarshal([]byte(document), &content); err != nil {
			return nil, fmt.Errorf("document %d of the manifest: %w", len(out)+1, err)
		}
		if len(content) == 0 {
			continue
		}
		meta, _ := content["metadata"].(map[string]any)
		o := Object{Content: content}
		o.APIVersion, _ = content["apiVersion"].(string)
		o.Kind, _ = content["kind"].(string)
		o.Name, _ = meta["name"].(string)
		o.Namespace, _ = meta["namespace"].(string)
		if o.APIVersion == "" || o.Kind == "" || o.Name == "" {
			return nil, fmt.Errorf("document %d of the manifest: no apiVersion, kind or name", len(out)+1)
		}
		if out = append(out, o); len(out) > maxObjects {
			return nil, fmt.Errorf("more than %d objects in the manifest", maxObjects)
		}
	}
	return out, nil
}

// compared are the kinds of which what was installed is compared with what is
// there: rules, which nobody but an upgrade changes. Others have fields that
// administrators and controllers change rightly.
var compared = map[string][]string{
	"ClusterRole":                      {"rules"},
	"Role":                             {"rules"},
	"ClusterRoleBinding":               {"roleRef", "subjects"},
	"RoleBinding":                      {"roleRef", "subjects"},
	"ValidatingAdmissionPolicy":        {"spec"},
	"ValidatingAdmissionPolicyBinding": {"spec"},
	"MutatingWebhookConfiguration":     {"webhooks"},
	"ValidatingWebhookConfiguration":   {"webhooks"},
}

// differs says where have lacks what want says, "" nowhere. What have says
// besides is a default or somebody's addition.
func differs(kind string, want, have map[string]any) string {
	for _, field := range compared[kind] {
		if at := subset(want[field], have[field], field, maxDepth); at != "" {
			return at
		}
	}
	return ""
}

// subset returns the path at which want is not in have.
func subset(want, have any, path string, depth int) string {
	if depth == 0 || isZero(want) && isZero(have) {
		return ""
	}
	switch w := want.(type) {
	case map[string]any:
		h, ok := have.(map[string]any)
		if !ok {
			return path
		}
		for _, key := range slices.Sorted(maps.Keys(w)) {
			if at := subset(w[key], h[key], path+"."+key, depth-1); at != "" {
				return at
			}
		}
		return ""
	case []any:
		h, ok := have.([]any)
		if !ok || len(h) != len(w) {
			return path
		}
		for i := range w {
			if at := subset(w[i], h[i], fmt.Sprintf("%s[%d]", path, i), depth-1); at != "" {
				return at
			}
		}
		return ""
	}
	if scalar(want) == scalar(have) {
		return ""
	}
	return path
}

// isZero reports whether a value is one that the API server may leave out.
func isZero(v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case map[string]any:
		return len(v) == 0
	case []any:
		return len(v) == 0
	case string:
		return v == ""
	case bool:
		return !v
	case float64:
		return v == 0
	case int64:
		return v == 0
	}
	return false
}

// scalar writes a value so that equal ones are equal: numbers may come as int64
// or float64.
func scalar(v any) string {
	if f, ok := v.(float64); ok && f == math.Trunc(f) && math.Abs(f) < 1<<53 {
		return fmt.Sprint(int64(f))
	}
	return strings.TrimRight(fmt.Sprint(v), "\n")
}

// amount is the whole number of a resource in a list, 0 without one.
func amount(from corev1.ResourceList, name string) int64 {
	q, ok := from[corev1.ResourceName(name)]
	if !ok || q.Cmp(*resource.NewQuantity(0, resource.DecimalSI)) < 0 {
		return 0
	}
	return q.Value()
}
