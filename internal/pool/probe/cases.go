package probe

// Case is one of the cases of the guide's section "Troubleshooting", and what to
// do about it.
type Case struct {
	// Section is its number in the guide.
	Section string `json:"section"`
	// Title says what is wrong.
	Title string `json:"title"`
	// Pods is what pods print in this case.
	Pods string `json:"pods"`
	// Do are the steps, in order.
	Do []string `json:"do"`
}

// The cases of the guide.
const (
	CaseToken   = "6.1"
	CaseServers = "6.2"
	CaseNetwork = "6.3"
)

var cases = map[string]Case{
	CaseToken: {
		Section: CaseToken, Title: "The token, or the authority's certificate in it, is not that of these servers, or is out of date",
		Pods: "Error contacting server ... to verify client id: ... context deadline exceeded",
		Do: []string{
			"Check in the pool's administration whether the token is activated and the servers are healthy.",
			"Download the token again and import it: kubectl divvy pool import TOKEN.tar",
			"Copies in other namespaces are updated automatically; copies that were made by hand must be deleted.",
			"If a certificate is reported as expired or not yet valid, compare the clocks, and renew the servers' certificates.",
		},
	},
	CaseServers: {
		Section: CaseServers, Title: "servers.conf is not in the form that the client reads",
		Pods: "Failed to parse /root/.bitfusion/servers.conf",
		Do: []string{
			"Import the token again, which corrects the format: kubectl divvy pool import TOKEN.tar; for clients 3.5 with " +
				"--client-version 350.",
			"If the import rejects the file, correct the lines that it names. The correct format is\n" +
				"  servers:\n  - reachable: 10.202.122.248:56001\n    addresses:\n    - 10.202.122.248:56001\n" +
				"with a blank after each colon that follows a word; \"reachable\" is for clients 3.5 alone.",
		},
	},
	CaseNetwork: {
		Section: CaseNetwork, Title: "The servers cannot be reached over the network",
		Pods: "dial tcp 10.117.32.156:56001: i/o timeout",
		Do: []string{
			"Compare the addresses with the pool's administration: a server with a new address requires a new token.",
			"Check whether the server runs, and whether routes, firewalls and NetworkPolicies allow nodes and pods to connect, by " +
				"default to TCP port 56001.",
			"The check ran from this machine; the path from pods may differ. To check from a node: curl -kv https://ADDRESS",
		},
	},
}

// Explain returns a case of the guide by its number.
func Explain(section string) Case { return cases[section] }

// Section returns the case of the guide that a verdict belongs to; "" when all
// is well.
func (v Verdict) Section() string {
	switch v {
	case Malformed:
		return CaseServers
	case NoName, Refused, Unreachable, Timeout:
		return CaseNetwork
	case Silent, Closed, NotTLS, HandshakeRefused, UnknownAuthority, Expired, WrongName, BadCertificate:
		return CaseToken
	case OK, Canceled:
	}
	return ""
}
