package kube

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/pager"
)

// EachItem lists objects page by page with the List function of a typed client, and calls do
// with each. what, in the plural, is what the error says could not be listed.
func EachItem[L runtime.Object](ctx context.Context, what string, options metav1.ListOptions,
	list func(context.Context, metav1.ListOptions) (L, error), do func(runtime.Object),
) error {
	p := pager.New(func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return list(ctx, o) })
	err := p.EachListItem(ctx, options, func(obj runtime.Object) error {
		do(obj)
		return nil
	})
	if err != nil {
		return fmt.Errorf("list the %s: %w", what, err)
	}
	return nil
}
