package live

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/wire"
)

const emptyRecord = `{"apiVersion":"divvy.dev/v1","kind":"DecisionRecord","started":"2026-01-02T03:04:05Z","held":[],"entries":[` +
	`{"decision":{"pod":{"namespace":"a","name":"b","uid":"u"},"at":"2026-01-02T03:04:05Z",` +
	`"request":{"resource":"enflame.com/gcu-memory","units":4,"devices":1},"offered":1,"fits":0}}]}`

func exported(t *testing.T) string {
	t.Helper()
	l := &Cluster{nodes: []v1.Node{slimNode(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n",
		Annotations: map[string]string{wire.InventoryAnnotation: "{}", "other": "secret"}}})}}
	var b bytes.Buffer
	if err := l.WriteExport(&b, []byte(emptyRecord)); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestExportIsReadBack(t *testing.T) {
	text := exported(t)
	l, r, err := ReadExport(strings.NewReader(text), "file")
	if err != nil || len(l.nodes) != 1 || l.nodes[0].Name != "n" || len(r.Entries) != 1 || r.Entries[0].Decision.Request.Units != 4 {
		t.Errorf("%v, %+v, %+v", err, l, r)
	}
	if strings.Contains(text, "secret") {
		t.Error("the export has annotations that no replay needs")
	}
}

// TestBrokenExports: each mistake is named, with the file.
func TestBrokenExports(t *testing.T) {
	good := exported(t)
	for name, tt := range map[string]struct{ text, want string }{
		"empty":     {"", "the file ends in the middle, after 0 bytes"},
		"truncated": {good[:len(good)/2], "the file ends in the middle"},
		"no JSON":   {"POLICY PLACED", "file:1: invalid character"},
		"a list":    {"[]", "it is no export of decisions"},
		"a dump":    {`{"apiVersion":"v1","kind":"List","items":[]}`, `kind is "List"; it must be a DecisionExport`},
		"a newer version": {strings.Replace(good, `"divvy.dev/v1"`, `"divvy.dev/v2"`, 1),
			`apiVersion is "divvy.dev/v2", and this release reads divvy.dev/v1`},
		"a newer record": {strings.Replace(good, `"divvy.dev/v1","kind":"DecisionRecord"`, `"divvy.dev/v3","kind":"DecisionRecord"`, 1),
			`record: its apiVersion is "divvy.dev/v3"`},
		"another record":     {strings.Replace(good, "DecisionRecord", "Events", 1), `record: it is of kind "Events"`},
		"no record":          {`{"apiVersion":"divvy.dev/v1","kind":"DecisionExport"}`, "record: "},
		"absurd units":       {strings.Replace(good, `"units":4`, `"units":-4`, 1), "entry 0: its request of -4 units"},
		"absurd devices":     {strings.Replace(good, `"devices":1`, `"devices":0`, 1), "entry 0: its request of 4 units"},
		"a pod without ID":   {strings.Replace(good, `"uid":"u"`, `"uid":""`, 1), "entry 0: its pod has no namespace, no name or no UID"},
		"a pod without name": {strings.Replace(good, `"name":"b"`, `"name":""`, 1), "entry 0: its pod has no namespace, no name or no UID"},
		"an empty entry":     {strings.Replace(good, `"decision":`, `"other":`, 1), "entry 0: it must have exactly one"},
		"no nodes":           {strings.Replace(good, `"kind":"Node"`, `"kind":"Pod"`, 1), "cluster: it has no nodes"},
		"no cluster":         {strings.Replace(good, `"cluster":`, `"other":`, 1), "file: cluster"},
	} {
		if _, _, err := ReadExport(strings.NewReader(tt.text), "file"); err == nil || !strings.Contains(err.Error(), tt.want) ||
			!strings.Contains(err.Error(), "file") {
			t.Errorf("%s: %v, want %q", name, err, tt.want)
		}
	}
}

// TestEndlessExports are not read to their end.
func TestEndlessExports(t *testing.T) {
	good := exported(t)
	most := int64(len(good))
	if _, _, err := readExport(strings.NewReader(good), "file", most); err != nil {
		t.Error(err)
	}
	endless := io.MultiReader(strings.NewReader(good+" "), iotest.ErrReader(errors.New("it was read on")))
	if _, _, err := readExport(endless, "file", most); err == nil || !strings.Contains(err.Error(), "file: it is larger than") {
		t.Errorf("%v", err)
	}
}
