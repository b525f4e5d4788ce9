//go:build !race

package alloc

const raceDetector = false
