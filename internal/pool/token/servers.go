package token

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	yaml "go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/divvy-gpu/divvy/internal/pool"
)

// defaultPort is where the servers of a pool listen.
const defaultPort = 56001

const maxAddresses = 4096

// Servers is what a servers.conf says.
type Servers struct {
	// List are the servers, in the order of the file.
	List []Server
	// Mended says what was read although it is not written rightly, a sentence
	// each. Repair writes it rightly.
	Mended []string
	// Warnings are about what works and is probably not meant.
	Warnings []string
}

// Server is one server of a pool.
type Server struct {
	// Line is where it begins in the file, from 1.
	Line int
	// Reachable is the address at which clients 3.5 look for it, "" when the
	// file does not say it.
	Reachable string
	// Addresses are all its addresses, host:port.
	Addresses []string
}

// Addresses returns all addresses of all servers, each once, in the order of the
// file.
func (s Servers) Addresses() []string {
	var out []string
	seen := map[string]bool{}
	add := func(address string) {
		if address != "" && !seen[address] {
			seen[address] = true
			out = append(out, address)
		}
	}
	for _, server := range s.List {
		add(server.Reachable)
		for _, a := range server.Addresses {
			add(a)
		}
	}
	return out
}

// CheckAddress says what is wrong with an address, which must be host:port with
// a name, an IPv4 address or an IPv6 address in brackets.
func CheckAddress(address string) error {
	shown := Printable(address)
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		if _, ipErr := netip.ParseAddr(address); ipErr == nil || len(validation.IsDNS1123Subdomain(strings.ToLower(address))) == 0 {
			return fmt.Errorf("address %q has no port: write %s", shown, net.JoinHostPort(shown, strconv.Itoa(defaultPort)))
		}
		return fmt.Errorf("address %q is not host:port, such as 10.202.122.248:%d", shown, defaultPort)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || strconv.FormatUint(n, 10) != port {
		return fmt.Errorf("address %q has the port %q: it must be a number from 1 to 65535; servers usually listen on %d", shown,
			Printable(port), defaultPort)
	}
	if _, err := netip.ParseAddr(host); err == nil {
		return nil
	}
	if numeric.MatchString(host) {
		return fmt.Errorf("address %q has the host %q, which is not an IP address: an IPv4 address is four numbers from 0 to 255", shown,
			Printable(host))
	}
	if len(validation.IsDNS1123Subdomain(strings.ToLower(host))) > 0 {
		return fmt.Errorf("address %q has the host %q: it must be a DNS name or an IP address, an IPv6 address in brackets", shown,
			Printable(host))
	}
	return nil
}

// numeric are hosts that can only be meant as IPv4 addresses.
var numeric = regexp.MustCompile(`^[0-9.]+$`)

// ParseServers reads a servers.conf: YAML with a list "servers", each of which
// has a list "addresses" and may have "reachable". Keys that are not known are
// passed over. The guide's form, "reachable:10.1.1.1:56001" without a blank, is
// no YAML that means anything; it is read as it was meant.
//
// The error holds all mistakes, each with its line. What could be read of the
// servers is returned beside it.
func ParseServers(data []byte) (Servers, error) {
	_, servers, err := parseServers(data)
	return servers, err
}

// fused is "reachable:" with its value right behind, as the guide has it.
var fused = regexp.MustCompile(`(?m)^( *(?:- +)?reachable):([^\s:].*)$`)

// separate puts the blank in where the guide forgets it.
func separate(data []byte) ([]byte, []string) {
	var mended []string
	for _, at := range fused.FindAllIndex(data, -1) {
		mended = append(mended, fmt.Sprintf("line %d: added the required blank after \"reachable:\"",
			1+bytes.Count(data[:at[0]], []byte("\n"))))
	}
	if mended == nil {
		return data, nil
	}
	return fused.ReplaceAll(data, []byte("$1: $2")), mended
}

// rightForm is what a servers.conf looks like.
const rightForm = "it must look like\n" +
	"  servers:\n  - addresses:\n    - 10.202.122.248:56001"

func parseServers(data []byte) (*yaml.Node, Servers, error) {
	var s Servers
	if len(bytes.TrimSpace(data)) == 0 {
		return nil, s, fmt.Errorf("%s is empty: %s", pool.ServersKey, rightForm)
	}
	data, s.Mended = separate(data)
	root, err := document(data)
	if err != nil {
		return nil, s, fmt.Errorf("%s is not YAML: %w; %s", pool.ServersKey, err, rightForm)
	}
	if root.Kind != yaml.MappingNode {
		return nil, s, fmt.Errorf("%s is %s: %s", pool.ServersKey, kindOf(root), rightForm)
	}
	list, err := value(root, "servers")
	switch {
	case err != nil:
		return nil, s, fmt.Errorf("%s: %w", pool.ServersKey, err)
	case list == nil:
		return nil, s, fmt.Errorf("%s has no \"servers\": %s", pool.ServersKey, rightForm)
	case list.Kind != yaml.SequenceNode || len(list.Content) == 0:
		return nil, s, fmt.Errorf("%s, line %d: \"servers\" is %s: %s", pool.ServersKey, list.Line, kindOf(list), rightForm)
	}
	var errs []error
	problem := func(line int, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s, line %d: %w", pool.ServersKey, line, fmt.Errorf(format, args...)))
	}
	lines := map[string]int{}
	for i, item := range list.Content {
		server := readServer(item, problem)
		if len(server.Addresses) == 0 && server.Reachable == "" {
			continue // why, was said
		}
		s.List = append(s.List, server)
		for _, a := range server.Addresses {
			if before, doubled := lines[a]; doubled {
				s.Warnings = append(s.Warnings, fmt.Sprintf("%s: duplicate address %q, in server %d and server %d", pool.ServersKey,
					Printable(a), before, i+1))
			}
			lines[a] = i + 1
		}
		if len(lines) > maxAddresses {
			return nil, Servers{}, fmt.Errorf("%s has more than %d addresses", pool.ServersKey, maxAddresses)
		}
	}
	return root, s, errors.Join(errs...)
}

