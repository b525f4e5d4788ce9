// Package state keeps what a node remembers between restarts in files of its
// state folder: versioned, with a checksum, replaced at once.
package state
