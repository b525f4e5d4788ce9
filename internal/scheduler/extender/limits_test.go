package extender

import (
	"runtime"
	"strings"
	"testing"
	"time"
)

// A number that a few bytes describe must not cost seconds and hundreds of MB.
func TestQuantityOfManyDigits(t *testing.T) {
	w := newWorld(t)
	body := `{"Pod":{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c",` +
		`"resources":{"requests":{"cpu":"10000000000000000000000e5000000"}}}]}},"Nodes":null,"NodeNames":["node-a"]}`
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, answer := w.post("/filter", []byte(body))
	runtime.ReadMemStats(&after)
	t.Logf("%.200s", answer)
	if took := after.TotalAlloc - before.TotalAlloc; took > 4<<20 {
		t.Errorf("%d bytes took %d bytes of memory", len(body), took)
	}
}

// What a pod may have at most, in kube-scheduler's form and in others.
func TestLimitsOfPod(t *testing.T) {
	containers := func(n int) string { return `{"spec":{"containers":[{}` + strings.Repeat(",{}", n-1) + `]}}` }
	amount := func(text string) string {
		return `{"spec":{"containers":[{"resources":{"requests":{"memory":"1Gi","cpu":` + text + `}}}]}}`
	}
	digits := strings.Repeat("1", 62)
	for name, c := range map[string]struct{ pod, refused string }{
		"containers":               {pod: containers(maxContainers)},
		"one container more":       {containers(maxContainers + 1), "more than 1000 containers"},
		"containers that are null": {strings.ReplaceAll(containers(maxContainers+1), "{}", "null"), "more than 1000 containers"},
		"init containers": {strings.Replace(containers(maxContainers+1), "containers", "initContainers", 1),
			"more than 1000 containers"},
		"many of something else":    {pod: strings.Replace(containers(maxContainers+1), "containers", "volumes", 1)},
		"digits":                    {pod: amount(`"` + digits + `"`)},
		"one digit more":            {amount(`"1` + digits + `"`), "the amount of cpu has more digits"},
		"one, with white space":     {amount(` "1` + digits + `"`), "the amount of cpu has more digits"},
		"a number of as many":       {pod: amount("11" + digits)},
		"a number of one more":      {amount("111" + digits), "the amount of cpu has more digits"},
		"exponent":                  {amount(`"1e-9999"`), "the amount of cpu has more digits"},
		"exponent with white space": {amount(` "1e-9999"`), "the amount of cpu has more digits"},
	} {
		pod, err := decodePod([]byte(c.pod))
		switch {
		case c.refused != "" && err == nil:
			t.Errorf("%s: %d containers are read", name, len(pod.Spec.Containers))
		case c.refused != "":
			mustContain(t, err.Error(), c.refused)
		case err != nil:
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The largest bodies that are accepted must fit the container's 512 MiB.
func TestMemoryOfLargestBodies(t *testing.T) {
	const size = maxFilterBody - 4096
	fill := func(head, one, tail string) string {
		return head + strings.Repeat(one+",", (size-len(head)-len(tail))/(len(one)+1)) + one + tail
	}
	pod := `{"metadata":{"name":"p"},"spec":{"containers":[{"name":"c","resources":{"requests":{"enflame.com/gcu-memory":"4"}}}]}}`
	for name, body := range map[string]func() string{
		"names": func() string { return fill(`{"Pod":`+pod+`,"Nodes":null,"NodeNames":[`, `"a"`, `]}`) },
		"nodes": func() string { return fill(`{"Pod":`+pod+`,"Nodes":{"items":[`, `{"metadata":{"name":"a"}}`, `]}}`) },
		"containers": func() string {
			return fill(`{"Pod":{"spec":{"containers":[`, `{}`, `]}},"Nodes":null,"NodeNames":["node-a"]}`)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			b := []byte(body())
			runtime.GC()
			var before runtime.MemStats
			runtime.ReadMemStats(&before)
			peak := uint64(0)
			stop := make(chan struct{})
			done := make(chan struct{})
			go func() {
				defer close(done)
				for {
					var m runtime.MemStats
					runtime.ReadMemStats(&m)
					peak = max(peak, m.HeapInuse)
					select {
					case <-stop:
						return
					case <-time.After(20 * time.Millisecond):
					}
				}
			}()
			_, answer := w.post("/filter", b)
			close(stop)
			<-done
			extra := (peak - before.HeapInuse) >> 20
			t.Logf("%d MB more; answer %d bytes: %.100s", extra, len(answer), answer)
			if extra > 400 {
				t.Errorf("one request takes %d MB", extra)
			}
		})
	}
}
