package token

import (
	"bytes"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The forms of the guide, sections 2.2 and 6.2.
const (
	guideSource   = "servers:\n- addresses:\n  - 10.202.122.248:56001\n"
	guideModified = "servers:\n- reachable:10.202.122.248:56001\n  addresses:\n  - 10.202.122.248:56001\n"
	guideMeant    = "servers:\n- reachable: 10.202.122.248:56001\n  addresses:\n  - 10.202.122.248:56001\n"
)

func TestParseServers(t *testing.T) {
	const a, b = "10.202.122.248:56001", "10.202.122.249:56001"
	tests := map[string]struct {
		text   string
		want   []Server
		mended int
		err    []string // parts
	}{
		"as downloaded":          {text: guideSource, want: []Server{{Line: 2, Addresses: []string{a}}}},
		"as the guide writes it": {text: guideModified, want: []Server{{Line: 2, Reachable: a, Addresses: []string{a}}}, mended: 1},
		"as the guide means it":  {text: guideMeant, want: []Server{{Line: 2, Reachable: a, Addresses: []string{a}}}},
		"without a blank, after the addresses": {text: "servers:\n- addresses:\n  - " + a + "\n  reachable:" + a + "\n",
			want: []Server{{Line: 2, Reachable: a, Addresses: []string{a}}}, mended: 1},
		"with carriage returns": {text: strings.ReplaceAll(guideModified, "\n", "\r\n"),
			want: []Server{{Line: 2, Reachable: a, Addresses: []string{a}}}, mended: 1},
		"several": {text: "servers:\n- addresses:\n  - " + a + "\n- reachable:" + b + "\n  addresses: [\"" + b +
			"\", 'pool.example.com:1', '[::1]:56001']\n",
			want: []Server{{Line: 2, Addresses: []string{a}},
				{Line: 4, Reachable: b, Addresses: []string{b, "pool.example.com:1", "[::1]:56001"}}}, mended: 1},
		"keys that are not known": {text: "version: 2\nservers:\n- id: 7\n  addresses: [" + a + "]\n",
			want: []Server{{Line: 3, Addresses: []string{a}}}},
		"comments alone":      {text: "# x\n", err: []string{"servers.conf"}},
		"empty":               {text: " \n", err: []string{"servers.conf is empty: it must look like\n  servers:"}},
		"a list":              {text: "- " + a, err: []string{"servers.conf is a list"}},
		"no servers":          {text: "server: []", err: []string{`has no "servers"`}},
		"servers without any": {text: "servers: []", err: []string{`line 1: "servers" is an empty list`}},
		"servers as text":     {text: "servers: " + a, err: []string{`"servers" is text`}},
		"servers twice":       {text: "servers: []\nservers: []", err: []string{`duplicate "servers", the second in line 2`}},
		"no YAML":             {text: "servers:\n- addresses:\n - x: [\n", err: []string{"servers.conf is not YAML", "line"}},
		"tabs":                {text: "servers:\n\t- addresses:\n", err: []string{"it has tabs"}},
		"an alias":            {text: "servers: *x", err: []string{"it has an alias"}},
		"a server as text": {text: "servers:\n- " + a + "\n",
			err: []string{`line 2: a server is text: it must have a list "addresses"`}},
		"no addresses": {text: "servers:\n- reachable: " + a, want: []Server{{Line: 2, Reachable: a}},
			err: []string{`line 2: a server has no "addresses"`}},
		"addresses as text": {text: "servers:\n- addresses: " + a, err: []string{`line 2: "addresses" is text: it must be a list`}},
		"a blank after the colon": {text: "servers:\n- addresses:\n  - 10.202.122.248: 56001",
			err: []string{"line 3: an address is a mapping: it must be host:port in one piece, without a blank"}},
		"reachable as a list": {text: "servers:\n- reachable: [" + a + "]\n  addresses: [" + a + "]",
			want: []Server{{Line: 2, Addresses: []string{a}}}, err: []string{`line 2: "reachable" is a list`}},
		"reachable without value": {text: "servers:\n- reachable:\n  addresses: [" + a + "]",
			want: []Server{{Line: 2, Addresses: []string{a}}}, err: []string{`line 2: "reachable" is nothing`}},
		"all that is wrong": {text: "servers:\n- addresses:\n  - 10.1.1.1\n  - " + a + "\n- addresses:\n  - pool:0\n",
			want: []Server{{Line: 2, Addresses: []string{"10.1.1.1", a}}, {Line: 5, Addresses: []string{"pool:0"}}},
			err:  []string{`line 3: address "10.1.1.1" has no port: write 10.1.1.1:56001`, `line 6: address "pool:0" has the port "0"`}},
		"too many": {text: "servers:\n- addresses:\n" + func() string {
			var b strings.Builder
			for i := range maxAddresses + 1 {
				b.WriteString("  - h" + strings.Repeat("x", i%50) + ":" + strconv.Itoa(1+i) + "\n")
			}
			return b.String()
		}(), err: []string{"more than 4096 addresses"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := ParseServers([]byte(tt.text))
			if (err != nil) != (len(tt.err) > 0) {
				t.Fatalf("error %v, want %q", err, tt.err)
			}
			for _, want := range tt.err {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q, want %q in it", err, want)
				}
			}
			if diff := cmp.Diff(tt.want, got.List); diff != "" {
				t.Errorf("servers (-want +got):\n%s", diff)
			}
			if len(got.Mended) != tt.mended {
				t.Errorf("mended %q, want %d", got.Mended, tt.mended)
			}
		})
	}
}

