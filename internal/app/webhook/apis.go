package webhook

import (
	"path"

	"github.com/divvy-gpu/divvy/internal/platform/admissionreview"
	"github.com/divvy-gpu/divvy/internal/platform/version"
)

// APIs returns what the webhook speaks with others.
func APIs() []version.API {
	reviews := version.API{Use: version.Serves}
	for _, v := range admissionreview.Versions() {
		reviews.Name = path.Dir(v)
		reviews.Versions = append(reviews.Versions, path.Base(v))
	}
	return []version.API{reviews}
}
