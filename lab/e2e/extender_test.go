//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/divvy-gpu/divvy/lab/internal/layout"
	"github.com/divvy-gpu/divvy/lab/internal/testenv"
)

var poster = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// post asks the extender.
func post(ctx context.Context, verb, contentType string, body io.Reader) (status int, answer string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, testenv.ExtenderURL+"/gcushare-scheduler/"+verb, body)
	if err != nil {
		return 0, "", err
	}
	request.Header.Set("Content-Type", contentType)
	response, err := poster.Do(request)
	if err != nil {
		return 0, "", err
	}
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), errors.Join(err, response.Body.Close())
}

// TestBadRequests: each gets an error in its answer, and the process lives.
func TestBadRequests(t *testing.T) {
	ctx := begin(t, guide)
	start(t, one("holder", 4))
	before, err := lab.Divvy.Pod(ctx, testenv.Extender)
	must(t, err)
	pod := `"Pod":{"metadata":{"name":"p","namespace":"d","uid":"u"},"spec":{"containers":[{"name":"a",` +
		`"resources":{"requests":{"enflame.com/gcu-memory":"4"}}}]}}`
	tests := map[string]struct {
		verb, contentType string
		body              io.Reader
		status            int
		want              string
	}{
		"empty":         {verb: "filter", want: "empty"},
		"not JSON":      {verb: "filter", body: strings.NewReader("hello"), want: "not valid JSON"},
		"cut off":       {verb: "filter", body: strings.NewReader(`{"Pod":{"metadata":`), want: "not valid JSON"},
		"an array":      {verb: "filter", body: strings.NewReader("[]"), want: "not an object"},
		"null":          {verb: "filter", body: strings.NewReader("null"), want: "not a JSON object"},
		"no pod":        {verb: "filter", body: strings.NewReader(`{"NodeNames":["n"]}`), want: "no Pod"},
		"no nodes":      {verb: "filter", body: strings.NewReader(`{` + pod + `}`), want: "no nodes"},
		"wrong type":    {verb: "filter", body: strings.NewReader(`{"Pod":7,"NodeNames":[]}`), want: "Pod"},
		"deeply nested": {verb: "filter", body: strings.NewReader(strings.Repeat(`{"Pod":`, 100000)), want: "not valid JSON"},
		"binary":        {verb: "filter", body: bytes.NewReader([]byte{0, 1, 2, 0xff}), want: "not valid JSON"},
		"another type":  {verb: "filter", contentType: "text/xml", body: strings.NewReader("<a/>"), want: "content type"},
		"huge":          {verb: "filter", body: io.LimitReader(zeros{}, 200<<20), want: "larger than"},
		"prioritize, not JSON": {verb: "prioritize", body: strings.NewReader("hello"), status: http.StatusBadRequest,
			want: "not valid JSON"},
		"bind, not JSON": {verb: "bind", body: strings.NewReader("hello"), want: "not valid JSON"},
		"bind, huge":     {verb: "bind", body: io.LimitReader(zeros{}, 10<<20), want: "larger than"},
		"bind of a pod without name": {verb: "bind", body: strings.NewReader(`{"PodNamespace":"d","PodUID":"u","Node":"n"}`),
			want: "no PodName"},
		"bind of a pod that is not": {
			verb: "bind", body: strings.NewReader(`{"PodName":"nobody","PodNamespace":"` + namespace + `","PodUID":"u","Node":"n"}`),
			want: "nobody",
		},
		"unknown route": {verb: "nothing", body: strings.NewReader("{}"), status: http.StatusNotFound, want: "no route"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			contentType, status := test.contentType, test.status
			if contentType == "" {
				contentType = "application/json"
			}
			if status == 0 {
				status = http.StatusOK
			}
			got, answer, err := post(ctx, test.verb, contentType, test.body)
			// A body that is far too large may be cut off while it is sent.
			if err != nil && name == "huge" && strings.Contains(err.Error(), "write") {
				return
			}
			must(t, err)
			if got != status || !strings.Contains(answer, `"Error":"`) || !strings.Contains(answer, test.want) {
				t.Errorf("answered %d %.300s; want %d and an Error with %q", got, answer, status, test.want)
			}
		})
	}

	t.Run("unknown nodes", func(t *testing.T) {
		result := filter(t, ctx, 4, "no-such-node", layout.NodeName)
		if fmt.Sprint(result.NodeNames) != "["+layout.NodeName+"]" || result.FailedAndUnresolvableNodes["no-such-node"] == "" {
			t.Errorf("filter answered %+v, want the lab's node and a reason against the other", result)
		}
	})
	t.Run("all at once", func(t *testing.T) {
		// Those for which there is no memory are rejected before they have sent all, which a
		// client may notice by an error of writing.
		type outcome struct {
			answer string
			err    error
		}
		done := make(chan outcome)
		for range 40 {
			go func() {
				_, answer, err := post(ctx, "filter", "application/json", io.LimitReader(zeros{}, 30<<20))
				done <- outcome{answer, err}
			}()
		}
		read, rejected := 0, 0
		for range 40 {
			switch one := <-done; {
			case one.err != nil && strings.Contains(one.err.Error(), "write"),
				strings.Contains(one.answer, "the memory for requests is in use by other requests"):
				rejected++
			case one.err == nil && strings.Contains(one.answer, "not valid JSON"):
				read++
			default:
				t.Errorf("one of 40 large requests: %v, %.300s", one.err, one.answer)
			}
		}
		if read == 0 {
			t.Errorf("all of 40 large requests were rejected")
		}
		t.Logf("%d large requests were read, %d rejected", read, rejected)
	})

	after, err := lab.Divvy.Pod(ctx, testenv.Extender)
	must(t, err)
	if after.UID != before.UID || after.Status.ContainerStatuses[0].RestartCount != before.Status.ContainerStatuses[0].RestartCount {
		t.Errorf("the extender did not live through it: %s", testenv.Describe(after))
	}
	start(t, one("next", 12))
	wantCards(t, map[string]int{"holder": 0, "next": 0})
}

// zeros is an endless body of the digit 0.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = '0'
	}
	return len(p), nil
}
