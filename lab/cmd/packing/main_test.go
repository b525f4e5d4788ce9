package main

import (
	"bytes"
	"strings"
	"testing"
)

const trace = "../../internal/packing/testdata/trace"

func TestRun(t *testing.T) {
	tests := map[string]struct {
		args []string
		want string // "" for an error
		err  string
	}{
		"timings": {[]string{"-policy", "FGD", "-shuffles", "1", "-timings"}, "P99 US", ""},
		"churn":   {[]string{"-policy", "binpack,random", "-churn", "-shuffles", "1", "-sample"}, "ALLOCATED", ""},
		"of both": {[]string{"-policy", "bestfit,GpuPacking", "-shuffles", "1"}, "GpuPacking", ""},
		"all":     {[]string{"-workload", "default", "-shuffles", "1"}, "fragmentation-online", ""},
		"published": {[]string{"-policy", "FGD", "-published", trace + "/../published.csv"},
			"PUBLISHED", "1 of 2 results are more than"},
		"nothing published": {[]string{"-policy", "binpack", "-shuffles", "1", "-published", trace + "/../published.csv"},
			"", "nothing was published"},
		"unknown policy":   {[]string{"-policy", "tetris"}, "", `unknown policy "tetris"; use one of binpack, spread, `},
		"unknown workload": {[]string{"-workload", "x"}, "", "openb_pod_list_x.csv: no such file"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			err := run(t.Context(), append([]string{"-trace", trace, "-within", "3"}, tt.args...), &out)
			if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Errorf("error %v, want %q", err, tt.err)
			}
			if !strings.Contains(out.String(), tt.want) {
				t.Errorf("no %q in\n%s", tt.want, &out)
			}
		})
	}
	if err := run(t.Context(), nil, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), "want -trace DIR") {
		t.Errorf("without a trace: %v", err)
	}
}
