package pool

import (
	"errors"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// root450 is the folder of the client that the vectors were taken with.
const root450 = "/bitfusion/bitfusion-client-ubuntu1804_4.5.0-4_amd64.deb"

// limits returns requirements as the API server hands them on: what limits say
// is in requests as well.
func limits(keysAndValues ...string) corev1.ResourceRequirements {
	list := corev1.ResourceList{}
	for i := 0; i < len(keysAndValues); i += 2 {
		list[corev1.ResourceName("bitfusion.io/gpu-"+keysAndValues[i])] = resource.MustParse(keysAndValues[i+1])
	}
	return corev1.ResourceRequirements{Limits: list, Requests: list.DeepCopy()}
}

func client(t testing.TB, version, os string) *Client {
	t.Helper()
	c, err := DefaultCatalog().Find(version, os)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The vectors of the original, which were taken by running it. original is what
// it did where something else is done here, and why says why. Where original is
// empty the result is the same, byte for byte.
//
// Guards W8, W9, W13, W14, W15, W16, W17, W18, W19, W20, W21.
func TestVectorsOfTheOriginal(t *testing.T) {
	const denied = "denied"
	tests := map[string]struct {
		limits   corev1.ResourceRequirements
		totalMB  int64 // 16000 when 0, unset when -1
		command  []string
		filter   string
		want     string // behind $R/usr/bin/bitfusion, or denied
		units    int64
		says     string // in the denial
		original string
		why      string
	}{
		"half of one GPU": {
			limits: limits("amount", "1", "percent", "50"), command: []string{"python x.py --a=1"},
			want: " run -n 1 -p 0.500000  -- python x.py --a=1", units: 50,
		},
		"two GPUs, a command of words, filters": {
			limits: limits("amount", "2"), command: []string{"python", "x.py", "-c", "z"},
			filter:   "server.hostname=bf  server.addr=1.1.1.1",
			want:     " run -n 2 -p 1.000000  --filter server.hostname=bf --filter server.addr=1.1.1.1 -- python x.py -c z",
			units:    200,
			original: " run -n 2 -p 1.000000  --filter server.hostname=bf --filter server.addr=1.1.1.1 -- python -- x.py -- z",
			why:      "one -- before the command, and no word is lost (W8, W9)",
		},
		"memory and percent, another shell, a filter": {
			limits: limits("amount", "3", "memory", "5001M", "percent", "10"), command: []string{"/bin/sh", "-c", "python x.py && echo hi"},
			filter: "server.hostname=bf", want: denied, says: "exclude each other",
			original: " run -n 3 -m 5001   --filter server.hostname=bf -- /bin/sh -- python x.py && echo hi",
			why:      "it is not known which of both is meant (W21)",
		},
		"the same without percent": {
			limits: limits("amount", "3", "memory", "5001M"), command: []string{"/bin/sh", "-c", "python x.py && echo hi"},
			filter: "server.hostname=bf",
			want:   " run -n 3 -m 5001   --filter server.hostname=bf -- /bin/sh -c 'python x.py && echo hi'", units: 94,
			original: " run -n 3 -m 5001   --filter server.hostname=bf -- /bin/sh -- python x.py && echo hi",
			why:      "all of the text runs on the pool (W9)",
		},
		"shell text of two commands": {
			limits: limits("amount", "1"), command: []string{"/bin/bash", "-c", "cd /x; python x.py"},
			want: " run -n 1 -p 1.000000  -- /bin/bash -c 'cd /x; python x.py'", units: 100,
			original: " run -n 1 -p 1.000000  -- cd /x; python x.py",
			why:      "all of the text runs on the pool; the client cannot run cd (W9)",
		},
		"memory in binary units": {
			limits: limits("amount", "1", "memory", "8Gi"), want: " run -n 1 -m 8589 -- python x.py", units: 54,
		},
		"memory a byte below the whole card": {
			limits: limits("amount", "1", "memory", "15999999999"), want: " run -n 1 -m 15999 -- python x.py", units: 100,
		},
		"memory of 1 MB": {
			limits: limits("amount", "1", "memory", "1M"), want: " run -n 1 -m 1 -- python x.py", units: 1,
		},
		"memory that floating point counts wrong": {
			limits: limits("amount", "1", "memory", "1120M"), want: " run -n 1 -m 1120 -- python x.py", units: 7,
			original: "8 units", why: "7 percent exactly (W17)",
		},
		"part of a GPU too many": {
			limits: limits("amount", "1500m"), want: denied, says: "not a whole number",
			original: " run -n 2 -p 1.000000  -- python x.py", why: "the API server takes no parts of extended resources either (W19)",
		},
		"part of a GPU too many, by memory": {
			limits: limits("amount", "1500m", "memory", "4000M"), want: denied, says: "not a whole number",
			original: " run -n 1500m -m 4000 -- python x.py", why: "the client knows no 1500m (W19)",
		},
		"part of a percent": {
			limits: limits("amount", "1", "percent", "500m"), want: denied, says: "not a whole number",
			original: " run -n 1 -p 0.010000  -- python x.py", why: "as above (W19)",
		},
		"the whole card": {
			limits: limits("amount", "1", "memory", "16000M"), want: " run -n 1 -m 16000 -- python x.py", units: 100,
			original: denied, why: "100 percent are accepted as well (W16)",
		},
		"more than the whole card": {
			limits: limits("amount", "1", "memory", "16000000001"), want: denied, says: "more than one GPU of the pool has",
		},
		"less than 1 MB": {limits: limits("amount", "1", "memory", "500k"), want: denied, says: "less than 1 MB"},
		"MB meant, bytes written": {limits: limits("amount", "1", "memory", "8000"), want: denied,
			says: "without a suffix it is counted in bytes"},
		"no memory": {limits: limits("amount", "1", "memory", "0"), want: denied, says: "less than 1 MB"},
		"memory where it is not set": {limits: limits("amount", "1", "memory", "4000M"), totalMB: -1, want: denied,
			says: "TOTAL_GPU_MEMORY"},
		"no GPU":                 {limits: limits("amount", "0"), want: denied, says: "write a whole number of GPUs, 1 or more"},
		"less than no GPU":       {limits: limits("amount", "-1"), want: denied, says: "write a whole number of GPUs, 1 or more"},
		"percent without amount": {limits: limits("percent", "50"), want: denied, says: "bitfusion.io/gpu-amount is missing"},
		"memory without amount":  {limits: limits("memory", "50M"), want: denied, says: "bitfusion.io/gpu-amount is missing"},
		"no percent": {limits: limits("amount", "1", "percent", "0"), want: denied,
			says: "bitfusion.io/gpu-percent: 0 is not accepted; write a whole number from 1 to 100"},
		"too many percent": {limits: limits("amount", "1", "percent", "101"), want: denied,
			says: "bitfusion.io/gpu-percent: 101 is not accepted"},
		"requests without limits": {
			limits: corev1.ResourceRequirements{Requests: corev1.ResourceList{AmountResource: resource.MustParse("1")}},
			want:   " run -n 1 -p 1.000000  -- python x.py", units: 100,
			original: "panic", why: "they are as good as limits (W15)",
		},
		"limits without requests": {
			limits: corev1.ResourceRequirements{Limits: corev1.ResourceList{AmountResource: resource.MustParse("1")}},
			want:   " run -n 1 -p 1.000000  -- python x.py", units: 100,
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			if (tt.original == "") != (tt.why == "") {
				t.Fatal("a difference has a reason")
			}
			totalMB := tt.totalMB
			switch totalMB {
			case 0:
				totalMB = 16000
			case -1:
				totalMB = 0
			}
			r, err := ParseRequest(tt.limits, totalMB)
			if tt.want == denied {
				if err == nil || errors.Is(err, ErrNoRequest) || !strings.Contains(err.Error(), tt.says) {
					t.Fatalf("got %+v and the error %v, want one that says %q", r, err, tt.says)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if r.Units != tt.units {
				t.Errorf("%d units, want %d", r.Units, tt.units)
			}
			filters, err := ParseFilter(tt.filter)
			if err != nil {
				t.Fatal(err)
			}
			command := tt.command
			if command == nil {
				command = []string{"python x.py"}
			}
			got, args, called, err := client(t, "450", "ubuntu18").Wrap(r, filters, command, nil)
			if err != nil || called || args != nil {
				t.Fatalf("args %q, called %v, error %v", args, called, err)
			}
			if want := []string{"/bin/bash", "-c", root450 + "/usr/bin/bitfusion" + tt.want}; !slices.Equal(got, want) {
				t.Errorf("got  %q\nwant %q", got, want)
			}
		})
	}
}
