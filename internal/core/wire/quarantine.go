package wire

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// QuarantineAnnotation is the annotation of a Node that lists its devices in
// quarantine, and what became of the last DeviceRequest.
const QuarantineAnnotation = "divvy.dev/quarantine"

// DeviceRequestAnnotation is the annotation of a Node by which an administrator puts
// devices into quarantine or releases them. The node's daemon removes it when it has
// acted on it.
const DeviceRequestAnnotation = "divvy.dev/device-request"

// QuarantineVersion is the version of the documents in both annotations.
const QuarantineVersion = 1

// MaxQuarantined is how many devices can be in quarantine on a node, and how many a
// request can name.
const MaxQuarantined = 256

// MaxReason is how long the reason of a quarantine can be, in bytes.
const MaxReason = 256

const (
	// maxQuarantineBytes is room for MaxQuarantined devices with long reasons.
	maxQuarantineBytes = 192 << 10
	maxRequestBytes    = 32 << 10
	// maxRequestID is how long the id of a request can be.
	maxRequestID = 64
)

// QuarantineStatus is what a node says of its quarantine.
type QuarantineStatus struct {
	Devices []accel.Quarantine
	// Answered is the request that the daemon acted on last.
	Answered RequestAnswer
}

// RequestAnswer is what became of a request. The zero value is that of none.
type RequestAnswer struct {
	// ID is that of the request, Error why nothing was done; "" if it was.
	ID, Error string
	// Warning says what is not as it should be although the request was carried out.
	Warning string
}

// Verbs of a DeviceRequest.
const (
	QuarantineDevices = "quarantine"
	ReleaseDevices    = "release"
)

// DeviceRequest is what an administrator asks of a node's daemon.
type DeviceRequest struct {
	// ID tells requests apart, so that one is carried out once.
	ID string
	// Verb is QuarantineDevices or ReleaseDevices.
	Verb    string
	Devices []accel.DeviceID
	// Reason is why devices are put into quarantine.
	Reason string
}

type quarantineDoc struct {
	Version  int            `json:"v"`
	Devices  []quarantineV1 `json:"devices,omitempty"`
	Answered *answerV1      `json:"answered,omitempty"`
}

type quarantineV1 struct {
	Device accel.DeviceID `json:"device"`
	Vendor string         `json:"vendor,omitempty"`
	Index  int            `json:"index"`
	Cause  string         `json:"cause,omitempty"`
	Reason string         `json:"reason,omitempty"`
	Since  time.Time      `json:"since"`
}

type answerV1 struct {
	ID      string `json:"id"`
	Error   string `json:"error,omitempty"`
	Warning string `json:"warning,omitempty"`
}

type requestDoc struct {
	Version int              `json:"v"`
	ID      string           `json:"id"`
	Verb    string           `json:"verb"`
	Devices []accel.DeviceID `json:"devices"`
	Reason  string           `json:"reason,omitempty"`
}

// EncodeQuarantine returns the value of QuarantineAnnotation, "" when there is nothing
// to say: devices in the order of their quarantine. It rejects what DecodeQuarantine
// would reject.
func EncodeQuarantine(q QuarantineStatus) (string, error) {
	doc := quarantineDoc{Version: QuarantineVersion}
	for _, d := range q.Devices {
		doc.Devices = append(doc.Devices, quarantineV1{
			Device: d.Device, Vendor: d.Vendor, Index: d.Index, Cause: d.Cause, Reason: d.Reason, Since: seconds(d.Since),
		})
	}
	slices.SortFunc(doc.Devices, func(a, b quarantineV1) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Device, b.Device))
	})
	if q.Answered != (RequestAnswer{}) {
		doc.Answered = &answerV1{q.Answered.ID, q.Answered.Error, q.Answered.Warning}
	}
	if doc.Devices == nil && doc.Answered == nil {
		return "", nil
	}
	return encode("quarantine", &doc, maxQuarantineBytes)
}

// DecodeQuarantine reads the value of QuarantineAnnotation; "" is nothing. Its errors
// are *SyntaxError.
func DecodeQuarantine(s string) (QuarantineStatus, error) {
	if s == "" {
		return QuarantineStatus{}, nil
	}
	var doc quarantineDoc
	if err := decode("quarantine", s, maxQuarantineBytes, &doc); err != nil {
		return QuarantineStatus{}, err
	}
	var out QuarantineStatus
	for _, d := range doc.Devices {
		out.Devices = append(out.Devices, accel.Quarantine{
			Device: d.Device, Vendor: d.Vendor, Index: d.Index, Cause: d.Cause, Reason: d.Reason, Since: seconds(d.Since),
		})
	}
	if doc.Answered != nil {
		out.Answered = RequestAnswer{doc.Answered.ID, doc.Answered.Error, doc.Answered.Warning}
	}
	return out, nil
}

