package extender

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/limit"
)

// Election says which of several replicas answers. *leader.Elector is one.
type Election interface {
	// Leading reports whether this replica leads now.
	Leading() bool
	// Leader returns the address, host:port, of the replica that leads as far as is
	// known, "" when that is this one or none, and what is closed when it may have
	// changed.
	Leader() (address string, changed <-chan struct{})
	// Until returns until when this replica may act, or why it may not. It may wait, as
	// long as ctx.
	Until(ctx context.Context) (time.Time, error)
}

// ForwardedHeader marks a request that a replica handed on. It is not handed on
// again. The value is forwardedBelieved, or forwardedStranger for a caller that may
// not bind, whom the leader is not to believe either: it sees the replica's
// certificate only.
const ForwardedHeader = "Divvy-Forwarded"

const (
	forwardedBelieved = "1"
	forwardedStranger = "stranger"
)

const (
	// tryAgain is the pause before the leader is asked again that could not be reached.
	tryAgain = 100 * time.Millisecond
	// maxHeld is how many binds may wait for a leader: kube-scheduler has one for each
	// of its pods that is being bound.
	maxHeld = 1000
	// askTimeout bounds what the leader takes for a question that kube-scheduler waits
	// for in its one scheduling loop: meanwhile it places no pod of the cluster.
	askTimeout = time.Second
)

// errNoLeader is in the error of a request that no leader answered in time.
var errNoLeader = errors.New("no replica of the extender is the leader yet; retry the request")

// errFollows is why a replica does not answer by itself.
var errFollows = errors.New("another replica is the leader")

// errUnknownLeader: the Lease is free, or this replica cannot read it.
var errUnknownLeader = errors.New("no leader is known")

// errMisdirected says that the replica that was asked does not lead, or stops.
var errMisdirected = errors.New("it is no longer the leader")

// replica is this replica among those that may answer: one leads, the others hand
// requests to it.
type replica struct {
	election Election          // nil where there is one
	forward  http.RoundTripper // Config.Forward
	state    func() error      // Config.Ready
	patience time.Duration     // Config.Hold
	callers  *callers
	// forwarded counts what became of requests while another replica led, by result.
	forwarded *prometheus.CounterVec
	link      link
	// held has a token for each bind that waits for a leader.
	held chan struct{}
}

// errNotReady is in every error of ready.
var errNotReady = errors.New("the extender is not ready")

// ready says why this replica cannot answer yet.
func (p *replica) ready() error {
	err := p.state()
	if err == nil && p.election != nil && !p.election.Leading() {
		err = errFollows
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errNotReady, err)
	}
	return nil
}

// reachable returns nil when requests can be sent to this replica: it answers them,
// or hands them on.
func (p *replica) reachable() error {
	err := p.ready()
	if p.forward == nil || !errors.Is(err, errFollows) {
		return err
	}
	if address, _ := p.election.Leader(); address == "" {
		return fmt.Errorf("%w: %w", errNotReady, errUnknownLeader)
	}
	return nil
}

// led lets this replica answer while it leads. Otherwise the request is handed to
// the one that does, whose answer it is then.
//
// While none leads, or the leader does not answer, a bind waits: kube-scheduler binds
// beside its scheduling loop. A bounded number does, by held. All other requests fail
// at once: kube-scheduler asks them in that loop, where every pod of the cluster waits
// for the answer, also those that request no accelerator; it tries the pod again by
// itself. A bind that is made twice because an answer was lost does no harm: a pod that
// is bound to the node already is left as it is.
func (p *replica) led(v verb, here http.Handler) http.Handler {
	if p.election == nil {
		return here
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		forwarded := r.Header.Get(ForwardedHeader) != ""
		switch {
		case forwarded && p.ready() != nil: // one that is stopping as well
			writeError(w, http.StatusMisdirectedRequest, errMisdirected.Error())
			return
		case forwarded, p.election.Leading():
			here.ServeHTTP(w, r)
			return
		case v.allow != nil:
			// The leader knows no more of the caller than that a replica asks for it.
			if err := v.allow(r); err != nil {
				fail(w, v, http.StatusForbidden, err)
				return
			}
		}
		body := getBuffer()
		defer func() { putBuffer(body) }()
		var done func()
		var err error
		if *body, done, err = readBody(w, r, p.callers, v.maxBody, (*body)[:0]); err != nil {
			fail(w, v, http.StatusBadRequest, err)
			return
		}
		defer done()
		if v.acts {
			err = p.hold(w, r, here, *body)
		} else {
			err = p.handOn(w, r, v, *body)
		}
		if err != nil {
			logError(r.Context(), err, "path", r.URL.Path)
			p.forwarded.WithLabelValues("failed").Inc()
			fail(w, v, http.StatusServiceUnavailable, err)
		}
	})
}

// handOn answers by the leader. An error says that nothing was answered.
func (p *replica) handOn(w http.ResponseWriter, r *http.Request, v verb, body []byte) error {
	ctx := r.Context()
	if v.name != verbInspect && v.name != verbExplain {
		bounded, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		ctx = bounded
	}
	address, _ := p.election.Leader()
	if err := p.askLeader(ctx, w, r, address, body); err != nil {
		return fmt.Errorf("%w: %w", errNoLeader, err)
	}
	return nil
}

