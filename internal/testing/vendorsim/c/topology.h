/*
 * The topology file: what the simulated hardware looks like.
 *
 * The format is described in docs/simulated-hardware.md. The Go package
 * vendorsim reads and writes the same format; a test holds the two together.
 */
#ifndef DIVVY_TOPOLOGY_H
#define DIVVY_TOPOLOGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	TOPOLOGY_TEXT = 64,	   /* bytes of a model, uuid or version, with the NUL */
	TOPOLOGY_PATH = 256,	   /* bytes of a path, with the NUL */
	TOPOLOGY_MAX_CARDS = 1024, /* more than any vendor's library allows, so that too many can be simulated */
	TOPOLOGY_MAX_CALLS = 32, /* functions in one key */
	TOPOLOGY_MAX_LINKS = 4096,
	TOPOLOGY_MAX_LANES = 18, /* of a card; NVML has room for no more */
	TOPOLOGY_MAX_MIG = 7,	 /* MIG devices of a card */
	TOPOLOGY_GPU_INSTANCES = 15, /* numbers of GPU instances of a card */
	TOPOLOGY_COMPUTE_INSTANCES = 8, /* numbers of compute instances of a GPU instance */
	TOPOLOGY_MAX_PROCESSES = 256, /* on all cards */
	TOPOLOGY_VENDORS = 3,
	TOPOLOGY_NO_CARD = -1,
	TOPOLOGY_NO_MIG = -1,
};

enum driver_state { DRIVER_LOADED, DRIVER_ABSENT, DRIVER_BROKEN };

/* How the driver limits the memory of control groups, if at all. */
enum memacct { MEMACCT_OFF, MEMACCT_MISC, MEMACCT_DMEM };

/* A [driver] section. */
struct driver {
	enum driver_state state;
	char version[TOPOLOGY_TEXT];
	int cuda_major, cuda_minor; /* the highest version that the driver serves */
	enum memacct memacct;
	bool persistence;	 /* the driver keeps its state while no process uses a card */
	char run[TOPOLOGY_PATH]; /* the folder of its state, "" for that of the topology file */
};

/* The [cgroup] section: what stands for the file systems of control groups. */
struct cgroup_view {
	char root[TOPOLOGY_PATH];      /* for /sys/fs/cgroup; "": the machine's own file systems */
	char proc[TOPOLOGY_PATH];      /* for /proc, "" for /proc itself */
	char hierarchy[TOPOLOGY_TEXT]; /* of version 1 whose paths stand for those of version 2, "" for version 2 */
};

/* Functions of the vendor's library, each with a number. */
struct calls {
	struct {
		char function[TOPOLOGY_TEXT];
		int number;
	} list[TOPOLOGY_MAX_CALLS];
	int count;
};

/* A [library] section. */
struct library {
	int delay_ms;
	bool one_lock;	      /* a call that takes its time holds up all others */
	struct calls slow;    /* how many milliseconds calls of these functions take */
	struct calls failing; /* the codes that they return */
};

/* Whether a card can be cut into partitions (MIG) and is. */
enum mig { MIG_NOT_SUPPORTED, MIG_DISABLED, MIG_ENABLED };

/* A profile of GPU instances. */
struct mig_profile {
	int number; /* NVML_GPU_INSTANCE_PROFILE_* */
	int id;	    /* the driver's number */
	const char *suffix;
	int slices;	/* of compute */
	int eighths;	/* of the GPU's memory */
	int instances;	/* at most, on one GPU */
	int multiprocessors;
	int copy_engines, decoders, jpegs, ofas;
};

/* A MIG device of a card. */
struct mig_device {
	int line; /* of its section, 0 for none */
	char profile[TOPOLOGY_TEXT];
	struct mig_profile of; /* of its GPU instance */
	int slices;	       /* of its compute instance */
	int gi, ci;
	char uuid[TOPOLOGY_TEXT];
	uint64_t memory_mib;
	bool gi_given, ci_given, memory_given; /* by the section */
	int xid, xid_number;		       /* as in struct card */
};