func (doc *quarantineDoc) validate() error {
	if doc.Version != QuarantineVersion {
		return versionError(doc.Version, QuarantineVersion)
	}
	errs := []error{deviceMistakes(doc.Devices, func(d quarantineV1) accel.DeviceID { return d.Device })}
	for _, d := range doc.Devices {
		for _, s := range []string{d.Vendor, d.Cause, d.Reason} {
			if !utf8.ValidString(s) || len(s) > MaxReason {
				errs = append(errs, fmt.Errorf("device %q: %q is not valid UTF-8 or longer than %d bytes", d.Device, s, MaxReason))
			}
		}
	}
	if a := doc.Answered; a != nil && (len(a.ID) > maxRequestID || !utf8.ValidString(a.ID+a.Error+a.Warning)) {
		errs = append(errs, errors.New("the answer to a request is not valid UTF-8 or its id is too long"))
	}
	return errors.Join(errs...)
}

// deviceMistakes says what is wrong with a list of devices.
func deviceMistakes[T any](list []T, id func(T) accel.DeviceID) error {
	if len(list) > MaxQuarantined {
		return fmt.Errorf("%d devices, at most %d are possible", len(list), MaxQuarantined)
	}
	var errs []error
	seen := map[accel.DeviceID]bool{}
	for _, item := range list {
		d := id(item)
		if d == "" || !utf8.ValidString(string(d)) || len(d) > MaxReason || seen[d] {
			errs = append(errs, fmt.Errorf("the device %q is empty, not valid UTF-8, too long or listed twice", d))
		}
		seen[d] = true
	}
	return errors.Join(errs...)
}

// EncodeDeviceRequest returns the value of DeviceRequestAnnotation. It rejects what
// DecodeDeviceRequest would reject.
func EncodeDeviceRequest(r DeviceRequest) (string, error) {
	doc := requestDoc{Version: QuarantineVersion, ID: r.ID, Verb: r.Verb, Devices: r.Devices, Reason: r.Reason}
	return encode("device request", &doc, maxRequestBytes)
}

// DecodeDeviceRequest reads the value of DeviceRequestAnnotation. Its errors are
// *SyntaxError; the ID is there with one if it could be read.
func DecodeDeviceRequest(s string) (DeviceRequest, error) {
	var doc requestDoc
	if err := unmarshal(s, maxRequestBytes, &doc); err != nil {
		return DeviceRequest{}, &SyntaxError{What: "device request", Err: err}
	}
	if err := doc.validate(); err != nil {
		if len(doc.ID) > maxRequestID || !utf8.ValidString(doc.ID) {
			doc.ID = ""
		}
		return DeviceRequest{ID: doc.ID}, &SyntaxError{What: "device request", Err: err}
	}
	return DeviceRequest{ID: doc.ID, Verb: doc.Verb, Devices: doc.Devices, Reason: doc.Reason}, nil
}

func (doc *requestDoc) validate() error {
	if doc.Version != QuarantineVersion {
		return versionError(doc.Version, QuarantineVersion)
	}
	errs := []error{deviceMistakes(doc.Devices, func(d accel.DeviceID) accel.DeviceID { return d })}
	if doc.ID == "" || len(doc.ID) > maxRequestID || !utf8.ValidString(doc.ID) {
		errs = append(errs, fmt.Errorf("the id %q is empty, not valid UTF-8 or longer than %d bytes", doc.ID, maxRequestID))
	}
	if doc.Verb != QuarantineDevices && doc.Verb != ReleaseDevices {
		errs = append(errs, fmt.Errorf("the verb %q is neither %s nor %s", doc.Verb, QuarantineDevices, ReleaseDevices))
	}
	if len(doc.Devices) == 0 {
		errs = append(errs, errors.New("no device is named"))
	}
	if len(doc.Reason) > MaxReason || !utf8.ValidString(doc.Reason) {
		errs = append(errs, fmt.Errorf("the reason is not valid UTF-8 or longer than %d bytes", MaxReason))
	}
	return errors.Join(errs...)
}
