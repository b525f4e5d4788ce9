package admission

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubejson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/klog/v2"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
)

// The ConfigMaps of the chart that configure divvy-node, and the entry of the
// first. Every entry of the second is a named configuration.
const (
	BaseConfigMap  = "divvy-node"
	NamedConfigMap = "divvy-node-configs"
	baseEntry      = "config.yaml"
)

// readTimeout bounds the reading of the ConfigMap that a review is not about. It
// is below the webhook's timeout.
const readTimeout = 3 * time.Second

// Config guards the configuration of divvy-node.
type Config struct {
	// Namespace is that of the ConfigMaps.
	Namespace string
	// Holders returns the pods that hold units now.
	Holders func() []Holder
	// Read returns the data of one of the ConfigMaps, nil when it does not exist.
	Read func(ctx context.Context, name string) (map[string]string, error)
}

// Decide answers a review of a change of either ConfigMap.
func (c Config) Decide(ctx context.Context, request *admissionv1.AdmissionRequest) (*admissionv1.AdmissionResponse, string) {
	resource := metav1.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	if request.Operation != admissionv1.Update || request.Resource != resource || request.Namespace != c.Namespace ||
		request.Name != BaseConfigMap && request.Name != NamedConfigMap {
		return admissionreview.Allow(request.UID), admissionreview.Allowed
	}
	logger := klog.FromContext(ctx)
	before, after, err := c.configs(ctx, request)
	if err != nil {
		// Whoever may change the configuration is not kept from it by what this
		// program lacks: the daemon holds back what it must.
		logger.Error(err, "Allowed a change of the configuration without validation")
		return admissionreview.Allow(request.UID, "divvy-extender could not compare this with the allocations of pods: "+
			admissionreview.Short(err.Error())), admissionreview.Error
	}
	warnings, err := CheckUnits(before, after, c.Holders())
	var refused *UnitError
	if errors.As(err, &refused) {
		logger.Info("Rejected a change of memoryUnit", "resource", refused.Resource, "unit", refused.Old, "asked", refused.New,
			"pods", len(refused.Pods))
		return admissionreview.Deny(request.UID, http.StatusForbidden, metav1.StatusReasonForbidden, refused.Error()),
			admissionreview.Denied
	}
	return admissionreview.Allow(request.UID, warnings...), admissionreview.Allowed
}

// configs returns what holds before and after the change.
func (c Config) configs(ctx context.Context, request *admissionv1.AdmissionRequest) (before, after Configs, err error) {
	var old, changed corev1.ConfigMap
	if err := errors.Join(kubejson.Unmarshal(request.OldObject.Raw, &old), kubejson.Unmarshal(request.Object.Raw, &changed)); err != nil {
		return before, after, fmt.Errorf("the request's objects are not ConfigMaps: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if request.Name == BaseConfigMap {
		named, err := c.Read(ctx, NamedConfigMap)
		return Configs{old.Data[baseEntry], named}, Configs{changed.Data[baseEntry], named}, err
	}
	base, err := c.Read(ctx, BaseConfigMap)
	return Configs{base[baseEntry], old.Data}, Configs{base[baseEntry], changed.Data}, err
}
