//go:build e2e

package installation

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/divvy-gpu/divvy/internal/report/doctor"
	"github.com/divvy-gpu/divvy/internal/report/why"
	"github.com/divvy-gpu/divvy/lab/internal/audit"
	"github.com/divvy-gpu/divvy/lab/internal/poll"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/release"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

// TestSchedulerForms changes a dedicated scheduler from the extender to the plugin and back
// while forty pods share the cards and others arrive. The forty keep their allocations, and
// none of their containers is started again. The plugin places pods, preempts one, and
// doctor, inspect and why work as with the extender.
func TestSchedulerForms(t *testing.T) {
	ctx := t.Context()
	install(t, "scheduler.mode=dedicated", "scheduler.form=extender")
	class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "divvy-forms"}, Value: 1000}
	if _, err := lab.Client.SchedulingV1().PriorityClasses().Create(ctx, class, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := lab.Client.SchedulingV1().PriorityClasses().Delete(context.WithoutCancel(ctx), class.Name, metav1.DeleteOptions{})
		if err != nil {
			t.Error(err)
		}
	})
	important := func(name string, units int64) *corev1.Pod {
		pod := lab.Pods.New(name, testenv.Container("app", units))
		pod.Spec.PriorityClassName = class.Name
		return pod
	}
	var pods []*corev1.Pod
	for i := range sharing {
		pods = append(pods, important(fmt.Sprintf("shared-%02d", i), 2)) // of five cards of eight
	}
	runPods(t, pods...)
	wantForm(t, "extender", "kube-scheduler")
	auditor := audit.New(lab)
	before, err := auditor.Check(ctx, audit.DeviceNodes)
	if err != nil {
		t.Fatal(err)
	}
	alive := lives(t)
	unchanged := func(t *testing.T) {
		t.Helper()
		if diff := cmp.Diff(alive, only(lives(t), "shared-")); diff != "" {
			t.Errorf("containers (-before +after):\n%s", diff)
		}
		if err := poll.Until(t.Context(), podTimeout, "the books to be as before", func(ctx context.Context) error {
			after, err := auditor.Check(ctx, audit.DeviceNodes)
			if err != nil {
				return err
			}
			if diff := cmp.Diff(sorted(before), sorted(after)); diff != "" {
				return fmt.Errorf("books (-before +after):\n%s", diff)
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	change := func(t *testing.T, form string) {
		t.Helper()
		whilePodsArrive(t, func() { helm(t, lab.Divvy.UpgradeArgs("scheduler.form="+form)...) })
		unchanged(t)
	}

	t.Run("to the plugin", func(t *testing.T) {
		change(t, "plugin")
		wantForm(t, "scheduler")
		text, err := lab.In(product.Namespace).Pods.Exec(t.Context(), "deployment/divvy-scheduler", "scheduler",
			"/usr/bin/"+release.Schedulers[0], "--version")
		if want := "serves kube-scheduler " + kubernetesVersion(t); err != nil || !strings.Contains(text, want) {
			t.Errorf("its version: %v: %s, want %q", err, text, want)
		}
	})
	t.Run("the plugin places and preempts", func(t *testing.T) {
		whole := []string{"whole-1", "whole-2", "whole-3"} // the other three cards
		for _, name := range whole {
			runPod(t, lab.Pods.New(name, testenv.Container("app", 16)))
			wantScheduler(t, name, testenv.Scheduler)
		}
		if _, err := auditor.Check(ctx, audit.DeviceNodes); err != nil {
			t.Error(err)
		}
		runPods(t, important("urgent", 16))
		left := slices.DeleteFunc(whole, func(name string) bool {
			pod, err := lab.Pods.API.Get(ctx, name, metav1.GetOptions{})
			return err != nil || pod.DeletionTimestamp != nil
		})
		if len(left) != 2 {
			t.Errorf("left are %v, want two: one is enough for the pod", left)
		}
		if err := lab.Pods.Delete(ctx, append(left, "urgent")...); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("the plugin reports", func(t *testing.T) {
		if err := poll.Until(ctx, podTimeout, "the doctor to find nothing", func(ctx context.Context) error {
			text, err := lab.CLI.Kubectl(ctx, "divvy", "doctor", "--output", "json", "--settle", "0")
			var report doctor.Report
			if json.Unmarshal([]byte(text), &report) == nil && len(report.Findings()) > 0 {
				err = fmt.Errorf("%+v", report.Findings())
			}
			return err
		}); err != nil {
			t.Error(err)
		}
		text, err := lab.CLI.Kubectl(ctx, "divvy", "inspect", "-o", "wide")
		if err != nil || strings.Count(text, "shared-") != sharing {
			t.Errorf("inspect: %v:\n%s\nwant the %d pods", err, text, sharing)
		}
		createPod(t, lab.Pods.New("too-large", testenv.Container("app", 17)))
		if err := poll.Until(ctx, podTimeout, "why to know the reason", func(ctx context.Context) error {
			e, _, err := lab.CLI.Explain(ctx, lab.Pods.Namespace, "pod/too-large")
			if err == nil && (len(e.Causes) != 1 || e.Causes[0].Code != why.LargerThanDevice) {
				err = fmt.Errorf("the causes are %+v", e.Causes)
			}
			return err
		}); err != nil {
			t.Error(err)
		}
		if err := lab.Pods.Delete(ctx, "too-large"); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("back to the extender", func(t *testing.T) {
		change(t, "extender")
		wantForm(t, "extender", "kube-scheduler")
	})
}

func kubernetesVersion(t *testing.T) string {
	t.Helper()
	version, err := lab.Client.Discovery().ServerVersion()
	if err != nil {
		t.Fatal(err)
	}
	return version.GitVersion
}

// wantForm checks which containers the pods of the dedicated scheduler have.
func wantForm(t *testing.T, containers ...string) {
	t.Helper()
	pods, err := lab.Divvy.Pods(t.Context(), testenv.Scheduler)
	if err != nil || len(pods) != 2 {
		t.Fatalf("%d pods of %s, %v; want 2", len(pods), testenv.Scheduler, err)
	}
	for _, pod := range pods {
		var names []string
		for _, container := range pod.Spec.Containers {
			names = append(names, container.Name)
		}
		if !slices.Equal(names, containers) {
			t.Errorf("pod %s/%s has containers %v, want %v", product.Namespace, pod.Name, names, containers)
		}
	}
}
