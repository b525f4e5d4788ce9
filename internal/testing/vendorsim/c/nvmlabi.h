/*
 * What the libraries have in common that export NVML's functions: NVIDIA's own,
 * and those of vendors that took over its names, codes and layouts. They are
 * those of the public nvml.h, release 12.
 *
 * nvmlabi.c has the functions that answer alike in all of them; the vendor's
 * file has the others, and what it defines for this one.
 */
#ifndef DIVVY_NVMLABI_H
#define DIVVY_NVMLABI_H

#include "sim.h"

#define NVML_API __attribute__((visibility("default")))

typedef int nvml_return;

enum {
	NVML_SUCCESS = 0,
	NVML_ERROR_UNINITIALIZED = 1,
	NVML_ERROR_INVALID_ARGUMENT = 2,
	NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NO_PERMISSION = 4,
	NVML_ERROR_NOT_FOUND = 6,
	NVML_ERROR_INSUFFICIENT_SIZE = 7,
	NVML_ERROR_DRIVER_NOT_LOADED = 9,
	NVML_ERROR_TIMEOUT = 10,
	NVML_ERROR_LIBRARY_NOT_FOUND = 12,
	NVML_ERROR_FUNCTION_NOT_FOUND = 13,
	NVML_ERROR_GPU_IS_LOST = 15,
	NVML_ERROR_RESET_REQUIRED = 16,
	NVML_ERROR_OPERATING_SYSTEM = 17,
	NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
	NVML_ERROR_MEMORY = 20,
	NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
	NVML_ERROR_UNKNOWN = 999,
};

/* Types of events. */
enum {
	NVML_EVENT_SINGLE_BIT_ECC = 1 << 0,
	NVML_EVENT_DOUBLE_BIT_ECC = 1 << 1,
	NVML_EVENT_XID = 1 << 3,
	NVML_EVENT_CLOCK = 1 << 4,
};

/* What a handle of a device points to: nothing but its place is of interest. */
struct device {
	char nothing;
};

/*
 * What a handle stands for. Handles of MIG devices are accepted by few functions;
 * to all others they are no handles.
 */
struct nvml_target {
	int number; /* of the card, as the library numbers cards */
	const struct card *card;
	const struct mig_device *mig; /* NULL: the card itself */
	int mig_index;
};

struct nvml_pci {
	char bus_id_legacy[16];
	uint32_t domain;
	uint32_t bus;
	uint32_t device;
	uint32_t pci_device_id;
	uint32_t pci_sub_system_id;
	char bus_id[32];
};

struct nvml_memory {
	uint64_t total, free, used; /* bytes */
};

struct nvml_memory_v2 {
	uint32_t version;
	uint64_t total, reserved, free, used; /* bytes */
};

struct nvml_event_data {
	struct device *device;
	uint64_t type;
	uint64_t data;
	uint32_t gpu_instance;
	uint32_t compute_instance;
};

_Static_assert(sizeof(struct nvml_pci) == 68, "nvmlPciInfo_t has 68 bytes");
_Static_assert(sizeof(struct nvml_memory) == 24, "nvmlMemory_t has 24 bytes");
_Static_assert(sizeof(struct nvml_memory_v2) == 40, "nvmlMemory_v2_t has 40 bytes");
_Static_assert(sizeof(struct nvml_event_data) == 32, "nvmlEventData_t has 32 bytes");

/* The vendor's file defines these two. */
extern struct sim sim;
extern const uint32_t nvml_pci_device_id; /* of its cards; the lower half is the vendor's PCI id */

/*
 * So it does these, which are about what the vendor's driver knows beyond the
 * topology file. They return false if that cannot be read. The lock is held.
 */

/* The memory of a card that processes have allocated, in bytes. */
bool nvml_driver_used(const struct card *card, uint64_t *bytes);

/* Makes of the memory of a card what the calling process may see of it. */
bool nvml_driver_cap(const struct card *card, struct nvml_memory_v2 *memory);

/* The driver is not loaded. */
void nvml_driver_gone(void);

/* A device per card. Its place is the card's. */
extern struct device devices[TOPOLOGY_MAX_CARDS];

