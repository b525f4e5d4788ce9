package why

import (
	"cmp"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
)

// eventOf is the message of an event about a pod, "" for none.
func (s *Snapshot) eventOf(reason string, p *v1.Pod) string {
	for i := range s.Events {
		if ev := &s.Events[i]; ev.Reason == reason && isAbout(ev, p) {
			return ev.Message
		}
	}
	return ""
}

// messageOf is what kube-scheduler says of a pod: by its condition, else by its last event.
func (s *Snapshot) messageOf(p *v1.Pod) string {
	if c := scheduled(p); c != nil && c.Message != "" {
		return c.Message
	}
	return s.lastFailure(p)
}

// autoscalerSays is what an event of a cluster autoscaler says of a pod, "" for none.
func (s *Snapshot) autoscalerSays(p *v1.Pod) string {
	for i := range s.Events {
		if ev := &s.Events[i]; isAbout(ev, p) && (ev.Reason == "TriggeredScaleUp" || ev.Reason == "NotTriggerScaleUp") {
			return ev.Reason + ": " + ev.Message
		}
	}
	return ""
}

// lastFailure is the message of the newest event FailedScheduling, "" for none.
func (s *Snapshot) lastFailure(p *v1.Pod) string {
	message, at := "", time.Time{}
	for i := range s.Events {
		ev := &s.Events[i]
		when := cmp.Or(ev.LastTimestamp.Time, ev.EventTime.Time)
		if ev.Reason == "FailedScheduling" && isAbout(ev, p) && !when.Before(at) {
			message, at = ev.Message, when
		}
	}
	return message
}

// failedCreate are the messages of events that say why pods of an owner were not made.
func (s *Snapshot) failedCreate(o *Owner) []string {
	var out []string
	for i := range s.Events {
		e := &s.Events[i]
		if e.Namespace == o.Namespace && e.Reason == "FailedCreate" && o.makes(&e.InvolvedObject) && !slices.Contains(out, e.Message) {
			out = append(out, e.Message)
		}
	}
	return out
}

func isAbout(e *v1.Event, p *v1.Pod) bool {
	o := &e.InvolvedObject
	return e.Namespace == p.Namespace && o.Kind == "Pod" && o.Name == p.Name && (o.UID == "" || o.UID == p.UID)
}
