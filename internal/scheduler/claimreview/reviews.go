package claimreview

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubejson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/validation/field"
	coreinformers "k8s.io/client-go/informers/core/v1"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/platform/informers"
)

// readTimeout bounds the reading of the claims that a pod names, and of nodes. It is below the webhook's timeout.
const readTimeout = 3 * time.Second

// Reviews decides about pods and claims. It is safe for concurrent use.
type Reviews struct {
	units     []Unit
	client    kubernetes.Interface
	quotas    *Quotas
	templates *Templates
	informers informers.Group
	// reading has an element while the nodes are read for a class: they are many, and once at a time is
	// enough.
	reading chan struct{}
}

// New returns Reviews for these units, which write templates while leading is true.
func New(client kubernetes.Interface, units []Unit, leading func() bool) *Reviews {
	r := &Reviews{units: units, client: client, quotas: NewQuotas(units, time.Now), templates: NewTemplates(client, leading, time.Now),
		reading: make(chan struct{}, 1)}
	r.informers.Add("claims", resourceinformers.NewResourceClaimInformer(client, metav1.NamespaceAll, 0, nil), trimClaim,
		func(before, after any) {
			claim, _ := before.(*resourceapi.ResourceClaim)
			now, _ := after.(*resourceapi.ResourceClaim)
			r.quotas.Claim(claim, now)
		})
	r.informers.Add("quotas", coreinformers.NewResourceQuotaInformer(client, metav1.NamespaceAll, 0, nil), nil,
		func(before, after any) {
			quota, _ := before.(*corev1.ResourceQuota)
			now, _ := after.(*corev1.ResourceQuota)
			r.quotas.Quota(quota, now)
		})
	r.templates.watch(&r.informers)
	return r
}

// trimClaim keeps what a claim asks for.
func trimClaim(obj any) (any, error) {
	claim, ok := obj.(*resourceapi.ResourceClaim)
	if !ok {
		return obj, nil
	}
	return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
		ResourceVersion: claim.ResourceVersion}, Spec: claim.Spec}, nil
}

// Run follows the cluster and keeps templates until ctx ends.
func (r *Reviews) Run(ctx context.Context) {
	var parts sync.WaitGroup
	parts.Go(func() { r.informers.Run(ctx) })
	parts.Go(func() { r.templates.run(ctx, r.Ready) })
	parts.Wait()
}

// Ready returns nil once quotas and what counts against them are known.
func (r *Reviews) Ready() error {
	if err := r.informers.Synced(); err != nil {
		return fmt.Errorf("claims and quotas are still being read from the API server: %w", err)
	}
	return nil
}

// What is reviewed.
var (
	podsResource      = metav1.GroupVersionResource{Version: "v1", Resource: "pods"}
	claimsResource    = metav1.GroupVersionResource{Group: resourceapi.GroupName, Version: "v1", Resource: "resourceclaims"}
	classesResource   = metav1.GroupVersionResource{Group: resourceapi.GroupName, Version: "v1", Resource: "deviceclasses"}
	templatesResource = metav1.GroupVersionResource{Group: resourceapi.GroupName, Version: "v1", Resource: "resourceclaimtemplates"}
)

// Translate answers the review of a new pod in a namespace that opted in: units become claims. It
// writes nothing; Templates follows the pod.
func (r *Reviews) Translate(ctx context.Context, request *admissionv1.AdmissionRequest) (*admissionv1.AdmissionResponse, string) {
	if request.Operation != admissionv1.Create || request.Resource != podsResource || request.SubResource != "" {
		return admissionreview.Allow(request.UID), admissionreview.Allowed
	}
	var pod corev1.Pod
	if err := kubejson.Unmarshal(request.Object.Raw, &pod); err != nil {
		return unreadable(request, err)
	}
	pod.Namespace = request.Namespace
	all, warnings, err := Translate(&pod, r.units)
	if len(all) > 0 {
		both, failed := r.both(ctx, &pod)
		if failed != nil {
			return admissionreview.Deny(request.UID, http.StatusInternalServerError, metav1.StatusReasonInternalError,
				"the claims of the pod could not be read: "+admissionreview.Short(failed.Error())), admissionreview.Error
		}
		err = both
	}
	if err != nil {
		return invalid(request, err)
	}
	if len(all) == 0 {
		return admissionreview.Allow(request.UID), admissionreview.Allowed
	}
	change, err := patch(&pod, all)
	if err != nil {
		return admissionreview.Deny(request.UID, http.StatusInternalServerError, metav1.StatusReasonInternalError, err.Error()),
			admissionreview.Error
	}
	return admissionreview.Patch(request.UID, change, warnings...), admissionreview.Converted
}

