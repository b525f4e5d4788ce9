// Package vendorsim makes hardware up: it builds stand-ins for the vendors'
// management libraries, from C sources in folder c, and writes the topology
// file that tells them which cards there are and how they are.
//
// The stand-ins export the vendor's functions with the vendor's struct
// layouts and return codes, so that everything up to the vendor's binary
// interface runs as it would on real hardware. They read the topology again
// whenever the file changes. docs/simulated-hardware.md describes the file.
//
// There are stand-ins for Enflame's libefml.so, NVIDIA's libnvidia-ml.so and
// Iluvatar's libixml.so.
package vendorsim
