package audit

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// vendors are how the devices of each appear in containers: in a variable, by number or by uuid, and
// in /dev.
var vendors = map[string]struct {
	variable, prefix string
	byNumber         bool
}{
	"enflame":  {visibleDevices, "gcu", true},
	"nvidia":   {"NVIDIA_VISIBLE_DEVICES", "nvidia", false},
	"iluvatar": {"IX_VISIBLE_DEVICES", "iluvatar", false},
}

// unitBytes is the size of a unit of memory.
const unitBytes = 1 << 30

// numbered matches the nodes of single devices in /dev.
var numbered = regexp.MustCompile(`^(gcu|nvidia|iluvatar)\d+$`)

// claimComparison collects what is wrong in a sample.
type claimComparison struct {
	Sample

	api                map[string]Claim // by namespace/name
	daemon, checkpoint map[string]Claim // by UID
	wrong, absent      []string
}

// CompareClaims returns where the sources of a sample contradict each other or where more is
// allocated than there is, and what kubelet does not list: after its restart, that may last.
func CompareClaims(s Sample) (wrong, absent []string) {
	c := &claimComparison{Sample: s, api: byName(s.API), daemon: byUID(s.Daemon), checkpoint: byUID(s.Checkpoint)}
	for i := range s.Users {
		c.user(&s.Users[i])
	}
	c.wrong = append(c.wrong, beyond(s.Chips, "the API server's claims", holdsOf(s.Chips, s.API))...)
	node := holdsOf(s.Chips, s.Daemon)
	for _, name := range slices.Sorted(maps.Keys(s.Kubelet)) {
		node = append(node, s.unitHolds(name)...)
	}
	c.wrong = append(c.wrong, beyond(s.Chips, "the node", node)...)
	slices.Sort(c.wrong)
	return c.wrong, c.absent
}

func byName(claims []Claim) map[string]Claim {
	out := map[string]Claim{}
	for _, c := range claims {
		out[c.Name] = c
	}
	return out
}

// byUID merges what drivers have of a claim. A name may be that of a claim that was deleted.
func byUID(claims []Claim) map[string]Claim {
	out := map[string]Claim{}
	for _, c := range claims {
		if before, known := out[c.UID]; known {
			c.Has, c.Prepared = slices.Concat(before.Has, c.Has), before.Prepared && c.Prepared
		}
		out[c.UID] = c
	}
	return out
}

// user compares what is said of a container.
func (c *claimComparison) user(u *User) {
	differ := func(format string, args ...any) {
		c.wrong = append(c.wrong, fmt.Sprintf("container %s: %s (%s)", u.Name, fmt.Sprintf(format, args...), c.facts(u)))
	}
	var want []Chip
	held, listed := c.Kubelet[u.Name]
	if c.Kubelet != nil && !listed {
		c.absent = append(c.absent, fmt.Sprintf("container %s: kubelet does not list it (%s)", u.Name, c.facts(u)))
	}
	for _, use := range u.Uses {
		claim, allocated := c.api[use.Claim]
		if !allocated {
			differ("its claim %s has no allocation", use.Claim)
			return
		}
		for _, has := range claim.Has {
			if request, _, _ := strings.Cut(has.Request, "/"); use.Request == "" || request == use.Request {
				want = append(want, chipsOf(c.Chips, has.Device)...)
			}
		}
		c.claim(&claim, differ)
		if listed && texts(held.Claims[use.Claim], false) != texts(claim.Has, false) {
			differ("kubelet lists %s of claim %s", texts(held.Claims[use.Claim], false), use.Claim)
		}
	}
	for _, resource := range slices.Sorted(maps.Keys(u.Asks)) {
		ids := held.Units[resource]
		if listed && int64(len(ids)) != u.Asks[resource] {
			differ("it requests %d of %s, kubelet lists %d", u.Asks[resource], resource, len(ids))
		}
		for _, id := range ids {
			chip, known := c.chipOf(resource, id)
			if !known {
				differ("kubelet lists %s of %s, which is of no device", id, resource)
			}
			want = append(want, chip)
		}
	}
	if !listed && len(u.Asks) > 0 {
		return // which devices it has is known from kubelet alone
	}
	for _, vendor := range slices.Sorted(maps.Keys(vendors)) {
		how := vendors[vendor]
		var names, nodes []string
		for _, chip := range want {
			if chip.Vendor != vendor {
				continue
			}
			name := chip.UUID
			if how.byNumber {
				name = strconv.Itoa(chip.Number)
			}
			names, nodes = append(names, name), append(nodes, how.prefix+strconv.Itoa(chip.Number))
		}
		visible := strings.FieldsFunc(u.Sight.Env[how.variable], func(r rune) bool { return r == ',' })
		if got, want := joined(visible), joined(distinct(names)); got != want {
			differ("its %s is %q, its allocations are %q", how.variable, got, want)
		}
		var seen []string
		for _, node := range u.Sight.Nodes {
			if numbered.MatchString(node) && strings.HasPrefix(node, how.prefix) {
				seen = append(seen, node)
			}
		}
		if got, want := joined(seen), joined(distinct(nodes)); got != want {
			differ("it has %q in /dev, its allocations are %q", got, want)
		}
	}
}

