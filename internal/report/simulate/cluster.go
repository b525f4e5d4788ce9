package simulate

import (
	"errors"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/place"
)

// Node is a node with nothing on it.
type Node struct {
	Name string
	// CPU is in millicores, Memory in MiB; place.Unlimited where nobody counts.
	CPU, Memory int64
	// Devices are in ascending order of Index.
	Devices []accel.Share
	Links   []accel.Link
}

// Cluster is the nodes of a simulation.
type Cluster struct {
	Nodes []Node
}

// Units is what pods can get of all healthy devices together.
func (c *Cluster) Units() accel.Units {
	var sum accel.Units
	for i := range c.Nodes {
		for _, d := range c.Nodes[i].Devices {
			if !d.Health.Unhealthy {
				sum += d.Units - d.Withheld
			}
		}
	}
	return sum
}

// Validate rejects a cluster on which no simulation says anything.
func (c *Cluster) Validate() error {
	if len(c.Nodes) == 0 {
		return errors.New("the cluster has no nodes")
	}
	names := make(map[string]bool, len(c.Nodes))
	for _, n := range c.Nodes {
		if names[n.Name] {
			return fmt.Errorf("the cluster has two nodes called %q", n.Name)
		}
		names[n.Name] = true
	}
	if c.Units() == 0 {
		return errors.New("the cluster has no healthy devices")
	}
	return nil
}

// Pod is one pod of a workload.
type Pod struct {
	Name string
	// Source says where the pod is written, such as pods.csv:12; "" where that
	// says nothing.
	Source string
	Ask    place.Ask
}

// Demand is what the pod asks for over all its devices.
func (p *Pod) Demand() accel.Units { return p.Ask.Units * accel.Units(p.Ask.Devices) }

// Workload is a list of pods that stands for all that a cluster is asked for.
type Workload struct {
	Name string
	Pods []Pod
}

// Demand is what all pods ask for together.
func (w *Workload) Demand() accel.Units {
	var sum accel.Units
	for i := range w.Pods {
		sum += w.Pods[i].Demand()
	}
	return sum
}
