package audit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
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

var client = &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// Fetch returns the body of a page that answers 200.
func Fetch(ctx context.Context, url string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(response.Body)
	if err := errors.Join(err, response.Body.Close()); err != nil {
		return nil, fmt.Errorf("read %s: %w", url, err)
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s: %s", url, response.Status, strings.TrimSpace(string(body)))
	}
	return body, nil
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
	body, err := Fetch(ctx, a.ExtenderURL+"/gcushare-scheduler/inspect/"+a.Node+"?details=true")
	if err != nil {
		return Node{}, err
	}
	return ParseReport(body)
}
