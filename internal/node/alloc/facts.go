package alloc

import (
	"maps"
	"time"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// forgetInitsAfter is how long the record of a served init container is kept
// for a pod that the API server does not show.
const forgetInitsAfter = time.Minute

// Facts are what is certain of the pods' memory.
type Facts struct {
	Pods []Fact
	// Mixed are pods that hold units of devices that do not serve them together.
	Mixed []Mixed
	// Foreign are ids that containers hold and that belong to no device.
	Foreign []string
}

// Fact is a pod and the devices that it holds units of, in the order of their
// indexes, the same part of each.
type Fact struct {
	// Pod is the position in the pods that Facts was asked for.
	Pod     int
	Devices []accel.Share
}

// Mixed is a pod that holds units of devices that do not serve it together.
type Mixed struct {
	Pod        PodKey
	Devices    []accel.DeviceID
	Containers int
}

func (a *unitAccount) facts(shown, pods []Pod, now time.Time) Facts {
	a.forgetInits(pods, now)
	if a.holdings == nil {
		return Facts{}
	}
	resource := a.pool.config.Resource
	out := Facts{Foreign: a.holdings.foreign}
	for i := range shown {
		pod := &shown[i]
		request := pod.request(resource)
		if pod.Ended || len(request.Containers) == 0 {
			continue
		}
		listed := a.holdings.pods[pod.Key()]
		devices := union(a.inits[pod.UID].devices, listed.devices)
		if planned, ok := pod.planned(resource); ok && len(planned) > 1 {
			request.Devices = len(planned)
			// What containers reuse of an init container's units may be of some of
			// the devices alone.
			if len(devices) > 0 && within(planned, devices) {
				devices = planned
			}
		}
		if n := len(devices); listed.odd || n > 1 && (n != request.Devices || request.Peak()%accel.Units(n) != 0) {
			out.Mixed = append(out.Mixed, Mixed{Pod: pod.Key(), Devices: devices, Containers: len(listed.containers)})
			continue
		}
		f := Fact{Pod: i}
		for _, d := range a.pool.byIndex(devices) {
			if share, known := a.pool.share(d); known {
				f.Devices = append(f.Devices, share)
			}
		}
		if len(f.Devices) > 0 && len(f.Devices) == len(devices) {
			out.Pods = append(out.Pods, f)
		}
	}
	return out
}

// forgetInits drops records of pods that are gone.
func (a *unitAccount) forgetInits(pods []Pod, now time.Time) {
	alive := map[string]bool{}
	for i := range pods {
		alive[pods[i].UID] = !pods[i].Ended
	}
	maps.DeleteFunc(a.inits, func(uid string, s initServed) bool {
		active, listed := alive[uid]
		return listed && !active || !listed && now.Sub(s.at) > forgetInitsAfter
	})
}
