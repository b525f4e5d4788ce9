package extender

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/scheduler/admission"
)

// Routes of the reviews, which the API server asks over TLS.
const (
	configRoute    = "POST /admission/config"
	schedulerRoute = "POST /admission/scheduler"
	unitsRoute     = "POST /admission/units"
	claimsRoute    = "POST /admission/claims"
)

// withReviews adds the reviews to what is answered anyway. Any replica answers
// them, whether it leads or not; those of claims it hands to the leader.
func (p *program) withReviews(next http.Handler, registry prometheus.Registerer) (http.Handler, error) {
	results := map[string][]string{"config": {admissionreview.Allowed, admissionreview.Denied, admissionreview.Bad, admissionreview.Error}}
	if p.options.TLS.SchedulerName != "" {
		results["scheduler"] = []string{admissionreview.Converted, admissionreview.Allowed, admissionreview.Bad, admissionreview.Error}
	}
	if p.claims != nil {
		results["units"] = []string{admissionreview.Converted, admissionreview.Allowed, admissionreview.Denied, admissionreview.Bad,
			admissionreview.Error}
		results["claims"] = results["config"]
	}
	observe, err := admissionreview.NewMetrics(registry, results)
	if err != nil {
		return nil, fmt.Errorf("metrics of the reviews: %w", err)
	}
	reviews := admissionreview.New(observe)
	mux := http.NewServeMux()
	mux.Handle("/", next)
	config := admission.Config{Namespace: p.options.TLS.namespace(), Holders: p.holders, Read: p.readConfigMap}
	mux.Handle(configRoute, reviews.Handler("config", p.knows, config.Decide))
	if p.options.TLS.SchedulerName != "" {
		scheduler := admission.Scheduler{Name: p.options.TLS.SchedulerName, Resources: p.placement.resources}
		mux.Handle(schedulerRoute, reviews.Handler("scheduler", nil, scheduler.Decide))
	}
	if p.claims != nil {
		mux.Handle(unitsRoute, reviews.Handler("units", nil, p.claims.Translate))
		// One replica knows which claims were admitted a moment ago.
		mux.Handle(claimsRoute, p.extender.Led("claims", admissionreview.MaxBody,
			reviews.Handler("claims", p.claims.Ready, p.claims.Validate)))
	}
	return mux, nil
}

// knows returns nil when the cluster state says what pods hold.
func (p *program) knows() error {
	if !p.books.Synced() {
		return errors.New("the ledger is still being read from the API server")
	}
	return nil
}

// holders are the pods that hold units, by the cluster state.
func (p *program) holders() []admission.Holder {
	type offer struct {
		resource accel.Resource
		node     string
	}
	units := map[offer]string{}
	var out []admission.Holder
	for _, pod := range p.books.Placed() {
		for _, request := range pod.Requests {
			at := offer{request.Resource, pod.Node}
			unit, asked := units[at]
			if !asked {
				usage, _ := p.ledger.Node(at.resource, at.node) // without an offer there is no unit
				unit = usage.Unit
				units[at] = unit
			}
			out = append(out, admission.Holder{Pod: pod.Ref, Node: pod.Node, Resource: request.Resource, ConfigName: pod.Config,
				Unit: unit})
		}
	}
	return out
}

func (p *program) readConfigMap(ctx context.Context, name string) (map[string]string, error) {
	found, err := p.clients.Kubernetes.CoreV1().ConfigMaps(p.options.TLS.namespace()).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read ConfigMap %s/%s: %w", p.options.TLS.namespace(), name, err)
	}
	return found.Data, nil
}
