package remotepool

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// GPU is one GPU of a server.
type GPU struct {
	Name string `json:"name"`
	// MemoryMB is its memory, in the unit of the client's option -m.
	MemoryMB int64 `json:"memoryMB"`
}

// Server is one server of the pool. Its GPUs are numbered from 0.
type Server struct {
	Hostname string `json:"hostname"`
	// Address is where clients reach it, host:port.
	Address string `json:"address"`
	// Listen is where the server's program listens for it.
	Listen string `json:"listen"`
	RDMA   bool   `json:"rdma"`
	CUDA   string `json:"cuda"`
	Driver string `json:"driver"`
	GPUs   []GPU  `json:"gpus"`
}

// Inventory are the servers of a pool.
type Inventory struct {
	Servers []Server `json:"servers"`
}

// DecodeInventory reads the configuration of the pool's server.
func DecodeInventory(data []byte) (Inventory, error) {
	var i Inventory
	if err := yaml.UnmarshalStrict(data, &i); err != nil {
		return Inventory{}, fmt.Errorf("the pool's servers: %w", err)
	}
	if len(i.Servers) == 0 {
		return Inventory{}, errors.New("the pool has no server")
	}
	for n, s := range i.Servers {
		if s.Hostname == "" || s.Address == "" || s.Listen == "" || len(s.GPUs) == 0 {
			return Inventory{}, fmt.Errorf("server %d of the pool needs hostname, address, listen and gpus", n)
		}
		for id, gpu := range s.GPUs {
			if gpu.MemoryMB <= 0 {
				return Inventory{}, fmt.Errorf("GPU %d of server %s has no memory", id, s.Hostname)
			}
		}
	}
	return i, nil
}

// filterKeys are what a filter may ask about, and how a GPU of a server answers.
var filterKeys = map[string]func(s Server, id int, value string) bool{
	"server.addr": func(s Server, _ int, value string) bool {
		host, _, _ := strings.Cut(s.Address, ":")
		return value == s.Address || value == host
	},
	"server.hostname":       func(s Server, _ int, value string) bool { return value == s.Hostname },
	"server.has-rdma":       func(s Server, _ int, value string) bool { return value == strconv.FormatBool(s.RDMA) },
	"server.cuda-version":   func(s Server, _ int, value string) bool { return value == s.CUDA },
	"server.driver-version": func(s Server, _ int, value string) bool { return value == s.Driver },
	"device.id":             func(_ Server, id int, value string) bool { return value == strconv.Itoa(id) },
	"device.name":           func(s Server, id int, value string) bool { return strings.Contains(s.GPUs[id].Name, value) },
	"device.phy-memory": func(s Server, id int, value string) bool {
		return value == strconv.FormatInt(s.GPUs[id].MemoryMB, 10)
	},
}

// filter is what a lease asks of a GPU: of every key one of the values.
type filter map[string][]string

func parseFilter(words []string) (filter, error) {
	f := filter{}
	for _, word := range words {
		key, value, ok := strings.Cut(word, "=")
		if !ok || value == "" {
			return nil, fmt.Errorf("filter %q is not of the form key=value", word)
		}
		if filterKeys[key] == nil {
			return nil, fmt.Errorf("filter %q: there is no key %q", word, key)
		}
		f[key] = append(f[key], value)
	}
	return f, nil
}

func (f filter) matches(s Server, id int) bool {
	for key, values := range f {
		if !slices.ContainsFunc(values, func(v string) bool { return filterKeys[key](s, id, v) }) {
			return false
		}
	}
	return true
}
