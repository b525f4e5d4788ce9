// Package certs makes and renews the certificate of a server that the API server
// calls, and tells the API server which CA to trust, without the CSR API. For
// other clients it keeps the CA in a ConfigMap, and a certificate of their own in
// a Secret.
//
// Everything is in one Secret, so that any number of replicas agree: a CA and
// the certificate it signed, and while the CA changes also the next or the
// previous one. Every replica may take each step, and writes it with the
// resourceVersion it read, so one of them wins and all follow.
//
// A new certificate of the same CA is served at once. A new CA takes three
// steps, so that whoever learns of a step a little later is never cut off:
//
//	the next CA joins the present one in caBundle; wait
//	certificates are signed by the next CA, the present one becomes the
//	previous one and stays in caBundle; wait
//	the previous CA leaves caBundle
//
// Clients that take up a CA or a certificate later than that, kube-scheduler with
// its configuration in a file, get an overlap on top of the waits. When it began
// is noted in the Secret, as replicas are restarted meanwhile.
//
// The waits are measured by each replica's own clock from when it saw the step
// done, so clocks that differ do no harm.
//
// Not promised: a replica that cannot reach the API server for longer than the
// wait, in the very minute of a change of CA, serves a certificate that is no
// longer trusted until it can.
package certs
