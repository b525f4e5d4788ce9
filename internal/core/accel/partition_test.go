package accel

import "testing"

func TestPartitionIndexes(t *testing.T) {
	for _, tt := range []struct {
		device, partition int
		text              string
	}{{0, 0, "0:0"}, {0, 1, "0:1"}, {7, 6, "7:6"}, {1023, MaxPartitions - 1, "1023:63"}} {
		index := PartitionIndex(tt.device, tt.partition)
		device, partition, ok := SplitIndex(index)
		if !ok || device != tt.device || partition != tt.partition {
			t.Errorf("SplitIndex(PartitionIndex(%d, %d)) = %d, %d, %t", tt.device, tt.partition, device, partition, ok)
		}
		if got := IndexText(index); got != tt.text {
			t.Errorf("IndexText of partition %d of device %d = %q, want %q", tt.partition, tt.device, got, tt.text)
		}
		if got, ok := ParsePartition(tt.text); !ok || got != index {
			t.Errorf("ParsePartition(%q) = %d, %t, want %d", tt.text, got, ok, index)
		}
	}
	if PartitionIndex(0, MaxPartitions-1) >= PartitionIndex(1, 0) || PartitionIndex(0, 0) <= 1023 {
		t.Error("indexes of partitions are not after those of devices, in the order of their devices")
	}
	if device, _, ok := SplitIndex(12); ok || device != 12 || IndexText(12) != "12" {
		t.Errorf("device 12 is taken for a partition, written %q", IndexText(12))
	}
	for _, text := range []string{"", "0", ":", "0:", ":1", "0:1:2", "-1:0", "0:-1", "a:b", "0:64", "65536:0", "00:1", "0:+1", " 0:1"} {
		if index, ok := ParsePartition(text); ok {
			t.Errorf("ParsePartition(%q) = %d", text, index)
		}
	}
}

func TestPartitionResources(t *testing.T) {
	v := VendorNamed("nvidia")
	for profile, want := range map[string]Resource{
		"1g.5gb": "nvidia.com/mig-1g.5gb", "1g.10gb+me": "nvidia.com/mig-1g.10gb.me", "1g.24gb-me": "nvidia.com/mig-1g.24gb-me",
		"1g.24gb+me.all": "nvidia.com/mig-1g.24gb.me.all",
	} {
		if got := v.PartitionResource(profile); got != want {
			t.Errorf("resource of profile %s is %s, want %s", profile, got, want)
		}
		if got, ok := v.ProfileOf(want); !ok || got != ProfileName(profile) {
			t.Errorf("profile of resource %s is %q, %t", want, got, ok)
		}
	}
	for _, r := range []Resource{"nvidia.com/gpu", "nvidia.com/mig-", "iluvatar.com/mig-1g.5gb"} {
		if got, ok := v.ProfileOf(r); ok {
			t.Errorf("resource %s has profile %q", r, got)
		}
	}
	if _, ok := VendorNamed("iluvatar").ProfileOf("x"); ok {
		t.Error("a vendor without partitions has a profile")
	}
	// GCUShare's own resource of all profiles is that of no profile.
	if name, ok := VendorNamed("enflame").ProfileOf("enflame.com/drs-gcu"); ok {
		t.Errorf("enflame.com/drs-gcu has profile %q", name)
	}
}
