module github.com/divvy-gpu/divvy/lab/internal/schedulerversions/v1.37

go 1.26.0

// One module can be there in one version only, by its name; under other names it
// is there in others as well.
replace (
	scheduler.example/release-1.29 => k8s.io/kube-scheduler v0.29.0
	scheduler.example/release-1.30 => k8s.io/kube-scheduler v0.30.14
	scheduler.example/release-1.31 => k8s.io/kube-scheduler v0.31.0
	scheduler.example/release-1.32 => k8s.io/kube-scheduler v0.32.0
	scheduler.example/release-1.33 => k8s.io/kube-scheduler v0.33.13
	scheduler.example/release-1.34 => k8s.io/kube-scheduler v0.34.13
	scheduler.example/release-1.35 => k8s.io/kube-scheduler v0.35.10
	scheduler.example/release-1.36 => k8s.io/kube-scheduler v0.36.6
)

replace github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode => ../decode

require (
	github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode v0.0.0
	k8s.io/kube-scheduler v0.37.1
	scheduler.example/release-1.29 v0.0.0
	scheduler.example/release-1.30 v0.0.0
	scheduler.example/release-1.31 v0.0.0
	scheduler.example/release-1.32 v0.0.0
	scheduler.example/release-1.33 v0.0.0
	scheduler.example/release-1.34 v0.0.0
	scheduler.example/release-1.35 v0.0.0
	scheduler.example/release-1.36 v0.0.0
)

require (
	github.com/fxamacker/cbor/v2 v2.9.1 // indirect
	github.com/go-logr/logr v1.4.3 // indirect
	github.com/json-iterator/go v1.1.12 // indirect
	github.com/modern-go/concurrent v0.0.0-20180306012644-bacd9c7ef1dd // indirect
	github.com/modern-go/reflect2 v1.0.3-0.20250322232337-35a7c28c31ee // indirect
	github.com/x448/float16 v0.8.4 // indirect
	go.yaml.in/yaml/v2 v2.4.4 // indirect
	golang.org/x/net v0.57.0 // indirect
	golang.org/x/text v0.40.0 // indirect
	gopkg.in/inf.v0 v0.9.1 // indirect
	k8s.io/api v0.37.1 // indirect
	k8s.io/apimachinery v0.37.1 // indirect
	k8s.io/component-base v0.37.1 // indirect
	k8s.io/klog/v2 v2.140.0 // indirect
	k8s.io/kube-openapi v0.0.0-20260721132016-d427ff9ee9ad // indirect
	k8s.io/utils v0.0.0-20260626114624-be93311217bd // indirect
	sigs.k8s.io/json v0.0.0-20250730193827-2d320260d730 // indirect
	sigs.k8s.io/randfill v1.0.0 // indirect
	sigs.k8s.io/structured-merge-diff/v6 v6.4.2 // indirect
	sigs.k8s.io/yaml v1.6.0 // indirect
)
