package schedconf

// A State is how a scheduler is run, as its manifest and configuration say.
type State struct {
	// Wired is set when the configuration that the manifest names is ours and has
	// our extender in it.
	Wired bool
	// Version of kube-scheduler, such as "1.31", and the API versions of its
	// configuration that it serves, the preferred one first.
	Version string
	Serves  []string
	// ConfigPath is the value of --config (or --policy-config-file) in the
	// container, ConfigFile the file on the node behind it. Both are empty when
	// there is no such flag.
	ConfigPath, ConfigFile string
	// APIVersion of that configuration, such as kubescheduler.config.k8s.io/v1.
	APIVersion string
	// Before are the flags that wiring replaced and unwiring brings back.
	Before []string
	// Edited is set when the configuration was changed by somebody else since it
	// was written.
	Edited bool
	// Extender is our entry in the configuration, nil without one.
	Extender *Extender
	// Profiles are the schedulers' names, OtherExtenders the URLs of the others.
	Profiles, OtherExtenders []string
}
