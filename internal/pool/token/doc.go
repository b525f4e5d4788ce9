// Package token reads the token of a remote pool: the archive that an
// administrator downloads, with the certificate of the pool's authority
// (ca.crt), the client's configuration (client.yaml) and the list of servers
// (servers.conf). It checks them, and mends a servers.conf.
//
// Nothing is ever written to disk, whatever an archive says. What is secret in a
// token is in no error and in no formatted text.
package token
