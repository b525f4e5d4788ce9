package wire

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

func endingPod(uid string, units accel.Units, devices ...accel.DeviceID) Ending {
	return Ending{
		Pod: accel.PodRef{UID: uid, Namespace: "team", Name: "p"}, Resource: "enflame.com/gcu-memory", Units: units, Devices: devices,
	}
}

func TestEndingThereAndBack(t *testing.T) {
	pods := []Ending{endingPod("b", 4), endingPod("a", 16, "GCU-1", "GCU-2")}
	value, err := EncodeEnding(pods)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"v":1,"pods":[{"uid":"a","namespace":"team","name":"p","resource":"enflame.com/gcu-memory","units":16,"devices":["GCU-1",` +
		`"GCU-2"]},` +
		`{"uid":"b","namespace":"team","name":"p","resource":"enflame.com/gcu-memory","units":4}]}`
	if value != want {
		t.Errorf("EncodeEnding = %s, want %s", value, want)
	}
	back, err := DecodeEnding(value)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Ending{pods[1], pods[0]}, back); diff != "" {
		t.Errorf("DecodeEnding (-want +got):\n%s", diff)
	}
	if value, err := EncodeEnding(nil); value != "" || err != nil {
		t.Errorf("no pods: %q, %v", value, err)
	}
	if pods, err := DecodeEnding(""); pods != nil || err != nil {
		t.Errorf("no annotation: %v, %v", pods, err)
	}
	full := make([]Ending, MaxEnding)
	for i := range full {
		full[i] = endingPod(fmt.Sprintf("%036d", i), 1, accel.DeviceID(strings.Repeat("d", 40)))
		full[i].Pod.Namespace, full[i].Pod.Name = strings.Repeat("n", 63), strings.Repeat("p", 253)
	}
	if value, err = EncodeEnding(full); err != nil {
		t.Fatalf("as many as are listed: %v", err)
	}
	if _, err := DecodeEnding(value); err != nil {
		t.Errorf("as many as are listed: %v", err)
	}
}

func TestBadEnding(t *testing.T) {
	for name, tt := range map[string]struct{ value, want string }{
		"not JSON":    {"{", "list of ending pods"},
		"a later one": {`{"v":2,"pods":[]}`, "newer release"},
		"no UID":      {`{"v":1,"pods":[{"namespace":"n","name":"p","resource":"r","units":1}]}`, "its uid is empty"},
		"no units":    {`{"v":1,"pods":[{"uid":"u","namespace":"n","name":"p","resource":"r","units":0}]}`, "0 units"},
		"too many units": {`{"v":1,"pods":[{"uid":"u","namespace":"n","name":"p","resource":"r","units":1099511627777}]}`,
			"units, not from 1"},
		"one device twice": {
			`{"v":1,"pods":[{"uid":"u","namespace":"n","name":"p","resource":"r","units":2,"devices":["d","d"]}]}`, "listed twice",
		},
	} {
		_, err := DecodeEnding(tt.value)
		var syntax *SyntaxError
		if !errors.As(err, &syntax) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want a SyntaxError with %q", name, err, tt.want)
		}
	}
	if _, err := EncodeEnding([]Ending{endingPod("", 1)}); err == nil {
		t.Error("what would not be read is written")
	}
	if _, err := EncodeEnding(make([]Ending, MaxEnding+1)); err == nil {
		t.Error("more than are read are written")
	}
}
