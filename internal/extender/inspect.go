package extender

import (
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
	status, report := e.inspect(r)
	body, err := inspect.Marshal(report)
	if err != nil {
		klog.FromContext(r.Context()).Error(err, "Cannot answer inspect")
		writeError(w, http.StatusInternalServerError, err.Error())
		return
	}
	writeJSON(w, status, body)
}

func (e *Extender) inspect(r *http.Request) (status int, report inspect.Report) {
	if err := e.ready(); err != nil {
		return http.StatusServiceUnavailable, inspect.Failed(err.Error())
	}
	resource := e.config.Resources[0]
	query := r.URL.Query()
	if asked := query.Get("resource"); asked != "" {
		if resource = accel.Resource(asked); !slices.Contains(e.config.Resources, resource) {
			return http.StatusNotFound, inspect.Failed(fmt.Sprintf("resource %q is not managed here", asked))
		}
	}
	details := false
	if asked := query.Get("details"); asked != "" {
		var err error
		if details, err = strconv.ParseBool(asked); err != nil {
			return http.StatusBadRequest, inspect.Failed(fmt.Sprintf("details=%q: must be true or false", asked))
		}
	}

	usages := []ledger.NodeUsage{}
	if name := r.PathValue("node"); name == "" {
		usages = e.config.Ledger.Nodes(resource)
	} else if usage, ok := e.config.Ledger.Node(resource, name); ok {
		usages = append(usages, usage)
	} else {
		text := fmt.Sprintf("node %q is not known or offers no %s", name, resource)
		if problem := e.config.Cluster.Problem(name); problem != "" {
			text = fmt.Sprintf("node %q: %s", name, problem)
		}
		return http.StatusNotFound, inspect.Failed(text)
	}
	report = inspect.FromUsage(resource, usages)
	if !details {
		report = report.Guide()
	}
	return http.StatusOK, report
}
