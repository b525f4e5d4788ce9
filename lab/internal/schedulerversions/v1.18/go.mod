module github.com/divvy-gpu/divvy/lab/internal/schedulerversions/v1.18

go 1.26

replace github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode => ../decode

require (
	github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode v0.0.0
	k8s.io/kube-scheduler v0.18.0
)

require (
	github.com/gogo/protobuf v1.3.1 // indirect
	github.com/google/gofuzz v1.1.0 // indirect
	github.com/json-iterator/go v1.1.8 // indirect
	github.com/modern-go/concurrent v0.0.0-20180306012644-bacd9c7ef1dd // indirect
	github.com/modern-go/reflect2 v1.0.1 // indirect
	golang.org/x/net v0.0.0-20191004110552-13f9640d40b9 // indirect
	golang.org/x/text v0.3.2 // indirect
	gopkg.in/inf.v0 v0.9.1 // indirect
	gopkg.in/yaml.v2 v2.2.8 // indirect
	k8s.io/apimachinery v0.18.0 // indirect
	k8s.io/component-base v0.18.0 // indirect
	k8s.io/klog v1.0.0 // indirect
	k8s.io/utils v0.0.0-20200324210504-a9aa75ae1b89 // indirect
	sigs.k8s.io/structured-merge-diff/v3 v3.0.0 // indirect
	sigs.k8s.io/yaml v1.2.0 // indirect
)