func TestCheckAddress(t *testing.T) {
	for address, want := range map[string]string{
		"10.202.122.248:56001":   "",
		"pool.example.com:443":   "",
		"Pool:65535":             "",
		"[2001:db8::1]:56001":    "",
		"[fe80::1%eth0]:56001":   "",
		"":                       "is not host:port",
		"10.1.1.1":               "has no port: write 10.1.1.1:56001",
		"pool":                   "has no port: write pool:56001",
		"2001:db8::1":            "has no port: write [2001:db8::1]:56001",
		":56001":                 `has the host "": it must be a DNS name`,
		"10.1.1.1:":              "has the port",
		"10.1.1.1:65536":         "must be a number from 1 to 65535",
		"10.1.1.1:-1":            "must be a number",
		"10.1.1.1:056":           "must be a number",
		"10.1.1.1:https":         "must be a number",
		"10.1.1:56001":           "which is not an IP address",
		"10.1.1.256:56001":       "which is not an IP address",
		"https://10.1.1.1:1":     "is not host:port",
		"10.1.1.1:56001/x":       "has the port",
		"a b:1":                  "must be a DNS name",
		"a\x1b[2J:1":             `"a?[2J`,
		"pool_1:56001":           "must be a DNS name",
		strings.Repeat("x", 900): "...",
	} {
		err := CheckAddress(address)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", address, err, want)
		}
	}
}

