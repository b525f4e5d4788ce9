package memlimit

import (
	"errors"
	"fmt"

	"github.com/divvy-gpu/divvy/internal/core/accel"
)

// The functions of NVML that read and set the compute mode.
const (
	modeFunction    = "nvmlDeviceGetComputeMode"
	setModeFunction = "nvmlDeviceSetComputeMode"
)

// Values of nvmlComputeMode_t.
const (
	modeDefault          = 0
	modeExclusiveProcess = 3
)

// Exclusive reports whether the compute mode of a device is EXCLUSIVE_PROCESS, in which one
// process has a context at a time.
func (l *Library) Exclusive(id accel.DeviceID) (bool, error) {
	device, err := l.find(id)
	if err == nil && l.mode == nil {
		err = fmt.Errorf("the driver's library lacks %s: %w", modeFunction, errors.ErrUnsupported)
	}
	if err != nil {
		return false, err
	}
	var mode int32
	err = l.check(call(modeFunction, id), l.mode(device, &mode))
	return mode == modeExclusiveProcess, err
}

// SetExclusive makes the compute mode of a device EXCLUSIVE_PROCESS, or else DEFAULT.
func (l *Library) SetExclusive(id accel.DeviceID, exclusive bool) error {
	device, err := l.find(id)
	if err == nil && l.setMode == nil {
		err = fmt.Errorf("the driver's library lacks %s: %w", setModeFunction, errors.ErrUnsupported)
	}
	if err != nil {
		return err
	}
	mode := int32(modeDefault)
	if exclusive {
		mode = modeExclusiveProcess
	}
	return l.check(call(setModeFunction, id), l.setMode(device, mode))
}