// hold answers by the leader, as soon as there is one. An error says that nothing was
// answered.
func (p *replica) hold(w http.ResponseWriter, r *http.Request, here http.Handler, body []byte) error {
	select {
	case p.held <- struct{}{}:
		defer func() { <-p.held }()
	default:
		return fmt.Errorf("%w: %d requests are waiting for one", errNoLeader, cap(p.held))
	}
	ctx, cancel := context.WithTimeout(r.Context(), p.patience)
	defer cancel()
	for {
		address, changed := p.election.Leader()
		if p.election.Leading() {
			p.forwarded.WithLabelValues("here").Inc()
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
			here.ServeHTTP(w, r)
			return nil
		}
		err := p.askLeader(ctx, w, r, address, body)
		if err == nil || errors.Is(err, limit.ErrBusy) {
			return err
		}
		again := time.NewTimer(tryAgain)
		select {
		case <-changed:
			again.Stop()
		case <-again.C:
		case <-ctx.Done():
			again.Stop()
			return fmt.Errorf("%w: %w", errNoLeader, err)
		}
	}
}

// askLeader hands the request to the leader at the address and its answer on. An error
// says that nothing was answered.
func (p *replica) askLeader(ctx context.Context, w http.ResponseWriter, r *http.Request, address string, body []byte) error {
	if address == "" || p.forward == nil {
		return errUnknownLeader
	}
	ctx, done, err := p.link.to(ctx, address)
	if err == nil {
		defer done()
		answered, failed := p.ask(ctx, w, r, address, body)
		if answered {
			p.forwarded.WithLabelValues("leader").Inc()
			return nil
		}
		if err = errSilent; errors.Is(failed, errMisdirected) || errors.Is(failed, limit.ErrBusy) {
			err = failed
		}
		klog.FromContext(ctx).V(2).Info("The leader did not respond to a request", "leader", address, "path", r.URL.Path,
			"reason", failed.Error())
	}
	return fmt.Errorf("the leader at %s: %w", address, err)
}

// ask hands the request to the leader and its answer on. Once any of the answer is
// written it is answered, also where the rest is lost: the connection is cut then, so
// that the client does not take a part for the whole.
func (p *replica) ask(ctx context.Context, w http.ResponseWriter, r *http.Request, address string, body []byte) (answered bool,
	err error) {
	// The address is what the leader published, read from its Lease and pod.
	target := "https://" + address + r.URL.RequestURI()
	request, err := http.NewRequestWithContext(ctx, r.Method, target, bytes.NewReader(body)) //nolint:gosec // see above
	if err != nil {
		return false, err
	}
	if kind := r.Header.Get("Content-Type"); kind != "" {
		request.Header.Set("Content-Type", kind)
	}
	request.Header.Set(ForwardedHeader, forwardedBelieved)
	if p.callers.mayBind(r) != nil {
		request.Header.Set(ForwardedHeader, forwardedStranger)
	}
	response, err := p.forward.RoundTrip(request)
	if err != nil {
		return false, err
	}
	defer response.Body.Close() //nolint:errcheck // what matters of it was read
	if response.StatusCode == http.StatusMisdirectedRequest {
		return false, errMisdirected
	}
	// The first part is read before anything is written: most answers are whole then,
	// and can be asked for again when the leader dies in the middle of one.
	part := int64(keepBuffer)
	if response.ContentLength >= 0 {
		part = min(part, response.ContentLength)
	}
	if err := limit.Hold(ctx, part); err != nil {
		return false, fmt.Errorf("response of the leader: %w", err)
	}
	defer limit.Drop(ctx, part)
	first := getBuffer()
	defer func() { putBuffer(first) }()
	into := bytes.NewBuffer((*first)[:0])
	_, err = io.Copy(into, io.LimitReader(response.Body, keepBuffer))
	if *first = into.Bytes(); err != nil {
		return false, fmt.Errorf("its response was truncated: %w", err)
	}
	w.Header().Set("Content-Type", response.Header.Get("Content-Type"))
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(response.StatusCode)
	if _, err := w.Write(*first); err != nil {
		return true, nil // the client is gone
	}
	if _, err := io.Copy(w, response.Body); err != nil {
		panic(http.ErrAbortHandler) //nolint:forbidigo // net/http's way to cut a connection
	}
	return true, nil
}

// fail answers with an error where the verb has a place for it; status is for those
// that have none.
func fail(w http.ResponseWriter, v verb, status int, err error) {
	switch {
	case v.name == verbInspect:
		failReport(w, status, err)
	case v.fail == nil:
		writeError(w, status, err.Error())
	default:
		writeJSON(w, http.StatusOK, v.fail(nil, err.Error()))
	}
}

// Reports and explanations, where verbs are told apart.
const (
	verbInspect = "inspect"
	verbExplain = "explain"
)

// lead bounds what is done in ctx by the time in which this replica may act. It is
// called before anything is decided: what is decided while this replica leads is
// written before another can, or not at all.
func (p *replica) lead(ctx context.Context) (context.Context, context.CancelFunc, error) {
	if p.election == nil {
		return ctx, func() {}, nil
	}
	until, err := p.election.Until(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", errNotReady, err)
	}
	bounded, cancel := context.WithDeadline(ctx, until)
	return bounded, cancel, nil
}
