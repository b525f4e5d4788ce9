package remotepool

import (
	"slices"
	"strings"
	"testing"
)

// fewGPUs are two servers, one of three GPUs.
var fewGPUs = Inventory{Servers: []Server{
	{
		Hostname: "bf-server", Address: "10.1.1.1:56001", Listen: ":1", CUDA: "11.2", Driver: "460.73.01",
		GPUs: []GPU{{"Tesla V100-PCIE-16GB", 16160}, {"Tesla V100-PCIE-16GB", 16160}, {"Tesla V100-PCIE-32GB", 32480}},
	},
	{
		Hostname: "bf-server2", Address: "10.1.1.2:56001", Listen: ":2", CUDA: "11.8", Driver: "520.61.05", RDMA: true,
		GPUs: []GPU{{"Tesla T4", 15109}},
	},
}}

func TestLease(t *testing.T) {
	tests := map[string]struct {
		request Request
		server  string
		gpus    []int
		memory  int64
		err     string
	}{
		"half of one":        {request: Request{Amount: 1, Fraction: 0.5}, server: "bf-server", gpus: []int{0}, memory: 8080},
		"memory":             {request: Request{Amount: 1, MemoryMB: 8000}, server: "bf-server", gpus: []int{0}, memory: 8000},
		"two whole ones":     {request: Request{Amount: 2, Fraction: 1}, server: "bf-server", gpus: []int{0, 1}, memory: 16160},
		"memory of a larger": {request: Request{Amount: 1, MemoryMB: 20000}, server: "bf-server", gpus: []int{2}, memory: 20000},
		"by hostname": {request: Request{Amount: 1, Fraction: 1, Filters: []string{"server.hostname=bf-server2"}},
			server: "bf-server2", gpus: []int{0}, memory: 15109},
		"by address": {request: Request{Amount: 1, Fraction: 1, Filters: []string{"server.addr=10.1.1.2"}},
			server: "bf-server2", gpus: []int{0}, memory: 15109},
		"by rdma": {request: Request{Amount: 1, Fraction: 1, Filters: []string{"server.has-rdma=true"}},
			server: "bf-server2", gpus: []int{0}, memory: 15109},
		"by cuda": {request: Request{Amount: 1, Fraction: 1, Filters: []string{"server.cuda-version=11.8"}},
			server: "bf-server2", gpus: []int{0}, memory: 15109},
		"by driver": {request: Request{Amount: 1, Fraction: 1, Filters: []string{"server.driver-version=520.61.05"}},
			server: "bf-server2", gpus: []int{0}, memory: 15109},
		"by number": {request: Request{Amount: 1, Fraction: 1, Filters: []string{"device.id=1"}},
			server: "bf-server", gpus: []int{1}, memory: 16160},
		"by part of the name": {request: Request{Amount: 1, Fraction: 1, Filters: []string{"device.name=T4"}},
			server: "bf-server2", gpus: []int{0}, memory: 15109},
		"by physical memory": {request: Request{Amount: 1, MemoryMB: 1, Filters: []string{"device.phy-memory=32480"}},
			server: "bf-server", gpus: []int{2}, memory: 1},
		"one of two hostnames": {
			request: Request{Amount: 1, Fraction: 1, Filters: []string{"server.hostname=other", "server.hostname=bf-server2"}},
			server:  "bf-server2", gpus: []int{0}, memory: 15109,
		},
		"filters that exclude each other": {
			request: Request{Amount: 1, Fraction: 1, Filters: []string{"server.hostname=bf-server", "server.has-rdma=true"}},
			err:     "0 match the filters",
		},
		"too many":           {request: Request{Amount: 4, Fraction: 1}, err: "bf-server has 3 GPUs"},
		"too much memory":    {request: Request{Amount: 1, MemoryMB: 40000}, err: "0 of those have the memory"},
		"unknown filter":     {request: Request{Amount: 1, Fraction: 1, Filters: []string{"color=red"}}, err: `no key "color"`},
		"filter of one word": {request: Request{Amount: 1, Fraction: 1, Filters: []string{"fast"}}, err: "not of the form"},
		"none":               {request: Request{Fraction: 1}, err: "must be 1 or more"},
		"nothing of it":      {request: Request{Amount: 1}, err: "neither"},
		"both":               {request: Request{Amount: 1, Fraction: 0.5, MemoryMB: 5}, err: "both"},
		"more than one":      {request: Request{Amount: 1, Fraction: 1.5}, err: "at most 1"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			p := NewPool(fewGPUs)
			l, err := p.Lease(test.request)
			if test.err != "" {
				if err == nil || !strings.Contains(err.Error(), test.err) {
					t.Fatalf("leased %+v, %v; want an error with %q", l, err, test.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if l.Hostname != test.server || !slices.Equal(l.GPUs, test.gpus) || l.MemoryMB != test.memory {
				t.Errorf("leased GPUs %v of %s with %d MB; want %v of %s with %d", l.GPUs, l.Hostname, l.MemoryMB, test.gpus, test.server,
					test.memory)
			}
		})
	}
}

// What was granted is gone until it is given back, once.
func TestLeasesFillTheGPUs(t *testing.T) {
	p := NewPool(Inventory{Servers: fewGPUs.Servers[1:]})
	half := Request{Amount: 1, Fraction: 0.5}
	first, err := p.Lease(half)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Lease(half); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Lease(half); err == nil {
		t.Fatal("three halves of one GPU were granted")
	}
	p.Release(first)
	p.Release(first)
	if _, err := p.Lease(half); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Lease(half); err == nil {
		t.Fatal("a lease that was given back twice freed its GPU twice")
	}
	if b := p.Books(); b.Granted != 3 || b.Refused != 2 || len(b.Leases) != 2 {
		t.Errorf("books: %+v; want 3 granted, 2 refused, 2 held", b)
	}
}

func TestDecodeInventory(t *testing.T) {
	for text, want := range map[string]string{
		"servers: []": "no server",
		"servers: [{hostname: a, address: 'b:1', listen: ':1', gpus: [{name: x, memoryMB: 1}]}]": "",
		"servers: [{hostname: a}]": "needs hostname",
		"servers: [{hostname: a, address: 'b:1', listen: ':1', gpus: [{name: x}]}]": "no memory",
		"server: []": "unknown field",
	} {
		_, err := DecodeInventory([]byte(text))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", text, err, want)
		}
	}
}
