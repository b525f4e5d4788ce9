package schedconf

import "strings"

// APIGroup is the group of the configuration of kube-scheduler.
var APIGroup = strings.TrimSuffix(group, "/")

// APIVersions returns the versions of that configuration that Wire reads and
// writes, the newest first.
func APIVersions() []string {
	names := make([]string, 0, len(apiVersions))
	for _, a := range apiVersions {
		if a.name != withoutExtenders {
			names = append(names, a.name)
		}
	}
	return names
}
