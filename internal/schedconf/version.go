package schedconf

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// ErrVersion is wrapped by errors that go away when Input.Version says which
// version kube-scheduler has.
var ErrVersion = errors.New("the version of kube-scheduler is not known")

// A version is the minor version of a Kubernetes 1.x.
type version int

const (
	// oldest is the first that can list extenders in a configuration of its own.
	oldest version = 18
	// lastPolicy is the last that takes a policy file.
	lastPolicy version = 22
	// newest is the last whose decoder the tests have. Later ones are taken to
	// serve what it serves.
	newest version = 37
)

func (v version) String() string { return "1." + strconv.Itoa(int(v)) }

const group = "kubescheduler.config.k8s.io/"

// apiVersions says which schedulers serve which version of their configuration,
// by what is registered in pkg/scheduler/apis/config/scheme of each release. The
// preferred one comes first.
var apiVersions = []struct {
	name        string
	first, last version
}{
	{"v1", 25, 1 << 20},
	{"v1beta3", 23, 28},
	{"v1beta2", 22, 27},
	{"v1beta1", 19, 22},
	{"v1alpha2", 18, 18},
	{withoutExtenders, 18, 18},
}

// withoutExtenders is the version that has none; a configuration of it has to be
// converted by hand.
const withoutExtenders = "v1alpha1"

// serves returns the versions of the configuration that a scheduler serves, the
// preferred one first.
func (v version) serves() []string {
	var out []string
	for _, a := range apiVersions {
		if a.first <= v && v <= a.last {
			out = append(out, group+a.name)
		}
	}
	return out
}

var (
	versionText = regexp.MustCompile(`^v?1\.([0-9]{1,3})([.+_-].*)?$`)
	anyVersion  = regexp.MustCompile(`^v?[0-9]+\.[0-9]+`)
)

func parseVersion(text string) (version, error) {
	m := versionText.FindStringSubmatch(text)
	if m == nil {
		if anyVersion.MatchString(text) {
			return 0, fmt.Errorf("%q is not a version of Kubernetes that is known; those from %v to %v are", text, oldest, newest)
		}
		return 0, fmt.Errorf("%w: %q names none, unlike v1.31.4", ErrVersion, text)
	}
	minor, err := strconv.Atoi(m[1])
	if err != nil {
		return 0, fmt.Errorf("version %q: %w", text, err)
	}
	v := version(minor)
	if v < oldest {
		return 0, fmt.Errorf("kube-scheduler %s is too old: those from %v on can be configured", text, oldest)
	}
	return v, nil
}

// imageTag returns the tag of a container image, or nothing.
func imageTag(image string) string {
	name, _, _ := strings.Cut(image, "@")
	// A colon in front of the last slash belongs to the registry's port.
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') {
		return name[i+1:]
	}
	return ""
}

// version returns which kube-scheduler the pod runs.
func (p *pod) version(in Input) (version, error) {
	if in.Version != "" {
		return parseVersion(in.Version)
	}
	image, err := p.text("image")
	if err != nil {
		return 0, err
	}
	tag := imageTag(image)
	if tag == "" {
		return 0, p.errorf("%w: the image %q has no tag that would say it", ErrVersion, image)
	}
	v, err := parseVersion(tag)
	if err != nil {
		return 0, p.errorf("image %q: %w", image, err)
	}
	return v, nil
}
