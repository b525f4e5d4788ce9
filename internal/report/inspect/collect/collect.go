// Package collect makes the report of package inspect: it asks the extender, through the API server,
// for the allocations on every device, and reads from nodes and pods what the extender does not
// manage, and everything when it does not respond. What is requested of a remote pool it reads from
// nodes, pods and quotas.
package collect

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/net"

	"github.com/divvy-gpu/divvy/internal/core/accel"
	"github.com/divvy-gpu/divvy/internal/core/ledger"
	"github.com/divvy-gpu/divvy/internal/core/wire"
	"github.com/divvy-gpu/divvy/internal/platform/kube"
	"github.com/divvy-gpu/divvy/internal/report/inspect"
	"github.com/divvy-gpu/divvy/internal/scheduler/cluster"
)

// maxNames is how many nodes an error lists.
const maxNames = 20

// Options are what a person may choose.
type Options struct {
	// Output is the name of a format of package inspect.
	Output string
	// Namespace, Service and Port say where the extender is.
	Namespace, Service string
	Port               int
	// Resource is the one to show, AllResources for all of them. Empty stands
	// for all in a table, and for GuideResource in JSON and YAML, whose readers
	// know of no other.
	Resource string
	// Timeout bounds the wait for the extender. Reading nodes and pods after
	// it takes as long as it takes.
	Timeout time.Duration
}

// AllResources stands for all resources where one is named.
const AllResources = "all"

// GuideResource is the one that the guide's form of a report is about.
const GuideResource = "enflame.com/gcu-memory"

// DefaultOptions returns the defaults, those of the chart.
func DefaultOptions() Options {
	return Options{
		Output:    string(inspect.Table),
		Namespace: "divvy-system", Service: "divvy-extender", Port: 32766,
		Timeout: 5 * time.Second,
	}
}

// Validate reports all mistakes at once.
func (o Options) Validate() error {
	var errs []error
	if _, err := inspect.ParseFormat(o.Output); err != nil {
		errs = append(errs, err)
	}
	for _, f := range []struct{ flag, value string }{{"namespace", o.Namespace}, {"service", o.Service}} {
		if f.value == "" {
			errs = append(errs, fmt.Errorf("--%s must not be empty", f.flag))
		}
	}
	if o.Port < 1 || o.Port > 65535 {
		errs = append(errs, fmt.Errorf("--port %d: must be from 1 to 65535", o.Port))
	}
	if o.Timeout <= 0 {
		errs = append(errs, fmt.Errorf("--extender-timeout %s: must be above zero", o.Timeout))
	}
	return errors.Join(errs...)
}

// Run prints the report of one node, or of all when node is "".
func Run(ctx context.Context, o Options, clients kube.Clients, node string, out, errOut io.Writer) error {
	if err := o.Validate(); err != nil {
		return err
	}
	q := &question{options: o, clients: clients, node: node, errOut: errOut}
	format := inspect.Format(o.Output)
	forPeople := format == inspect.Table || format == inspect.Wide
	switch {
	case o.Resource == AllResources, o.Resource == "" && forPeople:
		report, err := q.all(ctx)
		if err != nil {
			return err
		}
		if forPeople {
			return inspect.Print(out, report, format)
		}
		// The guide's form has no place for the name of a resource.
		return inspect.PrintDetails(out, report, format)
	case o.Resource == string(poolResource):
		p, err := q.pool(ctx)
		if err != nil {
			return err
		}
		return inspect.Print(out, inspect.Report{Nodes: []inspect.Node{}, Pool: p}, format)
	case o.Resource == "":
		q.options.Resource = GuideResource
	}
	report, err := q.one(ctx)
	if err != nil {
		return err
	}
	if o.Resource == "" && len(report.Nodes) == 0 {
		// Nothing of what the guide's form is about is there.
		report.Pool = q.poolIfAny(ctx)
	}
	return inspect.Print(out, report, format)
}

// question is what is asked, and what was found out so far.
type question struct {
	options Options
	clients kube.Clients
	node    string // "" for all
	errOut  io.Writer
	// silent is true once the extender gave no answer and that was said.
	silent bool
}

// one makes the report of the resource in the options.
func (q *question) one(ctx context.Context) (inspect.Report, error) {
	resource := accel.Resource(q.options.Resource)
	report, err := q.managed(ctx, resource)
	if !errors.Is(err, errElsewhere) {
		return report, err
	}
	c, err := q.read(ctx)
	if err != nil {
		return inspect.Report{}, err
	}
	all := c.report(resource)
	if offered := c.resources(""); len(all.Nodes) == 0 && len(offered) > 0 {
		return inspect.Report{}, fmt.Errorf("no node offers %s; offered resources: %s", resource, accel.JoinResources(offered))
	}
	if q.node == "" {
		return all, nil
	}
	for _, n := range all.Nodes {
		if n.Name == q.node {
			return inspect.Report{Nodes: []inspect.Node{n}}, nil
		}
	}
	return inspect.Report{}, unknownNode(fmt.Sprintf("node %q is unknown or offers no %s", q.node, resource), all)
}

