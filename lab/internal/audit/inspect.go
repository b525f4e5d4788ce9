package audit

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// Report is what the extender's inspect route answers, in the guide's form and
// with the details that the audit uses.
type Report struct {
	Nodes []Node `json:"nodes"`
	Error string `json:"error"`
}

// Node is one node of a Report. Amounts are in units.
type Node struct {
	Name      string     `json:"name"`
	Total     int64      `json:"totalGCU"`
	Used      int64      `json:"usedGCU"`
	Available int64      `json:"availableGCU"`
	Devices   []Device   `json:"devices"`
	Unplaced  []Occupant `json:"unplacedPods"`
	Unit      string     `json:"unit"`
}

// Device is one card of a Node.
type Device struct {
	ID        int        `json:"id"`
	Total     int64      `json:"totalGCU"`
	Used      int64      `json:"usedGCU"`
	Available int64      `json:"availableGCU"`
	Withheld  int64      `json:"withheldGCU"`
	Pods      []Occupant `json:"pods"`
	UUID      string     `json:"uuid"`
	Unhealthy bool       `json:"unhealthy"`
}

// Occupant is a pod and what it holds of a card.
type Occupant struct {
	Name       string    `json:"name"`
	Namespace  string    `json:"namespace"`
	UID        string    `json:"uid"`
	CreateTime time.Time `json:"createTime"`
	Used       int64     `json:"usedGCU"`
}

// ParseReport reads an answer of the inspect route about one node.
func ParseReport(body []byte) (Node, error) {
	var report Report
	if err := json.Unmarshal(body, &report); err != nil {
		return Node{}, fmt.Errorf("inspect's answer: %w", err)
	}
	if report.Error != "" || len(report.Nodes) != 1 {
		return Node{}, fmt.Errorf("inspect's answer has %d nodes and the error %q", len(report.Nodes), report.Error)
	}
	return report.Nodes[0], nil
}

// Inspect asks the extender what the cards of the node hold.
func (a *Auditor) Inspect(ctx context.Context) (Node, error) {
	url, err := a.lab.Divvy.URL(ctx)
	if err != nil {
		return Node{}, err
	}
	body, err := testenv.Fetch(ctx, url+"/gcushare-scheduler/inspect/"+layout.NodeName+"?details=true")
	if err != nil {
		return Node{}, err
	}
	return ParseReport(body)
}
