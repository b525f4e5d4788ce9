package logging

import (
	"context"

	"k8s.io/klog/v2"
)

// Changes logs an error of something that is tried again and again when it differs from
// the one before, and not each time. The zero value has logged nothing. It is not safe
// for concurrent use.
type Changes string

// Log logs err with the logger of ctx, unless the one before was the same or ctx has
// ended. After nil, which says that it worked, the next error is logged in any case.
func (c *Changes) Log(ctx context.Context, err error, message string) {
	switch {
	case err == nil:
		*c = ""
	case string(*c) != err.Error() && ctx.Err() == nil:
		klog.FromContext(ctx).Error(err, message)
		*c = Changes(err.Error())
	}
}
