// Package deptest holds no code but a test: it states which packages may
// import which, with the reason, and compares that with what the sources do.
package deptest
