package wire

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

func overusing(uid, container string) Overuse {
	return Overuse{
		Pod: accel.PodRef{UID: uid, Namespace: "team", Name: "p"}, Container: container, Resource: "enflame.com/gcu-memory",
		Device: "GCU-1", AllocatedBytes: 1 << 30, UsedBytes: 3 << 30, Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}
}

func TestOveruseThereAndBack(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 5, 0, 700, time.UTC)
	value, err := EncodeOveruse(OveruseList{Time: at, Pods: []Overuse{overusing("b", ""), overusing("a", "main")}})
	if err != nil {
		t.Fatal(err)
	}
	want := `{"v":1,"time":"2026-01-02T03:05:00Z","pods":[{"uid":"a","namespace":"team","name":"p","container":"main",` +
		`"resource":"enflame.com/gcu-memory","device":"GCU-1","allocatedBytes":1073741824,"usedBytes":3221225472,` +
		`"since":"2026-01-02T03:04:05Z"},{"uid":"b","namespace":"team","name":"p","resource":"enflame.com/gcu-memory","device":"GCU-1",` +
		`"allocatedBytes":1073741824,"usedBytes":3221225472,"since":"2026-01-02T03:04:05Z"}]}`
	if value != want {
		t.Errorf("EncodeOveruse = %s, want %s", value, want)
	}
	back, err := DecodeOveruse(value)
	if err != nil {
		t.Fatal(err)
	}
	list := OveruseList{Time: at.Truncate(time.Second), Pods: []Overuse{overusing("a", "main"), overusing("b", "")}}
	if diff := cmp.Diff(list, back); diff != "" {
		t.Errorf("DecodeOveruse (-want +got):\n%s", diff)
	}
	if value, err := EncodeOveruse(OveruseList{Time: at}); value != "" || err != nil {
		t.Errorf("no pods: %q, %v", value, err)
	}
	if list, err := DecodeOveruse(""); list.Pods != nil || err != nil {
		t.Errorf("no annotation: %v, %v", list, err)
	}
	full := OveruseList{Time: at}
	for i := range MaxOveruse {
		one := overusing(fmt.Sprintf("%036d", i), strings.Repeat("c", 63))
		one.Device = accel.DeviceID(strings.Repeat("d", 48))
		one.Pod.Namespace, one.Pod.Name = strings.Repeat("n", 63), strings.Repeat("p", 253)
		full.Pods = append(full.Pods, one)
	}
	if value, err = EncodeOveruse(full); err != nil {
		t.Fatalf("as many as are listed: %v", err)
	}
	if _, err := DecodeOveruse(value); err != nil {
		t.Errorf("as many as are listed: %v", err)
	}
}

func TestBadOveruse(t *testing.T) {
	for name, tt := range map[string]struct{ value, want string }{
		"not JSON":      {"{", "list of memory overuse"},
		"other version": {`{"v":2,"pods":[]}`, "version"},
		"no UID": {`{"v":1,"pods":[{"namespace":"n","name":"p","resource":"r","device":"d","allocatedBytes":1,"usedBytes":2}]}`,
			"its uid is empty"},
		"no device": {`{"v":1,"pods":[{"uid":"u","namespace":"n","name":"p","resource":"r","allocatedBytes":1,"usedBytes":2}]}`,
			"its device is empty"},
		"within the allocation": {
			`{"v":1,"pods":[{"uid":"u","namespace":"n","name":"p","resource":"r","device":"d","allocatedBytes":2,"usedBytes":2}]}`,
			"which is no overuse"},
		"too many": {`{"v":1,"pods":[` + strings.Repeat("{},", MaxOveruse) + "{}]}", "at most 128"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := DecodeOveruse(tt.value)
			if se := (*SyntaxError)(nil); !errors.As(err, &se) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want a *SyntaxError with %q", err, tt.want)
			}
		})
	}
}
