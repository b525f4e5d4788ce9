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
var ErrVersion = errors.New("the version of kube-scheduler is unknown")

type version int

const (
	// oldest is the first that is wired: Divvy needs Kubernetes 1.30, and
	// kube-scheduler may be one minor version older than the API server.
	oldest version = 29
	// newest is the last whose decoder the tests have. Later ones are taken to
	// serve what it serves.
	newest version = 37
)

func (v version) String() string { return "1." + strconv.Itoa(int(v)) }

// The configuration of kube-scheduler that Wire reads and writes. Every version
// from 1.25 on serves it, and no other one since 1.29.
const (
	APIGroup   = "kubescheduler.config.k8s.io"
	APIVersion = "v1"

	apiVersion = APIGroup + "/" + APIVersion
)

var (
	versionText = regexp.MustCompile(`^v?1\.([0-9]{1,3})([.+_-].*)?$`)
	anyVersion  = regexp.MustCompile(`^v?[0-9]+\.[0-9]+`)
)

func parseVersion(text string) (version, error) {
	m := versionText.FindStringSubmatch(text)
	if m == nil {
		if anyVersion.MatchString(text) {
			return 0, fmt.Errorf("%q is not a known version of Kubernetes; known versions are %v to %v", text, oldest, newest)
		}
		return 0, fmt.Errorf("%w: %q names none, unlike v1.31.4", ErrVersion, text)
	}
	minor, err := strconv.Atoi(m[1])
	if err != nil {
		return 0, fmt.Errorf("version %q: %w", text, err)
	}
	v := version(minor)
	if v < oldest {
		return 0, fmt.Errorf("kube-scheduler %s is too old: %v or newer is required", text, oldest)
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
		return 0, p.doc.errorf("%w: the image %q has no version tag", ErrVersion, image)
	}
	v, err := parseVersion(tag)
	if err != nil {
		return 0, p.doc.errorf("image %q: %w", image, err)
	}
	return v, nil
}