// claim compares the records of a claim that a running container uses.
func (c *claimComparison) claim(claim *Claim, differ func(string, ...any)) {
	switch daemon, known := c.daemon[claim.UID]; {
	case !known:
		differ("divvy-node has no record of claim %s", claim.Name)
	case !daemon.Prepared:
		differ("divvy-node has not prepared claim %s", claim.Name)
	case texts(daemon.Has, true) != texts(claim.Has, true):
		differ("divvy-node recorded %s of claim %s", texts(daemon.Has, true), claim.Name)
	}
	switch kubelet, known := c.checkpoint[claim.UID]; {
	case !known:
		differ("kubelet has no record of claim %s", claim.Name)
	case texts(kubelet.Has, false) != texts(claim.Has, false):
		differ("kubelet recorded %s of claim %s", texts(kubelet.Has, false), claim.Name)
	}
	for _, has := range claim.Has {
		vendor, ours := strings.CutSuffix(has.Driver, driverSuffix)
		if ours && !slices.Contains(c.Specs, vendor+"-"+claim.UID) {
			differ("there is no CDI specification of claim %s for %s", claim.Name, vendor)
		}
	}
}

// facts are all that is known of a container.
func (c *claimComparison) facts(u *User) string {
	var out []string
	for _, use := range u.Uses {
		claim := c.api[use.Claim]
		out = append(out, fmt.Sprintf("claim %s %s request %q: allocation %s, divvy-node %s, kubelet's record %s", use.Claim,
			claim.UID, use.Request, texts(claim.Has, true), texts(c.daemon[claim.UID].Has, true),
			texts(c.checkpoint[claim.UID].Has, false)))
	}
	held, listed := c.Kubelet[u.Name]
	return strings.Join(append(out, fmt.Sprintf("requests %v; kubelet answers %t, lists it %t: claims %v, devices %v", u.Asks,
		c.Kubelet != nil, listed, held.Claims, held.Units), fmt.Sprintf("environment %v; /dev %v; %s", u.Sight.Env, u.Sight.Nodes,
		u.ID)), "; ")
}

// texts are allocations as text, in full or what kubelet has of them.
func texts(all []Allocation, full bool) string {
	var out []string
	for _, a := range all {
		text := a.Driver + " " + a.Device
		if a.Share != "" {
			text += " share " + a.Share
		}
		if full {
			text += fmt.Sprintf(" for %s, %d bytes", a.Request, a.Bytes)
		}
		out = append(out, text)
	}
	slices.Sort(out)
	return "[" + strings.Join(out, "; ") + "]"
}

func distinct(all []string) []string {
	slices.Sort(all)
	return slices.Compact(all)
}

func joined(all []string) string {
	slices.Sort(all)
	return strings.Join(all, ",")
}

// chipsOf returns the devices behind the name of one for claims, all chips for a board.
func chipsOf(chips []Chip, device string) []Chip {
	for _, chip := range chips {
		kind, uuid, _ := strings.Cut(device, "-")
		uuid = strings.TrimPrefix(uuid, "gpu-") // a chip's uuid may begin with it
		if strings.TrimPrefix(strings.ToLower(chip.UUID), "gpu-") != uuid {
			continue
		}
		if kind != "board" {
			return []Chip{chip}
		}
		return slices.DeleteFunc(slices.Clone(chips), func(other Chip) bool {
			return other.Vendor != chip.Vendor || other.Board != chip.Board
		})
	}
	return nil
}

// chipOf returns the device of what kubelet gave: a unit of a GCU's memory, or a whole device.
func (s *Sample) chipOf(resource, id string) (Chip, bool) {
	if strings.HasSuffix(resource, "-memory") {
		id = strings.TrimPrefix(s.Units.Card(id), "GCU-") // divvy-node's name of a GCU
	}
	i := slices.IndexFunc(s.Chips, func(chip Chip) bool { return chip.UUID == id })
	if i < 0 {
		return Chip{}, false
	}
	return s.Chips[i], true
}

// hold is what an owner has of a device. It is the whole device for 0 bytes.
type hold struct {
	owner, chip string
	bytes       int64
}

