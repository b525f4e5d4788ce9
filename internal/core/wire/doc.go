// Package wire holds the codecs of what Divvy writes into Kubernetes objects:
// the inventory on a node and the grant on a pod, each with one versioned JSON
// form, the list of devices that a pod holds, and the annotations of older
// systems that people's scripts read.
//
// What is decoded here was readable and writable by others, so sizes are
// bounded, garbage is an error with a text and never a panic, and a grant
// counts only with the signature that the extender and the node daemons make
// with a key they share. Encoding is deterministic: equal values give equal
// text, so a writer can compare before it writes.
package wire
