package extender

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"

	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/accel"
	"github.com/divvy-gpu/divvy/internal/accel/ledger"
	"github.com/divvy-gpu/divvy/internal/inspect"
)

// handleInspect answers what every device holds, in the guide's shape. The
// query may ask for details=true, which adds fields, and for another resource.
func (e *Extender) handleInspect(w http.ResponseWriter, r *http.Request) {
	q, status, err := e.inspectQuery(r)
	var usages []ledger.NodeUsage
	if err == nil && q.node == "" {
		// The report of a large cluster takes some memory: one at a time.
		select {
		case e.inspecting <- struct{}{}:
			defer func() { <-e.inspecting }()
		case <-r.Context().Done():
			return // nobody is there to tell
		}
	}
	if err == nil {
		usages, status, err = e.usages(q)
		if lost := e.ready(); lost != nil { // it may have waited for its turn
			status, err = http.StatusServiceUnavailable, lost
		}
	}
	if err != nil {
		body, marshalErr := inspect.Marshal(inspect.Failed(err.Error()))
		if marshalErr != nil {
			writeError(w, http.StatusInternalServerError, marshalErr.Error())
			return
		}
		writeJSON(w, status, body)
		return
	}
	nodes := func(yield func(inspect.Node) bool) {
		for _, u := range usages {
			node := inspect.NodeFromUsage(q.resource, u)
			if !q.details {
				node = node.Guide()
			}
			if !yield(node) {
				return
			}
		}
	}
	writeHeader(w, http.StatusOK)
	if err := inspect.Stream(w, nodes); err != nil {
		klog.FromContext(r.Context()).V(4).Info("The report was not read to its end", "reason", err.Error())
	}
}

// inspectQuery is what a request for a report asks.
type inspectQuery struct {
	node     string // "" for all
	resource accel.Resource
	details  bool
}

// inspectQuery reads the question. An error comes with its status.
func (e *Extender) inspectQuery(r *http.Request) (q inspectQuery, status int, err error) {
	if err := e.ready(); err != nil {
		return q, http.StatusServiceUnavailable, err
	}
	q = inspectQuery{node: r.PathValue("node"), resource: e.reported()}
	values := r.URL.Query()
	if asked := values.Get("resource"); asked != "" {
		if q.resource = accel.Resource(asked); !slices.Contains(e.config.Resources, q.resource) {
			return q, http.StatusNotFound, errors.New(inspect.NotManaged(q.resource))
		}
	}
	if asked := values.Get("details"); asked != "" {
		if q.details, err = strconv.ParseBool(asked); err != nil {
			return q, http.StatusBadRequest, fmt.Errorf("details=%q: must be true or false", asked)
		}
	}
	return q, http.StatusOK, nil
}

// guideResource is what the report of the GCUShare guide is about.
const guideResource accel.Resource = "enflame.com/gcu-memory"

// reported is the resource of a report for which none is asked: the guide's,
// whatever else is managed, or else the first.
func (e *Extender) reported() accel.Resource {
	if slices.Contains(e.config.Resources, guideResource) {
		return guideResource
	}
	return e.config.Resources[0]
}

// usages asks the ledger. An error comes with its status.
func (e *Extender) usages(q inspectQuery) (usages []ledger.NodeUsage, status int, err error) {
	if q.node == "" {
		return e.config.Ledger.Nodes(q.resource), http.StatusOK, nil
	}
	usage, ok := e.config.Ledger.Node(q.resource, q.node)
	if ok {
		return []ledger.NodeUsage{usage}, http.StatusOK, nil
	}
	if problem := e.config.Cluster.Problem(q.node); problem != "" {
		return nil, http.StatusNotFound, fmt.Errorf("node %q: %s", q.node, problem)
	}
	return nil, http.StatusNotFound, fmt.Errorf("node %q is not known or offers no %s", q.node, q.resource)
}