// errElsewhere says that nodes and pods have the answer, not the extender.
var errElsewhere = errors.New("not reported by the extender")

// managed asks the extender for a resource. It returns errElsewhere when the
// extender does not manage the resource, or does not answer, which it says to
// the user the first time.
func (q *question) managed(ctx context.Context, resource accel.Resource) (inspect.Report, error) {
	if q.silent {
		return inspect.Report{}, errElsewhere
	}
	o := q.options
	o.Resource = string(resource)
	report, err := fromExtender(ctx, o, q.clients, q.node)
	var unanswered *unansweredError
	if errors.As(err, &unanswered) {
		q.silent = true
		fmt.Fprintf(q.errOut, "The extender does not respond (%v).\nThe report is based on annotations of nodes and pods; a pod that is "+
			"currently being bound may be missing.\n", unanswered.cause)
		return inspect.Report{}, errElsewhere
	}
	return report, err
}

// all makes the report of all resources, by node and then resource. What the
// extender manages is asked of it: it knows of pods that are being bound.
func (q *question) all(ctx context.Context) (inspect.Report, error) {
	c, readErr := q.read(ctx)
	if readErr != nil {
		// Not everybody may list nodes and pods; the extender may tell something.
		q.options.Resource = GuideResource
		report, err := q.managed(ctx, GuideResource)
		if err != nil {
			return inspect.Report{}, readErr
		}
		fmt.Fprintf(q.errOut, "Only %s is shown: %v.\n", GuideResource, readErr)
		return report, nil
	}
	pool, claims := q.poolIfAny(ctx), q.claims(ctx)
	if q.node != "" && c.view.Inventories[q.node] == nil && pool == nil && claims == nil {
		return inspect.Report{}, unknownNode(fmt.Sprintf("node %q is unknown or offers no devices", q.node), c.report(""))
	}
	report := inspect.Report{Nodes: []inspect.Node{}, Pool: pool, Claims: claims}
	for _, resource := range c.resources(q.node) {
		some, err := inspect.Report{}, errElsewhere
		if c.memory(q.node, resource) {
			some, err = q.managed(ctx, resource)
		}
		if err != nil {
			// Not managed, or the extender has not seen the node yet.
			some = c.report(resource)
		}
		for _, n := range some.Nodes {
			if q.node == "" || n.Name == q.node {
				report.Nodes = append(report.Nodes, n)
			}
		}
	}
	slices.SortStableFunc(report.Nodes, byNodeAndResource)
	return report, nil
}

func byNodeAndResource(a, b inspect.Node) int {
	return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Resource, b.Resource))
}

// unansweredError says that the extender gave no answer that could be used.
type unansweredError struct{ cause error }

func (e *unansweredError) Error() string { return "the extender does not respond: " + e.cause.Error() }
func (e *unansweredError) Unwrap() error { return e.cause }

// fromExtender asks the extender. Its error is an *unansweredError when
// somebody else should be asked.
func fromExtender(ctx context.Context, o Options, clients kube.Clients, node string) (inspect.Report, error) {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	report, err := ask(ctx, o, clients, node)
	if err == nil || !apierrors.IsNotFound(err) || report.Error == "" {
		if err != nil {
			err = &unansweredError{err}
		}
		return report, err
	}
	if report.Error == inspect.NotManaged(accel.Resource(o.Resource)) {
		return inspect.Report{}, errElsewhere
	}
	// The extender itself said that there is no such node.
	if node == "" {
		return inspect.Report{}, errors.New(report.Error)
	}
	all, err := ask(ctx, o, clients, "")
	if err != nil {
		return inspect.Report{}, errors.New(report.Error)
	}
	return inspect.Report{}, unknownNode(report.Error, all)
}

// Get asks the extender for a path, through the API server. The body may be what the extender
// says of an error.
func Get(ctx context.Context, o Options, clients kube.Clients, path string, params map[string]string) (body []byte, err error) {
	request := clients.Kubernetes.CoreV1().RESTClient().Get().
		Namespace(o.Namespace).Resource("services").Name(net.JoinSchemeNamePort("", o.Service,
		strconv.Itoa(o.Port))).SubResource("proxy").Suffix(path).
		// The client prefers protobuf, in which the API server would word its
		// own errors as well.
		SetHeader("Accept", runtime.ContentTypeJSON)
	for name, value := range params {
		request.Param(name, value)
	}
	return request.DoRaw(ctx)
}

// Reworded is the error of Get with the words of the API server, which a raw answer leaves
// unread.
func Reworded(body []byte, err error) error {
	var status metav1.Status
	if json.Unmarshal(body, &status) == nil && status.Kind == "Status" && status.Message != "" {
		return fmt.Errorf("%s: %w", status.Message, err)
	}
	return err
}

