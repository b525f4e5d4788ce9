package audit

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Injection is how containers are given their card (the chart's value
// node.injection), which decides what they see in /dev.
type Injection string

// The ways of injection. With Environment the vendor's container runtime would
// add the device nodes; the lab has none.
const (
	DeviceNodes Injection = "deviceNodes"
	CDI         Injection = "cdi"
	Environment Injection = "environment"
)

// comparison collects differences.
type comparison struct {
	Books
	injection Injection
	found     []string
}

func (c *comparison) differ(format string, args ...any) {
	c.found = append(c.found, fmt.Sprintf(format, args...))
}

// Compare returns where the books differ, one line each; none when all is well.
func Compare(b Books, injection Injection) []string {
	c := &comparison{Books: b, injection: injection}
	cards := map[string]Card{}
	for _, card := range b.Cards {
		cards[card.UUID] = card
	}
	given := map[string][]string{}
	for _, g := range b.Given {
		given[g.Namespace+"/"+g.Pod+"/"+g.Container] = g.Units
	}
	used := map[int]int64{}
	for _, pod := range b.Pods {
		on := c.pod(pod, given, cards)
		for _, card := range on {
			used[card.Index] += pod.Units / int64(len(on))
		}
	}
	for name := range given {
		c.differ("kubelet gave units to %s, which is no container of a living pod", name)
	}
	for _, text := range Overuse(b.Given, b.Units, b.Cards) {
		c.differ("%s", text)
	}
	c.inspect(used)
	slices.Sort(c.found)
	return c.found
}

// pod compares what is said of one pod, removes its containers from given, and
// returns its cards in the order of their indexes, none when something is wrong
// with them. A pod is on one card, or on as many as it asks for, with equal parts.
func (c *comparison) pod(pod Pod, given map[string][]string, cards map[string]Card) []Card {
	name := pod.Namespace + "/" + pod.Name
	parts := map[string]int{} // units that containers hold, by uuid
	for _, container := range pod.Containers {
		key := name + "/" + container.Name
		ids, held := given[key]
		delete(given, key)
		switch {
		case held != container.Listed:
			c.differ("container %s: kubelet holds units for it is %t, expected %t", key, held, container.Listed)
			continue
		case !held:
			continue
		case int64(len(ids)) != container.Units:
			c.differ("container %s asks for %d units, kubelet gave %d", key, container.Units, len(ids))
		}
		for _, id := range ids {
			parts[c.Units.Card(id)]++
		}
	}
	var on []Card
	for uuid := range parts {
		card, known := cards[uuid]
		if !known {
			c.differ("pod %s holds units of card %q, which the node does not publish", name, uuid)
			return nil
		}
		on = append(on, card)
	}
	slices.SortFunc(on, func(a, b Card) int { return a.Index - b.Index })
	want := 1
	if text, asks := pod.Annotations["divvy.dev/devices"]; asks {
		var err error
		if want, err = strconv.Atoi(text); err != nil {
			c.differ("pod %s asks for %q cards", name, text)
		}
	}
	if len(on) != want {
		c.differ("pod %s holds units of the cards %v, it asks for %d", name, indexes(on), want)
		return nil
	}
	for _, card := range on {
		if parts[card.UUID] != parts[on[0].UUID] {
			c.differ("pod %s holds %d units of card %d and %d of card %d", name, parts[card.UUID], card.Index, parts[on[0].UUID],
				on[0].Index)
		}
	}
	for _, container := range pod.Containers {
		c.sight(name+"/"+container.Name, container, on)
	}
	c.annotations(name, pod, on)
	c.listed(name, pod, on)
	return on
}

// indexes are those of the cards, joined by commas.
func indexes(cards []Card) string {
	var out []string
	for _, card := range cards {
		out = append(out, strconv.Itoa(card.Index))
	}
	return strings.Join(out, ",")
}

func (c *comparison) sight(name string, container Container, cards []Card) {
	if !container.Started {
		c.differ("container %s has not started", name)
		return
	}
	if want := indexes(cards); container.Sight.Visible != want {
		c.differ("container %s has the environment %s=%s, kubelet gave units of card %s", name, visibleDevices, container.Sight.Visible,
			want)
	}
	var want []string
	if c.injection != Environment {
		for _, card := range cards {
			want = append(want, "gcu"+strconv.Itoa(card.Index))
		}
	}
	if !container.Sight.Ended && !slices.Equal(container.Sight.Nodes, want) {
		c.differ("container %s sees %v in /dev, kubelet gave units of card %s", name, container.Sight.Nodes, indexes(cards))
	}
}

// annotations checks the five of the guide, and the signed one.
func (c *comparison) annotations(name string, pod Pod, cards []Card) {
	var memory int64
	for _, card := range cards {
		memory += card.Units
	}
	for key, want := range map[string]string{
		"id":             indexes(cards),
		"memory":         strconv.FormatInt(memory, 10),
		"memory-request": strconv.FormatInt(pod.Units, 10),
		"assigned":       "true",
	} {
		if got := pod.Annotations["enflame.com/gcu-device-"+key]; got != want {
			c.differ("pod %s: annotation enflame.com/gcu-device-%s is %q, want %q", name, key, got, want)
		}
	}
	if at := pod.Annotations["enflame.com/gcu-device-assign-time"]; len(at) != 19 || strings.Trim(at, "0123456789") != "" {
		c.differ("pod %s: annotation enflame.com/gcu-device-assign-time is %q, want nanoseconds since 1970", name, at)
	}
	var grant struct {
		Device    string `json:"device"`
		Units     int64  `json:"units"`
		Confirmed bool   `json:"confirmed"`
		More      []struct {
			Device string `json:"device"`
		} `json:"more"`
	}
	value := pod.Annotations["divvy.dev/grant"]
	if err := json.Unmarshal([]byte(value), &grant); err != nil {
		c.differ("pod %s: its grant %q cannot be read: %v", name, value, err)
		return
	}
	devices, want := []string{grant.Device}, []string{}
	for _, more := range grant.More {
		devices = append(devices, more.Device)
	}
	for _, card := range cards {
		want = append(want, card.UUID)
	}
	if !slices.Equal(devices, want) || grant.Units != pod.Units || !grant.Confirmed {
		c.differ("pod %s: its grant is %+v, want %d units of %v, confirmed", name, grant, pod.Units, want)
	}
}

// listed checks that inspect shows the pod once on each of its cards, and nowhere
// else.
func (c *comparison) listed(name string, pod Pod, cards []Card) {
	var on []string
	for _, device := range c.Inspect.Devices {
		for _, occupant := range device.Pods {
			if occupant.UID == pod.UID {
				on = append(on, fmt.Sprintf("card %d with %d units", device.ID, occupant.Used))
			}
		}
	}
	var want []string
	for _, card := range cards {
		want = append(want, fmt.Sprintf("card %d with %d units", card.Index, pod.Units/int64(len(cards))))
	}
	if !slices.Equal(on, want) {
		c.differ("pod %s: inspect shows it on %v, want %v", name, on, want)
	}
}

// inspect checks the sums of the extender's report, and that nobody else is in
// it. used is by index of the card.
func (c *comparison) inspect(used map[int]int64) {
	living := map[string]bool{}
	for _, pod := range c.Pods {
		living[pod.UID] = true
	}
	var sum int64
	for _, device := range c.Inspect.Devices {
		sum += device.Used
		if device.Used != used[device.ID] {
			c.differ("inspect says that %d units of card %d are used, the pods on it have %d", device.Used, device.ID, used[device.ID])
		}
		if device.Used > device.Total || device.Available != max(device.Total-device.Used-device.Withheld, 0) {
			c.differ("inspect says that card %d has %d units, %d used, %d withheld and %d free", device.ID, device.Total, device.Used,
				device.Withheld, device.Available)
		}
		for _, occupant := range device.Pods {
			if !living[occupant.UID] {
				c.differ("inspect shows pod %s/%s on card %d, which is not living", occupant.Namespace, occupant.Name, device.ID)
			}
		}
	}
	for _, occupant := range c.Inspect.Unplaced {
		c.differ("inspect shows pod %s/%s on no card", occupant.Namespace, occupant.Name)
	}
	if c.Inspect.Used != sum {
		c.differ("inspect says that %d units of the node are used, and %d of its cards together", c.Inspect.Used, sum)
	}
}

// Overuse returns where more is given out than there is: units that two
// containers hold, and cards of which more units are held than they have.
func Overuse(given []Given, units Units, cards []Card) []string {
	var found []string
	owners := map[string]string{}
	held := map[string]int64{}
	for _, g := range given {
		name := g.Namespace + "/" + g.Pod + "/" + g.Container
		for _, id := range g.Units {
			if other, taken := owners[id]; taken {
				found = append(found, fmt.Sprintf("kubelet gave unit %s to %s and to %s", id, other, name))
			}
			owners[id] = name
			held[units.Card(id)]++
		}
	}
	for _, card := range cards {
		if held[card.UUID] > card.Units {
			found = append(found, fmt.Sprintf("kubelet gave %d units of card %d, which has %d", held[card.UUID], card.Index, card.Units))
		}
	}
	return found
}

// maxListed bounds how many differences one error lists.
const maxListed = 20

func differences(found []string) error {
	if len(found) == 0 {
		return nil
	}
	text := found
	if len(text) > maxListed {
		text = append(slices.Clone(found[:maxListed]), fmt.Sprintf("and %d more", len(found)-maxListed))
	}
	return errors.New("the books differ:\n  " + strings.Join(text, "\n  "))
}
