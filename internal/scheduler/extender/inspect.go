package extender

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"slices"
	"strconv"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// reports answers what every device holds.
type reports struct {
	ledger    decision.Ledger
	cluster   decision.Cluster
	resources []accel.Resource
	ready     func() error
	// whole makes the reports about all nodes.
	whole *limit.Reports[any]
}

// handle answers in the guide's shape. The query may ask for details=true, which adds
// fields, and for another resource.
func (p *reports) handle(w http.ResponseWriter, r *http.Request) {
	q, err := p.query(r)
	if err == nil {
		err = p.report(w, r, q)
	}
	if err == nil {
		return
	}
	status := http.StatusInternalServerError
	var known *statusError
	switch {
	case errors.As(err, &known):
		status = known.status
	case errors.Is(err, errNotReady), errors.Is(err, limit.ErrBusy):
		status = http.StatusServiceUnavailable
	}
	failReport(w, status, err)
}

// failReport answers with a report that says why there is none.
func failReport(w http.ResponseWriter, status int, err error) {
	body, marshalErr := inspect.Marshal(inspect.Failed(err.Error()))
	if marshalErr != nil {
		writeError(w, http.StatusInternalServerError, marshalErr.Error())
		return
	}
	writeJSON(w, status, body)
}

// report answers the question. After an error nothing was answered.
func (p *reports) report(w http.ResponseWriter, r *http.Request, q inspectQuery) error {
	write := func(to io.Writer) error {
		usages, err := p.usages(q)
		if lost := p.ready(); lost != nil { // it may have waited
			err = lost
		}
		if err != nil {
			return err
		}
		return inspect.Stream(to, q.nodes(usages))
	}
	if q.node == "" {
		return p.whole.Serve(w, r, q, "application/json", write)
	}
	var one bytes.Buffer
	if err := write(&one); err != nil {
		return err
	}
	if err := limit.Hold(r.Context(), int64(one.Cap())); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	writeJSON(w, http.StatusOK, one.Bytes())
	return nil
}

// statusError is an error that is answered with a status of its own.
type statusError struct {
	status int
	error
}

// inspectQuery is what a request for a report asks.
type inspectQuery struct {
	node     string // "" for all
	resource accel.Resource
	details  bool
}

func (q inspectQuery) nodes(usages []ledger.NodeUsage) iter.Seq[inspect.Node] {
	return func(yield func(inspect.Node) bool) {
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
}

func (p *reports) query(r *http.Request) (q inspectQuery, err error) {
	if err := p.ready(); err != nil {
		return q, err
	}
	q = inspectQuery{node: r.PathValue("node"), resource: p.reported()}
	values := r.URL.Query()
	if asked := values.Get("resource"); asked != "" {
		if q.resource = accel.Resource(asked); !slices.Contains(p.resources, q.resource) {
			return q, &statusError{http.StatusNotFound, errors.New(inspect.NotManaged(q.resource))}
		}
	}
	if asked := values.Get("details"); asked != "" {
		if q.details, err = strconv.ParseBool(asked); err != nil {
			return q, &statusError{http.StatusBadRequest, fmt.Errorf("details=%q: must be true or false", asked)}
		}
	}
	return q, nil
}

// guideResource is what the report of the GCUShare guide is about.
const guideResource accel.Resource = "enflame.com/gcu-memory"

// reported is the resource of a report for which none is asked: the guide's,
// whatever else is managed, or else the first.
func (p *reports) reported() accel.Resource {
	if slices.Contains(p.resources, guideResource) {
		return guideResource
	}
	return p.resources[0]
}

func (p *reports) usages(q inspectQuery) ([]ledger.NodeUsage, error) {
	if q.node == "" {
		return slices.Collect(p.ledger.Nodes(q.resource)), nil
	}
	usage, ok := p.ledger.Node(q.resource, q.node)
	if ok {
		return []ledger.NodeUsage{usage}, nil
	}
	if problem := p.cluster.Problem(q.node); problem != "" {
		return nil, &statusError{http.StatusNotFound, fmt.Errorf("node %q: %s", q.node, problem)}
	}
	return nil, &statusError{http.StatusNotFound, fmt.Errorf("node %q is unknown or offers no %s", q.node, q.resource)}
}
