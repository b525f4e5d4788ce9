package testenv

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/product"
	"github.com/divvy-gpu/divvy/lab/internal/rbacaudit"
)

// Rights compares what accounts of Divvy, each NAMESPACE/NAME, may do with what
// they did since a time, and returns an error that names each right that was not
// used and each request that was refused. The rights are those of the chart,
// rendered once with each list of helm's arguments.
//
// Where not everything ran, complete is false and only refusals are told. elsewhere are uses
// that tests of other packages show, and that here are a matter of time.
func (s *Env) Rights(ctx context.Context, since time.Time, complete bool, accounts []string, elsewhere []rbacaudit.Use,
	rendered ...[]string) error {
	uses, err := rbacaudit.ReadLog(layout.AuditLog, since)
	if err != nil {
		return err
	}
	if !complete {
		return rbacaudit.Refusals(uses, accounts...)
	}
	var manifests []string
	for _, args := range rendered {
		text, err := s.Divvy.Render(ctx, args...)
		if err != nil {
			return err
		}
		manifests = append(manifests, text)
	}
	roles, err := rbacaudit.Read(manifests...)
	if err != nil {
		return err
	}
	return rbacaudit.Compare(roles, slices.Concat(uses, elsewhere), accounts...)
}

// Render returns the text of all objects of the chart, hooks among them, for the
// version of the lab's API server, with more arguments of helm.
func (d *Divvy) Render(ctx context.Context, args ...string) (string, error) {
	version, err := d.client.Discovery().ServerVersion()
	if err != nil {
		return "", fmt.Errorf("render the chart: %w", err)
	}
	text, err := d.cli.Helm(ctx, slices.Concat([]string{
		"template", product.Release, d.cli.chart(), "--namespace", product.Namespace, "--kube-version", version.GitVersion,
	}, args)...)
	if err != nil {
		return "", fmt.Errorf("render the chart: %w", err)
	}
	return text, nil
}
