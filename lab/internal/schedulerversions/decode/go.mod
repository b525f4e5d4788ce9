module github.com/divvy-gpu/divvy/lab/internal/schedulerversions/decode

go 1.26

// The oldest of those that it is compiled with.
require k8s.io/apimachinery v0.18.0
