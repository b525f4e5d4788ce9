package accel

import (
	"strconv"
	"strings"
)

// A device may be cut into partitions that are devices of their own, such as the MIG
// devices of a GPU. They have no number of their own among the node's devices but one
// on the device that they are cut from; people write both, "0:1".

const (
	// firstPartition is above the numbers that devices have.
	firstPartition = 1 << 16
	// MaxPartitions bounds the partitions of one device; theirs are numbered from 0.
	MaxPartitions = 64
)

// PartitionIndex returns the Index of a partition by its number, below MaxPartitions,
// on the device of that Index. Indexes of partitions come after those of all devices,
// in the order of the devices that they are cut from.
func PartitionIndex(device, partition int) int {
	return firstPartition + device*MaxPartitions + partition
}

// SplitIndex returns the two numbers of a partition's Index. For a device that is no
// partition, ok is false and device is its Index.
func SplitIndex(index int) (device, partition int, ok bool) {
	if index < firstPartition {
		return index, 0, false
	}
	index -= firstPartition
	return index / MaxPartitions, index % MaxPartitions, true
}

// IndexText is an Index as people write it: "0", or "0:1" for a partition.
func IndexText(index int) string {
	device, partition, ok := SplitIndex(index)
	if !ok {
		return strconv.Itoa(index)
	}
	return strconv.Itoa(device) + ":" + strconv.Itoa(partition)
}

// ParsePartition reads the text that IndexText writes of a partition.
func ParsePartition(text string) (index int, ok bool) {
	first, second, ok := strings.Cut(text, ":")
	device, err1 := strconv.Atoi(first)
	partition, err2 := strconv.Atoi(second)
	if !ok || err1 != nil || err2 != nil || device < 0 || device >= firstPartition || partition < 0 || partition >= MaxPartitions {
		return 0, false
	}
	index = PartitionIndex(device, partition)
	return index, IndexText(index) == text
}

// ProfileName is a profile as names of resources and labels have it, which allow no
// "+": "1g.10gb.me" for "1g.10gb+me".
func ProfileName(profile string) string { return strings.ReplaceAll(profile, "+", ".") }