// holdsOf returns what claims have. Devices that are not known are held whole under their names.
func holdsOf(chips []Chip, claims []Claim) []hold {
	var out []hold
	for _, claim := range claims {
		for _, has := range claim.Has {
			if !strings.HasSuffix(has.Driver, driverSuffix) {
				continue
			}
			owner, of := "claim "+claim.Name+" "+claim.UID, chipsOf(chips, has.Device)
			if len(of) == 0 {
				of = []Chip{{UUID: has.Device}}
			}
			for _, chip := range of {
				out = append(out, hold{owner, chip.UUID, has.Bytes})
			}
		}
	}
	return out
}

// unitHolds returns what kubelet says that a container has without claims.
func (s *Sample) unitHolds(container string) []hold {
	var out []hold
	for resource, ids := range s.Kubelet[container].Units {
		for _, id := range ids {
			chip, known := s.chipOf(resource, id)
			switch {
			case known && strings.HasSuffix(resource, "-memory"):
				out = append(out, hold{"container " + container, chip.UUID, unitBytes})
			case known:
				out = append(out, hold{"container " + container, chip.UUID, 0})
			}
		}
	}
	return out
}

// beyond reports the devices of which more is held than there is: more bytes than its memory, by
// units and by claims, and anything beside a holder of the whole device.
func beyond(chips []Chip, source string, holds []hold) []string {
	var found []string
	owners := map[string]map[string]int64{} // bytes by owner, by device
	whole := map[string]bool{}
	for _, h := range holds {
		if owners[h.chip] == nil {
			owners[h.chip] = map[string]int64{}
		}
		if h.bytes == 0 && whole[h.chip] {
			owners[h.chip][h.owner+", once more"]++
		}
		owners[h.chip][h.owner] += h.bytes
		whole[h.chip] = whole[h.chip] || h.bytes == 0
	}
	for _, uuid := range slices.Sorted(maps.Keys(owners)) {
		i := slices.IndexFunc(chips, func(chip Chip) bool { return chip.UUID == uuid })
		if i < 0 {
			found = append(found, fmt.Sprintf("%s: device %s does not exist; it is held by %v", source, uuid, owners[uuid]))
			continue
		}
		doors := map[string]bool{}
		var sum int64
		for owner, bytes := range owners[uuid] {
			door, _, _ := strings.Cut(owner, " ")
			doors[door] = true
			sum += bytes
		}
		if sum > chips[i].Bytes || whole[uuid] && len(owners[uuid]) > 1 || len(doors) > 1 {
			found = append(found, fmt.Sprintf("%s: device %s of %d bytes is used beyond its size, or in two ways: "+
				"a holder has all of it is %t, bytes by holder %v", source, uuid, chips[i].Bytes, whole[uuid], owners[uuid]))
		}
	}
	return found
}

// used returns the bytes that are held together.
func used(chips []Chip, holds []hold) (sum int64) {
	for _, h := range holds {
		if i := slices.IndexFunc(chips, func(chip Chip) bool { return chip.UUID == h.chip }); h.bytes == 0 && i >= 0 {
			h.bytes = chips[i].Bytes
		}
		sum += h.bytes
	}
	return sum
}

// Leftovers returns where the records have claims that are allocated to no pod, or lack one that is.
// It is for times at which no pod is being started or ended.
func Leftovers(s Sample) []string {
	var found []string
	want := map[string]string{} // claims by driver and UID
	for _, claim := range s.API {
		if claim.Users == 0 {
			found = append(found, fmt.Sprintf("claim %s has an allocation, and is reserved for no pod", claim.Name))
		}
		keys(want, claim)
	}
	for source, claims := range map[string][]Claim{"divvy-node": s.Daemon, "kubelet's checkpoint": s.Checkpoint} {
		got := map[string]string{}
		for _, claim := range claims {
			keys(got, claim)
		}
		found = append(found, unequal(source, got, want)...)
	}
	specs, specsWanted := map[string]string{}, map[string]string{}
	for _, spec := range s.Specs {
		specs[spec] = "a specification"
	}
	for key, name := range want {
		specsWanted[strings.Replace(key, driverSuffix+" ", "-", 1)] = name
	}
	found = append(found, unequal("the CDI folder", specs, specsWanted)...)
	slices.Sort(found)
	return found
}

func keys(out map[string]string, claim Claim) {
	for _, has := range claim.Has {
		if strings.HasSuffix(has.Driver, driverSuffix) {
			out[has.Driver+" "+claim.UID] = claim.Name
		}
	}
}

func unequal(source string, got, want map[string]string) []string {
	var found []string
	for key, name := range got {
		if _, ok := want[key]; !ok {
			found = append(found, fmt.Sprintf("%s has %s (%s), which no claim with an allocation has", source, key, name))
		}
	}
	for key, name := range want {
		if _, ok := got[key]; !ok {
			found = append(found, fmt.Sprintf("%s lacks %s of claim %s", source, key, name))
		}
	}
	return found
}
