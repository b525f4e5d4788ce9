package pool

// Resource names.
const (
	// Resource is what kubelet, kube-scheduler and quotas count; UnitsPerGPU of
	// it are one GPU. Pods do not write it, the mutating webhook does.
	Resource = "bitfusion.io/gpu"
	// AmountResource is the number of GPUs that a container asks for.
	AmountResource = "bitfusion.io/gpu-amount"
	// PercentResource is the share of each GPU's memory, 1 to 100; 100 when
	// neither it nor MemoryResource is given.
	PercentResource = "bitfusion.io/gpu-percent"
	// MemoryResource is the memory of each GPU in bytes.
	MemoryResource = "bitfusion.io/gpu-memory"
	// Prefix begins the names of all of them.
	Prefix = "bitfusion.io/"
	// UnitsPerGPU of Resource are one whole GPU.
	UnitsPerGPU = 100
)

// Annotations of pods.
const (
	// ModeAnnotation holds a Mode.
	ModeAnnotation = "auto-management/bitfusion"
	// StatusAnnotation is StatusInjected once the webhook has converted the pod.
	StatusAnnotation = "auto-management/status"
	StatusInjected   = "injected"
	// OSAnnotation and VersionAnnotation choose the client from the catalog.
	OSAnnotation      = "bitfusion-client/os"
	VersionAnnotation = "bitfusion-client/version"
	// FilterAnnotation narrows the choice of servers and GPUs: words of the form
	// key=value, parted by blanks.
	FilterAnnotation = "bitfusion-client/filter"
	// EntrypointAnnotation tells the entrypoint of the image for containers
	// without a command: a JSON list of strings for all of them, or a JSON object
	// of such lists by container.
	EntrypointAnnotation = "bitfusion-client/entrypoint"
	// HomeAnnotation is the home folder in which the client looks for
	// .bitfusion/client.yaml; DefaultHome when absent.
	HomeAnnotation = "bitfusion-client/home"
	DefaultHome    = "/root"
)

// ConvertedLabel is set to "true" on pods that the webhook has converted, so
// that they can be watched without watching all pods.
const ConvertedLabel = "divvy.dev/pool"

// ClientVariable is the environment variable that holds the path of the client
// program in containers that use the pool, for mode injection.
const ClientVariable = "DIVVY_POOL_CLIENT"

// Names of the secrets that hold a token, and of the entries in them.
const (
	CASecret      = "bitfusion-client-secret-ca.crt"
	ClientSecret  = "bitfusion-client-secret-client.yml"
	ServersSecret = "bitfusion-client-secret-servers.conf"
	// SingleSecret holds all three entries, as the first clients had it.
	SingleSecret = "bitfusion-secret"

	CAKey      = "ca.crt"
	ClientKey  = "client.yaml"
	ServersKey = "servers.conf"
)

// CAPath is where a client finds the CA of the pool's servers in its container;
// the client.yaml of tokens names it.
const CAPath = "/etc/bitfusion/tls/ca.crt"

// Mode is what a pod wants done to it.
type Mode string

// The modes.
const (
	// ModeAll adds the client and puts it before the command. Its synonyms are
	// y, yes, true and on.
	ModeAll Mode = "all"
	// ModeInjection adds the client and leaves the command alone.
	ModeInjection Mode = "injection"
	// ModeNone leaves the pod alone. Its synonyms are n, no, false, off and the
	// empty text.
	ModeNone Mode = "none"
)