// The guide's section 2.2 for clients 3.5, and its own mistake in sections 2.2
// and 6.2.
func TestRepair(t *testing.T) {
	tests := map[string]struct {
		text      string
		reachable bool
		want      string
		changes   []string
	}{
		"nothing to do":  {text: guideSource, want: guideSource},
		"nothing to add": {text: guideMeant, reachable: true, want: guideMeant},
		"the guide's own form": {text: guideModified, want: guideMeant,
			changes: []string{`line 2: added the required blank after "reachable:"`}},
		"the guide's form, for 350": {text: guideModified, reachable: true, want: guideMeant,
			changes: []string{`line 2: added the required blank after "reachable:"`}},
		"what the guide means": {text: guideSource, reachable: true, want: guideMeant,
			changes: []string{`server 1: "reachable: 10.202.122.248:56001" was added`}},
		"what stays as it is, byte for byte": {text: "# mine\nservers:   [ { reachable: a:1,\n addresses: [ 'a:1' ] } ]\r\n",
			reachable: true,
			want:      "# mine\nservers:   [ { reachable: a:1,\n addresses: [ 'a:1' ] } ]\r\n"},
		"one of several, with comments and keys that are not known": {
			text: "# the pool\nversion: 2\nservers:\n# rack 1\n- id: 7 # seven\n  addresses:\n  - a:1\n  - b:1\n- reachable:c:1\n  " +
				"addresses: [\"c:1\"]\n- addresses: ['[::1]:1']\n",
			reachable: true,
			want: "# the pool\nversion: 2\nservers:\n# rack 1\n- reachable: a:1\n  id: 7 # seven\n  addresses:\n  - a:1\n  - b:1\n- " +
				"reachable: c:1\n  addresses: [\"c:1\"]\n- reachable: '[::1]:1'\n  addresses: ['[::1]:1']\n",
			changes: []string{`line 9: added the required blank after "reachable:"`,
				`server 1: "reachable: a:1" was added`, `server 3: "reachable: [::1]:1" was added`},
		},
		"in one line": {text: "servers: [{addresses: ['a:1']}]\n", reachable: true,
			want:    "servers: [{reachable: 'a:1', addresses: ['a:1']}]\n",
			changes: []string{`server 1: "reachable: a:1" was added`}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got, changes, err := Repair([]byte(tt.text), tt.reachable)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, string(got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.changes, changes); diff != "" {
				t.Errorf("changes (-want +got):\n%s", diff)
			}
			again, changes, err := Repair(got, tt.reachable)
			if err != nil || len(changes) > 0 || !bytes.Equal(again, got) {
				t.Errorf("a second time changes %q: %v", changes, err)
			}
		})
	}
	if _, _, err := Repair([]byte("servers: []"), true); err == nil {
		t.Error("what cannot be read was mended")
	}
}

func TestNeedsReachable(t *testing.T) {
	for version, want := range map[string]bool{"350": true, "3.5": true, "3.5.0": true, "": false, "250": false, "401": false, "450": false,
		"4.5": false, "3.5.1": false, "35": false} {
		if got := NeedsReachable(version); got != want {
			t.Errorf("%q: %v", version, got)
		}
	}
}

// What is mended can be read, has the same addresses, and is mended for good.
func FuzzServers(f *testing.F) {
	for _, text := range []string{guideSource, guideModified, guideMeant, "servers: [{addresses: ['a:1']}]", "a: &x b\nservers: *x",
		"# x\nservers:\n# y\n- addresses: # z\n  - a:1\n# end\n", "servers:\n- ? a\n  : b\n  addresses: [a:1]",
		"servers:\n- addresses:\n  - |\n    reachable:x\n",
		"servers: !!seq\n- addresses: !!seq [!!str a:1]\n", "\xef\xbb\xbfservers:\n- addresses: [a:1]",
		"---\nservers:\n- addresses: [a:1]\n...\n"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		before, err := ParseServers(data)
		_, _ = checkClient(data) // it must come back
		if err != nil {
			return
		}
		for _, reachable := range []bool{false, true} {
			fixed, changes, err := Repair(data, reachable)
			if err != nil {
				if reachable && strings.Contains(err.Error(), "write it again") {
					continue
				}
				t.Fatalf("cannot be mended: %v", err)
			}
			if len(changes) == 0 && !bytes.Equal(fixed, data) {
				t.Errorf("changed without a word to %q", fixed)
			}
			after, err := ParseServers(fixed)
			if err != nil {
				t.Fatalf("%q cannot be read: %v", fixed, err)
			}
			if len(after.Mended) > 0 {
				t.Errorf("%q has still to be mended: %q", fixed, after.Mended)
			}
			if len(before.List) != len(after.List) {
				t.Fatalf("%d servers became %d", len(before.List), len(after.List))
			}
			for i, s := range after.List {
				if !slices.Equal(s.Addresses, before.List[i].Addresses) {
					t.Errorf("addresses %q became %q", before.List[i].Addresses, s.Addresses)
				}
				if reachable && s.Reachable == "" {
					t.Errorf("server %d has no reachable", i)
				}
			}
		}
	})
}
