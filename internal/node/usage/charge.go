package usage

import "github.com/divvy-gpu/divvy/internal/core/wire"

// Charge replaces what the processes of containers use of a device by what the driver has charged
// to the containers, in bytes: it is exact, and counts processes that cannot be attributed.
// Containers that are not in charged, and a device with a Problem, stay as they are.
func Charge(d *wire.DeviceUsage, charged map[ContainerName]uint64) {
	if d.Problem != "" || len(charged) == 0 {
		return
	}
	for i := range d.Containers {
		c := &d.Containers[i]
		if bytes, ok := charged[ContainerName{Namespace: c.Namespace, Pod: c.Pod, Name: c.Container}]; ok {
			c.UsedBytes = &bytes
		}
	}
	d.UnknownBytes = unknown(d)
}

// unknown returns what is in use of a device and in none of its other sums. The library sums up at
// another moment than it lists processes, and memory that processes share counts for each of
// them, so the known sums may exceed what is in use.
func unknown(d *wire.DeviceUsage) uint64 {
	known := d.SystemBytes + d.ForeignBytes
	for i := range d.Containers {
		if used := d.Containers[i].UsedBytes; used != nil {
			known += *used
		}
	}
	return d.UsedBytes - min(d.UsedBytes, known)
}
