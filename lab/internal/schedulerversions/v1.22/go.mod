module github.com/divvy-gpu/divvy/lab/internal/schedulerversions/v1.22

go 1.26

// One module can be there in one version only, by its name; under other names it
// is there in others as well.
replace (
	scheduler.example/release-1.19 => k8s.io/kube-scheduler v0.19.0
	scheduler.example/release-1.20 => k8s.io/kube-scheduler v0.20.0
	scheduler.example/release-1.21 => k8s.io/kube-scheduler v0.21.0
)

replace github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode => ../decode

require (
	github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode v0.0.0
	k8s.io/kube-scheduler v0.22.0
	scheduler.example/release-1.19 v0.0.0
	scheduler.example/release-1.20 v0.0.0
	scheduler.example/release-1.21 v0.0.0
)

require (
	github.com/go-logr/logr v0.4.0 // indirect
	github.com/gogo/protobuf v1.3.2 // indirect
	github.com/google/go-cmp v0.5.5 // indirect
	github.com/google/gofuzz v1.1.0 // indirect
	github.com/json-iterator/go v1.1.11 // indirect
	github.com/modern-go/concurrent v0.0.0-20180306012644-bacd9c7ef1dd // indirect
	github.com/modern-go/reflect2 v1.0.1 // indirect
	golang.org/x/net v0.0.0-20210520170846-37e1c6afe023 // indirect
	golang.org/x/text v0.3.6 // indirect
	gopkg.in/inf.v0 v0.9.1 // indirect
	gopkg.in/yaml.v2 v2.4.0 // indirect
	k8s.io/api v0.22.0 // indirect
	k8s.io/apimachinery v0.22.0 // indirect
	k8s.io/component-base v0.22.0 // indirect
	k8s.io/klog/v2 v2.9.0 // indirect
	k8s.io/utils v0.0.0-20210707171843-4b05e18ac7d9 // indirect
	sigs.k8s.io/structured-merge-diff/v4 v4.1.2 // indirect
	sigs.k8s.io/yaml v1.2.0 // indirect
)