func readServer(item *yaml.Node, problem func(line int, format string, args ...any)) Server {
	server := Server{Line: item.Line}
	if item.Kind != yaml.MappingNode {
		problem(item.Line, "a server is %s: it must have a list \"addresses\"; %s", kindOf(item), rightForm)
		return server
	}
	reachable, err := value(item, "reachable")
	if err != nil {
		problem(item.Line, "%w", err)
	}
	if reachable != nil {
		if reachable.Kind != yaml.ScalarNode || reachable.Tag == "!!null" {
			problem(reachable.Line, "\"reachable\" is %s: it must be one address, such as 10.202.122.248:%d", kindOf(reachable),
				defaultPort)
		} else {
			server.Reachable = reachable.Value
			if err := CheckAddress(reachable.Value); err != nil {
				problem(reachable.Line, "\"reachable\": %w", err)
			}
		}
	}
	addresses, err := value(item, "addresses")
	switch {
	case err != nil:
		problem(item.Line, "%w", err)
	case addresses == nil:
		problem(item.Line, "a server has no \"addresses\": %s", rightForm)
	case addresses.Kind != yaml.SequenceNode || len(addresses.Content) == 0:
		problem(addresses.Line, "\"addresses\" is %s: it must be a list, a line \"- 10.202.122.248:%d\" for each address",
			kindOf(addresses), defaultPort)
	default:
		for _, a := range addresses.Content {
			if a.Kind != yaml.ScalarNode || a.Tag == "!!null" {
				problem(a.Line, "an address is %s: it must be host:port in one piece, without a blank after the colon", kindOf(a))
				continue
			}
			server.Addresses = append(server.Addresses, a.Value)
			if err := CheckAddress(a.Value); err != nil {
				problem(a.Line, "%w", err)
			}
		}
	}
	return server
}

// value returns the value of a key of a mapping, nil when it has none.
func value(mapping *yaml.Node, key string) (*yaml.Node, error) {
	var found *yaml.Node
	for i := 0; i+1 < len(mapping.Content); i += 2 {
		if k := mapping.Content[i]; k.Kind != yaml.ScalarNode || k.Value != key {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("duplicate %q, the second in line %d", key, mapping.Content[i].Line)
		}
		found = mapping.Content[i+1]
	}
	return found, nil
}

// reachableVersions are the versions of the client, as in the catalog, that find
// no server without "reachable".
var reachableVersions = []string{"350"}

// NeedsReachable reports whether a version of the client, as pods write it (350)
// or with dots (3.5, 3.5.0), finds no server without "reachable".
func NeedsReachable(version string) bool {
	if strings.Contains(version, ".") {
		parts := strings.Split(version, ".")
		for len(parts) < 3 {
			parts = append(parts, "0")
		}
		version = strings.Join(parts, "")
	}
	return slices.Contains(reachableVersions, version)
}

// Repair returns a servers.conf in the form that clients read, and says what was
// changed, a sentence each. The guide's "reachable:10.1.1.1:56001" gets its
// blank. With reachable, each server that lacks it is given "reachable" with the
// first of its addresses. Comments and keys that are not known stay. A file with
// nothing to change is returned as it is, byte for byte.
func Repair(data []byte, reachable bool) (fixed []byte, changes []string, err error) {
	root, servers, err := parseServers(data)
	if err != nil {
		return nil, nil, err
	}
	changes = slices.Clone(servers.Mended)
	fixed, _ = separate(data)
	if !reachable {
		return fixed, changes, nil
	}
	added := false
	list, err := value(root, "servers")
	if err != nil {
		return nil, nil, err
	}
	for i, item := range list.Content {
		if servers.List[i].Reachable != "" {
			continue
		}
		address := servers.List[i].Addresses[0]
		item.Content = append([]*yaml.Node{
			{Kind: yaml.ScalarNode, Value: "reachable"},
			{Kind: yaml.ScalarNode, Tag: "!!str", Value: address},
		}, item.Content...)
		changes = append(changes, fmt.Sprintf("server %d: \"reachable: %s\" was added", i+1, Printable(address)))
		added = true
	}
	if !added {
		return fixed, changes, nil
	}
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	e.CompactSeqIndent()
	if err := errors.Join(e.Encode(root), e.Close()); err != nil {
		return nil, nil, fmt.Errorf("write %s: %w", pool.ServersKey, err)
	}
	// What was written must say the same and what was added.
	after, err := ParseServers(b.Bytes())
	if err != nil {
		return nil, nil, fmt.Errorf("%s cannot be corrected automatically, write it again: %w", pool.ServersKey, err)
	}
	for i, s := range after.List {
		if len(after.List) != len(servers.List) || !slices.Equal(s.Addresses, servers.List[i].Addresses) || s.Reachable == "" {
			return nil, nil, fmt.Errorf("%s cannot be corrected automatically, write it again: %s", pool.ServersKey, rightForm)
		}
	}
	return b.Bytes(), changes, nil
}
