package extender

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/divvy-gpu/divvy/internal/core/history"
	"github.com/divvy-gpu/divvy/internal/platform/limit"
	"github.com/divvy-gpu/divvy/internal/scheduler/decision"
)

// explanations answers why a pod is where it is, and what was decided.
type explanations struct {
	decider *decision.Decider
	ready   func() error
	// whole makes whole records, one report at a time with those of all nodes.
	whole *limit.Reports[any]
}

// wholeRecord is what whole makes beside inspectQueries.
type wholeRecord struct{}

// handle answers about the pod that the path names, or with the whole record.
func (x *explanations) handle(w http.ResponseWriter, r *http.Request) {
	err := x.ready()
	switch pod := r.PathValue("pod"); {
	case err != nil:
	case pod == "":
		err = x.whole.Serve(w, r, wholeRecord{}, "application/json", x.write)
	default:
		err = x.explain(w, r, r.PathValue("namespace"), pod)
	}
	if err == nil {
		return
	}
	status := http.StatusInternalServerError
	var unknown *decision.UnknownDecisionError
	switch {
	case errors.As(err, &unknown):
		status = http.StatusNotFound
	case errors.Is(err, errNotReady), errors.Is(err, limit.ErrBusy):
		status = http.StatusServiceUnavailable
	}
	writeError(w, status, err.Error())
}

func (x *explanations) write(to io.Writer) error {
	if err := x.ready(); err != nil { // it may have waited
		return err
	}
	return history.Write(to, x.decider.History(), x.decider.Held())
}

// explain answers about one pod, some kilobytes.
func (x *explanations) explain(w http.ResponseWriter, r *http.Request, namespace, pod string) error {
	e, err := x.decider.Explain(namespace, pod)
	if err != nil {
		return err
	}
	body, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if err := limit.Hold(r.Context(), int64(cap(body))); err != nil {
		return fmt.Errorf("explanation: %w", err)
	}
	writeJSON(w, http.StatusOK, body)
	return nil
}