struct card {
	int index; /* N of [card N] */
	int line;  /* of its section */
	char vendor[TOPOLOGY_TEXT];
	char model[TOPOLOGY_TEXT];
	char uuid[TOPOLOGY_TEXT]; /* "" and duplicates are allowed: clients have to cope */
	char serial[TOPOLOGY_TEXT];
	uint64_t memory_mib;
	uint64_t used_mib;
	int numa; /* -1: unknown */
	int minor;
	char board[TOPOLOGY_TEXT]; /* "": the card is alone on its board */
	int chip;		   /* its position on the board */
	char pci_switch[TOPOLOGY_TEXT];
	uint32_t pci_domain, pci_bus, pci_device, pci_function;
	int compute_major, compute_minor; /* compute capability */
	enum mig mig;
	struct mig_device mig_devices[TOPOLOGY_MAX_MIG]; /* all derived, also while mig is disabled */
	bool healthy;
	bool lost;
	uint64_t health_bits; /* what is wrong, for vendors that tell it as bits */
	int xid;	      /* the critical error that happened last, 0 for none */
	int xid_number;	      /* tells two errors of one code apart */
	int delay_ms;	      /* of every call about this card */
	struct calls slow;    /* as in struct library, for calls about this card */
	struct calls failing;
};

/* A direct connection between two cards (NVLink). */
struct link {
	int a, b; /* indices of cards */
	int line; /* of its section */
	int lanes;
	bool one_way; /* b knows nothing of it */
};

/* The lists of NVIDIA's library that a process can be in. */
enum process_list { LIST_COMPUTE = 1 << 0, LIST_GRAPHICS = 1 << 1, LIST_MPS = 1 << 2 };

/* A process that uses a card. */
struct process {
	int number; /* N of [process N] */
	int line;   /* of its section */
	int card;   /* index of its card */
	int mig;    /* number of its MIG device on the card, or TOPOLOGY_NO_MIG */
	int pid;
	uint64_t memory_mib;
	bool memory_unknown; /* the library does not say how much it uses */
	int utilization;     /* percent of the card's compute time */
	unsigned lists;	     /* enum process_list */
	bool nvidia_only;    /* it has keys of which other vendors' libraries report nothing */
};

struct topology {
	/* The general section, then those of topology_vendors. */
	struct driver drivers[1 + TOPOLOGY_VENDORS];
	struct library libraries[1 + TOPOLOGY_VENDORS];
	bool has_driver[1 + TOPOLOGY_VENDORS];
	bool has_library[1 + TOPOLOGY_VENDORS];
	struct card *cards; /* in ascending order of index, which are 0..count-1 */
	int count;
	struct link *links; /* in the order of the file */
	int link_count;
	struct process *processes; /* in the order of the file */
	int process_count;
	struct cgroup_view cgroup;
	bool has_cgroup;
};

/* The vendors that a card can be of. */
extern const char *const topology_vendors[TOPOLOGY_VENDORS];

/* The driver or library of a vendor: of its own section, else of the general one. */
const struct driver *topology_driver(const struct topology *t, const char *vendor);
const struct library *topology_library(const struct topology *t, const char *vendor);

/* How near two cards are to each other over PCIe, nearest first. */
enum nearness { NEAR_BOARD, NEAR_SWITCH, NEAR_HOST_BRIDGE, NEAR_SYSTEM };

enum nearness topology_nearness(const struct card *a, const struct card *b);

/*
 * Parses text of size bytes, which need not end in NUL. Returns true and fills
 * *out, to be released with topology_free. Returns false for text that is not
 * a topology, with "LINE: what is wrong" in error, and leaves *out untouched.
 */
bool topology_parse(const char *text, size_t size, struct topology *out, char *error, size_t error_size);

/* Releases what topology_parse allocated. */
void topology_free(struct topology *t);

/* The number that the list has for function, or 0. */
int calls_find(const struct calls *c, const char *function);

#endif