// ask sends one request. A report with an Error comes with an error as well.
func ask(ctx context.Context, o Options, clients kube.Clients, node string) (inspect.Report, error) {
	path := inspect.Route
	if node != "" {
		path += "/" + node
	}
	body, err := Get(ctx, o, clients, path, map[string]string{"details": "true", "resource": o.Resource})
	var report inspect.Report
	decodeErr := json.Unmarshal(body, &report)
	switch {
	case err == nil && decodeErr != nil:
		return inspect.Report{}, fmt.Errorf("the response is not a report: %w", decodeErr)
	case err == nil && report.Nodes == nil:
		return inspect.Report{}, errors.New("the response is not a report")
	case err != nil && decodeErr == nil && report.Error != "" && !apierrors.IsNotFound(err):
		// Its own words say more than the status.
		return report, errors.New(report.Error)
	case err != nil:
		err = Reworded(body, err)
	}
	return report, err
}

// contents is what nodes publish and pods carry. The key of the grants is not at
// hand, so they are taken for true: this is a report.
type contents struct {
	ledger *ledger.Ledger
	view   cluster.View
}

// read reads nodes and pods, and says which nodes cannot be shown.
func (q *question) read(ctx context.Context) (contents, error) {
	c := contents{ledger: ledger.New(ledger.Options{})}
	var err error
	if c.view, err = cluster.LoadView(ctx, q.clients, c.ledger, trusting{}); err != nil {
		return contents{}, err
	}
	for _, name := range slices.Sorted(maps.Keys(c.view.Broken)) {
		if q.node == "" || q.node == name {
			fmt.Fprintf(q.errOut, "Node %s is not shown: %v.\n", name, c.view.Broken[name])
		}
	}
	return c, nil
}

// Of makes the report of one node, by resource, from the node and its pods, which were read
// before. It fails if what the node publishes cannot be read.
func Of(node *v1.Node, pods []*v1.Pod) ([]inspect.Node, error) {
	c := contents{ledger: ledger.New(ledger.Options{})}
	var err error
	if c.view, err = cluster.ViewOf(node, pods, c.ledger, trusting{}); err != nil {
		return nil, err
	}
	return c.report("").Nodes, c.view.Broken[node.Name]
}

// resources returns what the node, or any node when it is "", offers.
func (c contents) resources(node string) []accel.Resource {
	names := map[accel.Resource]bool{}
	for name, inventories := range c.view.Inventories {
		for _, inv := range inventories {
			if node == "" || node == name {
				names[inv.Resource] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// memory reports whether the node, or any node when it is "", counts the
// resource in memory.
func (c contents) memory(node string, resource accel.Resource) bool {
	for name, inventories := range c.view.Inventories {
		for _, inv := range inventories {
			if (node == "" || node == name) && inv.Resource == resource && inv.Unit != "" {
				return true
			}
		}
	}
	return false
}

// report makes the report of a resource, or of all when it is "", by node and
// then resource.
func (c contents) report(resource accel.Resource) inspect.Report {
	report := inspect.Report{Nodes: []inspect.Node{}}
	for name, inventories := range c.view.Inventories {
		for _, inv := range inventories {
			if resource != "" && inv.Resource != resource {
				continue
			}
			usage, counted := c.ledger.Node(inv.Resource, name)
			if counted && inv.Unit != "" {
				report.Nodes = append(report.Nodes, inspect.NodeFromUsage(inv.Resource, usage))
				continue
			}
			report.Nodes = append(report.Nodes, inspect.NodeFromHolders(name, inv, c.holders(name, inv.Resource)))
		}
	}
	slices.SortFunc(report.Nodes, byNodeAndResource)
	return report
}

// holders returns the pods on the node that ask for whole devices or slices of
// the resource.
func (c contents) holders(node string, resource accel.Resource) []inspect.Holder {
	var out []inspect.Holder
	for _, h := range c.view.Holders {
		for _, request := range h.Requests {
			if h.Node == node && request.Resource == resource {
				out = append(out, inspect.Holder{Pod: h.Pod, Created: h.Created, Units: request.Peak(), IDs: h.Held[resource]})
			}
		}
	}
	return out
}

// trusting reads grants without a key. A pod whose grant cannot be read is on no device.
type trusting struct{}

// DecodeGrant implements cluster.Grants.
func (trusting) DecodeGrant(_, value string) (accel.Grant, error) {
	grant, err := wire.DecodeGrantUnverified(value)
	if err != nil {
		return accel.Grant{}, nil //nolint:nilerr // State would log it each time
	}
	return grant, nil
}

// unknownNode adds to the text which nodes there are.
func unknownNode(text string, all inspect.Report) error {
	if len(all.Nodes) == 0 {
		return fmt.Errorf("%s; no node does", text)
	}
	names := make([]string, 0, len(all.Nodes))
	for _, n := range all.Nodes {
		names = append(names, n.Name)
	}
	names = slices.Compact(names) // a node is there once for each resource
	if more := len(names) - maxNames; more > 0 {
		return fmt.Errorf("%s; available: %s and %d more", text, strings.Join(names[:maxNames], ", "), more)
	}
	return fmt.Errorf("%s; available: %s", text, strings.Join(names, ", "))
}