NVML_API nvml_return nvmlInit_v2(void);

/* The card of a card's handle, TOPOLOGY_NO_CARD for what is none. */
int nvml_card_of(const struct device *handle);

/* What the state of driver and library lets a call return. The lock is held. */
nvml_return nvml_ready_code(void);

/* Says whether a card can be asked. The lock is held. */
nvml_return nvml_card_code(int card);

/* Begins a call that is not about one card. sim_leave must follow. */
nvml_return nvml_begin(const char *function);

/*
 * Begins a call about the card of a handle, which it puts into *card. Calls
 * about a lost card fail, though it is still counted. sim_leave must follow.
 */
nvml_return nvml_begin_card(const char *function, const struct device *handle, const void *out,
			    const struct card **card);

/*
 * Begins a call about the card of that number, or about none: nvml_begin_card
 * for handles of other things. sim_leave must follow.
 */
nvml_return nvml_begin_number(const char *function, int number, const void *out, const struct card **card);

/* nvml_begin_card for handles of cards and of MIG devices. */
nvml_return nvml_begin_target(const char *function, const struct device *handle, const void *out,
			      struct nvml_target *target);

/* The memory that a process uses in bytes, all ones if the library does not know that. */
uint64_t nvml_process_bytes(const struct process *p);

/* The handle of a MIG device. */
struct device *nvml_mig_handle(int card, int index);

/* The MIG device of that index; NULL unless the card is in MIG mode and has it. */
const struct mig_device *nvml_mig_at(const struct card *card, uint32_t index);

/* nvml_begin_card for two cards; it is the first one's failures that count. */
nvml_return nvml_begin_pair(const char *function, const struct device *a, const struct device *b, const void *out,
			    const struct card **card_a, const struct card **card_b);

/* Writes a text with its NUL into out, of size bytes. */
nvml_return nvml_put_text(char *out, uint32_t size, const char *text);

/* Says where a card is. Both texts are filled up with NULs. */
void nvml_put_pci(struct nvml_pci *out, const struct card *card);

/* A whole call that finds the first card of which matches says that it is the one. */
nvml_return nvml_find(const char *function, const char *what, struct device **out,
		      bool (*matches)(const struct card *, const char *));

/*
 * Waits up to ms milliseconds until take, which is called again and again,
 * returns other than NVML_ERROR_TIMEOUT. The lock is held.
 */
nvml_return nvml_await(uint32_t ms, nvml_return (*take)(void *set, struct nvml_event_data *out), void *set,
		       struct nvml_event_data *out);

/* A whole function that fills a text about card. */
#define NVML_TEXT(function, expression)                                                           \
	NVML_API nvml_return function(struct device *device, char *out, uint32_t size)            \
	{                                                                                         \
		const struct card *card;                                                          \
		nvml_return code = nvml_begin_card(#function, device, out, &card);                \
                                                                                                  \
		if (code == NVML_SUCCESS)                                                         \
			code = nvml_put_text(out, size, expression);                              \
		sim_leave(&sim);                                                                  \
		return code;                                                                      \
	}

/* A whole function that fills a value about a target. */
#define NVML_TARGET_VALUE(function, type, expression)                                             \
	NVML_API nvml_return function(struct device *device, type *out)                           \
	{                                                                                         \
		struct nvml_target target;                                                        \
		nvml_return code = nvml_begin_target(#function, device, out, &target);            \
                                                                                                  \
		if (code == NVML_SUCCESS)                                                         \
			*out = (type)(expression);                                                \
		sim_leave(&sim);                                                                  \
		return code;                                                                      \
	}

/* A whole function that fills a value about card. */
#define NVML_VALUE(function, type, expression)                                                    \
	NVML_API nvml_return function(struct device *device, type *out)                           \
	{                                                                                         \
		const struct card *card;                                                          \
		nvml_return code = nvml_begin_card(#function, device, out, &card);                \
                                                                                                  \
		if (code == NVML_SUCCESS)                                                         \
			*out = (type)(expression);                                                \
		sim_leave(&sim);                                                                  \
		return code;                                                                      \
	}

#endif
