module github.com/divvy-gpu/divvy/lab/internal/schedulerversions/v1.28

go 1.26

// One module can be there in one version only, by its name; under other names it
// is there in others as well.
replace (
	scheduler.example/release-1.23 => k8s.io/kube-scheduler v0.23.0
	scheduler.example/release-1.24 => k8s.io/kube-scheduler v0.24.0
	scheduler.example/release-1.25 => k8s.io/kube-scheduler v0.25.0
	scheduler.example/release-1.26 => k8s.io/kube-scheduler v0.26.0
	scheduler.example/release-1.27 => k8s.io/kube-scheduler v0.27.16
)

replace github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode => ../decode

require (
	github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode v0.0.0
	k8s.io/kube-scheduler v0.28.0
	scheduler.example/release-1.23 v0.0.0
	scheduler.example/release-1.24 v0.0.0
	scheduler.example/release-1.25 v0.0.0
	scheduler.example/release-1.26 v0.0.0
	scheduler.example/release-1.27 v0.0.0
)

require (
	github.com/go-logr/logr v1.2.4 // indirect
	github.com/gogo/protobuf v1.3.2 // indirect
	github.com/google/gofuzz v1.2.0 // indirect
	github.com/json-iterator/go v1.1.12 // indirect
	github.com/modern-go/concurrent v0.0.0-20180306012644-bacd9c7ef1dd // indirect
	github.com/modern-go/reflect2 v1.0.2 // indirect
	golang.org/x/net v0.23.0 // indirect
	golang.org/x/text v0.14.0 // indirect
	gopkg.in/inf.v0 v0.9.1 // indirect
	gopkg.in/yaml.v2 v2.4.0 // indirect
	k8s.io/api v0.28.0 // indirect
	k8s.io/apimachinery v0.28.0 // indirect
	k8s.io/component-base v0.28.0 // indirect
	k8s.io/klog/v2 v2.100.1 // indirect
	k8s.io/utils v0.0.0-20230406110748-d93618cff8a2 // indirect
	sigs.k8s.io/json v0.0.0-20221116044647-bc3834ca7abd // indirect
	sigs.k8s.io/structured-merge-diff/v4 v4.2.3 // indirect
	sigs.k8s.io/yaml v1.3.0 // indirect
)