// Validate answers the review of a new claim, template of claims, or pod, and of a DeviceClass that is
// new or changes.
func (r *Reviews) Validate(ctx context.Context, request *admissionv1.AdmissionRequest) (*admissionv1.AdmissionResponse, string) {
	if request.Resource == classesResource {
		return r.validateClass(ctx, request)
	}
	if request.Operation != admissionv1.Create || request.SubResource != "" {
		return admissionreview.Allow(request.UID), admissionreview.Allowed
	}
	dryRun := request.DryRun != nil && *request.DryRun
	switch request.Resource {
	case claimsResource:
		var claim resourceapi.ResourceClaim
		if err := kubejson.Unmarshal(request.Object.Raw, &claim); err != nil {
			return unreadable(request, err)
		}
		claim.Namespace = request.Namespace
		if err := CheckDevices(field.NewPath("spec", "devices"), &claim.Spec.Devices); err != nil {
			return invalid(request, err)
		}
		if err := r.quotas.Admit(&claim, request.UserInfo.Username, dryRun); err != nil {
			return forbidden(request, err)
		}
	case templatesResource:
		var template resourceapi.ResourceClaimTemplate
		if err := kubejson.Unmarshal(request.Object.Raw, &template); err != nil {
			return unreadable(request, err)
		}
		if err := CheckDevices(field.NewPath("spec", "spec", "devices"), &template.Spec.Spec.Devices); err != nil {
			return invalid(request, err)
		}
	case podsResource:
		var pod corev1.Pod
		if err := kubejson.Unmarshal(request.Object.Raw, &pod); err != nil {
			return unreadable(request, err)
		}
		pod.Namespace = request.Namespace
		if err := r.quotas.AdmitPod(&pod); err != nil {
			return forbidden(request, err)
		}
		both, err := r.both(ctx, &pod)
		if err != nil {
			// Both in one container is rejected on the node as well.
			klog.FromContext(ctx).Error(err, "Allowed a pod without reading its claims")
			return admissionreview.Allow(request.UID, "divvy-extender could not read the claims of the pod: "+
				admissionreview.Short(err.Error())), admissionreview.Error
		}
		if both != nil {
			return invalid(request, both)
		}
	}
	return admissionreview.Allow(request.UID), admissionreview.Allowed
}

// validateClass answers the review of a class that gets an extended resource.
func (r *Reviews) validateClass(ctx context.Context, request *admissionv1.AdmissionRequest) (*admissionv1.AdmissionResponse, string) {
	update := request.Operation == admissionv1.Update
	if request.Operation != admissionv1.Create && !update || request.SubResource != "" {
		return admissionreview.Allow(request.UID), admissionreview.Allowed
	}
	var class, before resourceapi.DeviceClass
	if err := kubejson.Unmarshal(request.Object.Raw, &class); err != nil {
		return unreadable(request, err)
	}
	if update {
		if err := kubejson.Unmarshal(request.OldObject.Raw, &before); err != nil {
			return unreadable(request, err)
		}
	}
	name := ptr.Deref(class.Spec.ExtendedResourceName, "")
	if name == "" || name == ptr.Deref(before.Spec.ExtendedResourceName, "") || len(driversOf(&class)) == 0 {
		return admissionreview.Allow(request.UID), admissionreview.Allowed
	}
	offers, failed := r.offers(ctx, &class)
	warnings, err := CheckClass(&class, r.units, offers)
	switch {
	case err != nil:
		return invalid(request, err)
	case failed != nil:
		// "kubectl divvy doctor" reports what this lets through.
		klog.FromContext(ctx).Error(failed, "Allowed a DeviceClass without reading what nodes offer")
		return admissionreview.Allow(request.UID, "divvy-extender could not read which nodes offer "+name+": "+
			admissionreview.Short(failed.Error())), admissionreview.Error
	}
	return admissionreview.Allow(request.UID, warnings...), admissionreview.Allowed
}

// offers reads which nodes offer the extended resource of a class, for one class at a time.
func (r *Reviews) offers(ctx context.Context, class *resourceapi.DeviceClass) (Offers, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	select {
	case r.reading <- struct{}{}:
	case <-ctx.Done():
		return Offers{}, fmt.Errorf("wait for another class: %w", ctx.Err())
	}
	defer func() { <-r.reading }()
	return offersOf(ctx, r.client, class)
}

// both returns which containers have a claim and units of one vendor, as far as the claims exist. The
// second error says that they could not be read.
func (r *Reviews) both(ctx context.Context, pod *corev1.Pod) (both, failed error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	var errs []error
	both = CheckContainers(pod, r.units, func(claim corev1.PodResourceClaim) *resourceapi.DeviceClaim {
		devices, err := r.devicesOf(ctx, pod.Namespace, claim)
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("claim %s: %w", claim.Name, err))
		}
		return devices
	})
	return both, errors.Join(errs...)
}

// devicesOf reads the claim or the template that a pod names.
func (r *Reviews) devicesOf(ctx context.Context, namespace string, claim corev1.PodResourceClaim) (*resourceapi.DeviceClaim, error) {
	switch {
	case claim.ResourceClaimName != nil:
		found, err := r.client.ResourceV1().ResourceClaims(namespace).Get(ctx, *claim.ResourceClaimName, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		return &found.Spec.Devices, nil
	case claim.ResourceClaimTemplateName != nil:
		found, err := r.client.ResourceV1().ResourceClaimTemplates(namespace).Get(ctx, *claim.ResourceClaimTemplateName,
			metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		return &found.Spec.Spec.Devices, nil
	}
	return nil, nil
}

func unreadable(request *admissionv1.AdmissionRequest, err error) (*admissionv1.AdmissionResponse, string) {
	return admissionreview.Deny(request.UID, http.StatusBadRequest, metav1.StatusReasonBadRequest,
		"the request's object cannot be read: "+err.Error()), admissionreview.Bad
}

func invalid(request *admissionv1.AdmissionRequest, err error) (*admissionv1.AdmissionResponse, string) {
	return admissionreview.Deny(request.UID, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, err.Error()),
		admissionreview.Denied
}

func forbidden(request *admissionv1.AdmissionRequest, err error) (*admissionv1.AdmissionResponse, string) {
	return admissionreview.Deny(request.UID, http.StatusForbidden, metav1.StatusReasonForbidden, err.Error()), admissionreview.Denied
}
