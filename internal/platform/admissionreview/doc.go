// Package admissionreview answers the API server's reviews over HTTP: it reads them within
// bounds, lets a function decide, and answers in the version in which it was
// asked. It knows no resource and sets no timeouts; they are the server's.
package admissionreview
