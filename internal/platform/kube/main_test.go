package kube

import (
	"os"
	"testing"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

func TestMain(m *testing.M) {
	klog.SetLoggerWithOptions(logr.Discard(), klog.ContextualLogger(true))
	os.Exit(m.Run())
}
