package wire

import (
	"errors"
	"fmt"
)

// ClaimDriversAnnotation is the annotation of a Node that says how its devices are published for
// ResourceClaims. Nodes that serve no claims do not have it.
const ClaimDriversAnnotation = "divvy.dev/claim-drivers"

// ClaimDriversVersion is the version of the document in ClaimDriversAnnotation.
const ClaimDriversVersion = 1

const (
	maxClaimDriversBytes = 32 << 10
	// maxLeftOut bounds the names that are listed of a driver.
	maxLeftOut = 64
)

// ClaimDriver is how the devices of one vendor are published.
type ClaimDriver struct {
	Driver string `json:"driver"`
	// Problem is why kubelet or the API server does not know the driver, "" if they do.
	Problem string `json:"problem,omitempty"`
	// GatesOff are the feature gates whose fields the API server drops.
	GatesOff []string `json:"gatesOff,omitempty"`
	// LeftOut are devices that are not published, since it would not be safe without these fields. Of
	// many, some are listed.
	LeftOut []string `json:"leftOut,omitempty"`
}

type claimDriversDoc struct {
	Version int           `json:"v"`
	Drivers []ClaimDriver `json:"drivers"`
}

// EncodeClaimDrivers returns the annotation's value, "" for no drivers. What is too long is cut off.
func EncodeClaimDrivers(drivers []ClaimDriver) (string, error) {
	if len(drivers) == 0 {
		return "", nil
	}
	doc := claimDriversDoc{Version: ClaimDriversVersion}
	for _, d := range drivers {
		d.Problem, d.LeftOut = cut(d.Problem), d.LeftOut[:min(len(d.LeftOut), maxLeftOut)]
		doc.Drivers = append(doc.Drivers, d)
	}
	return encode("drivers of claims", &doc, maxClaimDriversBytes)
}

// DecodeClaimDrivers reads the annotation's value, nil for "". Its errors are *SyntaxError.
func DecodeClaimDrivers(text string) ([]ClaimDriver, error) {
	if text == "" {
		return nil, nil
	}
	var doc claimDriversDoc
	if err := decode("drivers of claims", text, maxClaimDriversBytes, &doc); err != nil {
		return nil, err
	}
	return doc.Drivers, nil
}

func (doc *claimDriversDoc) validate() error {
	if doc.Version != ClaimDriversVersion {
		return versionError(doc.Version, ClaimDriversVersion)
	}
	var errs []error
	for _, d := range doc.Drivers {
		if !IsDriver(d.Driver) {
			errs = append(errs, fmt.Errorf("%q is no driver of Divvy's", d.Driver))
		}
	}
	if len(doc.Drivers) == 0 {
		errs = append(errs, errors.New("no drivers"))
	}
	return errors.Join(errs...)
}
