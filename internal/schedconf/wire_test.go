package schedconf

import (
	"bytes"
	"os"
	"testing"
)

func TestWireAndUnwireKubeadm(t *testing.T) {
	manifest, err := os.ReadFile("testdata/manifests/kubeadm-1.37.yaml")
	if err != nil {
		t.Fatal(err)
	}
	in := Input{Manifest: manifest, ManifestPath: "kube-scheduler.yaml"}
	e := Extender{URL: "http://127.0.0.1:32766/gcushare-scheduler", Resources: []string{"enflame.com/gcu-memory"}}
	wired, err := Wire(in, e)
	if err != nil {
		t.Fatal(err)
	}
	in.Manifest = wired.Manifest
	again, err := Wire(in, e)
	if err != nil || !bytes.Equal(again.Manifest, wired.Manifest) {
		t.Errorf("a second run changes the manifest: %v", err)
	}
	back, remove, err := Unwire(in, manifest)
	if err != nil || !bytes.Equal(back.Manifest, manifest) || len(remove) != 1 {
		t.Errorf("not the original: %v, to remove %v", err, remove)
	}
}
