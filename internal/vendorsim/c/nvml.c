/*
 * Stand-in for libnvidia-ml.so.1, NVIDIA's management library (NVML). It has no
 * hardware behind it, only a topology file. Names, codes and layouts are those
 * of the public nvml.h, release 12.
 */
#include "sim.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

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
	NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
	NVML_ERROR_MEMORY = 20,
	NVML_ERROR_UNKNOWN = 999,
};

/* Types of events. */
enum {
	NVML_EVENT_SINGLE_BIT_ECC = 1,
	NVML_EVENT_DOUBLE_BIT_ECC = 2,
	NVML_EVENT_XID = 8,
	NVML_EVENT_CLOCK = 16,
};

/* Codes of critical errors that mean something to this file. */
enum {
	XID_DOUBLE_BIT_ECC = 48,
	XID_ROW_REMAPPING = 63,
};

/* What a handle of a device points to: nothing but its place is of interest. */
struct device {
	char nothing;
};

struct nvml_pci {
	char bus_id_legacy[16];
	unsigned domain;
	unsigned bus;
	unsigned device;
	unsigned pci_device_id;
	unsigned pci_sub_system_id;
	char bus_id[32];
};

struct nvml_memory {
	unsigned long long total, free, used; /* bytes */
};

struct nvml_memory_v2 {
	unsigned version;
	unsigned long long total, reserved, free, used; /* bytes */
};

struct nvml_event_data {
	struct device *device;
	unsigned long long type;
	unsigned long long data;
	unsigned gpu_instance;
	unsigned compute_instance;
};

struct nvml_fabric_info {
	unsigned char cluster_uuid[16];
	nvml_return status;
	unsigned clique;
	unsigned char state;
};

/* Which events of a card an event set hears. */
struct registration {
	unsigned long long types; /* 0: none */
	uint64_t last;		  /* number of the last event that it was told, or that came before */
};

struct event_set {
	bool used;
	struct registration cards[TOPOLOGY_MAX_CARDS];
};

_Static_assert(sizeof(struct nvml_pci) == 68, "nvmlPciInfo_t has 68 bytes");
_Static_assert(sizeof(struct nvml_memory) == 24, "nvmlMemory_t has 24 bytes");
_Static_assert(sizeof(struct nvml_memory_v2) == 40, "nvmlMemory_v2_t has 40 bytes");
_Static_assert(sizeof(struct nvml_event_data) == 32, "nvmlEventData_t has 32 bytes");
_Static_assert(sizeof(struct nvml_fabric_info) == 28, "nvmlGpuFabricInfo_t has 28 bytes");

enum { MAX_EVENT_SETS = 32 };

static struct sim sim = SIM_INIT("nvidia");

/* All below is guarded by sim.lock. */

/*
 * How often NVML was initialised and not shut down again. A driver that was
 * unloaded wants it anew.
 */
static int initialised;
static struct device devices[TOPOLOGY_MAX_CARDS];
static struct event_set event_sets[MAX_EVENT_SETS];

/* The code for the state of the driver. */
static nvml_return driver_code(void)
{
	switch (sim.driver->state) {
	case DRIVER_LOADED:
		return NVML_SUCCESS;
	case DRIVER_ABSENT:
		return NVML_ERROR_DRIVER_NOT_LOADED;
	case DRIVER_BROKEN:
		break;
	}
	return NVML_ERROR_UNKNOWN;
}

/* What the state of driver and library lets a call return. */
static nvml_return ready_code(void)
{
	nvml_return code = driver_code();

	if (code != NVML_SUCCESS) {
		initialised = 0;
		return code;
	}
	return initialised > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

/* The card of a handle, or -1 for what is no handle. */
static int card_of(const struct device *handle)
{
	if (handle < devices || handle >= devices + TOPOLOGY_MAX_CARDS)
		return TOPOLOGY_NO_CARD;
	return (int)(handle - devices);
}

/* Begins a call about a card, or about none. sim_leave must follow. */
static nvml_return begin_at(const char *function, int card)
{
	struct sim_entry e = sim_enter(&sim, function, card);

	if (e.broken)
		return NVML_ERROR_UNKNOWN;
	return e.failure ? e.failure : ready_code();
}

static nvml_return begin(const char *function)
{
	return begin_at(function, TOPOLOGY_NO_CARD);
}

/* Says whether a card can be asked. */
static nvml_return card_code(int index)
{
	if (index < 0 || index >= sim.count)
		return NVML_ERROR_INVALID_ARGUMENT;
	return sim.cards[index]->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

/*
 * Begins a call about the card of a handle, which it puts into *card. Calls
 * about a lost card fail, though it is still counted. sim_leave must follow.
 */
static nvml_return begin_card(const char *function, const struct device *handle, const void *out,
			      const struct card **card)
{
	int index = card_of(handle);
	nvml_return code = begin_at(function, index);

	if (code == NVML_SUCCESS)
		code = card_code(index);
	if (code == NVML_SUCCESS && !out)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS)
		*card = sim.cards[index];
	return code;
}

static nvml_return put_text(char *out, unsigned size, const char *text)
{
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(text) >= size)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memcpy(out, text, strlen(text) + 1);
	return NVML_SUCCESS;
}

static nvml_return init(const char *function)
{
	struct sim_entry e = sim_enter(&sim, function, TOPOLOGY_NO_CARD);
	nvml_return code = NVML_ERROR_UNKNOWN;

	if (!e.broken) {
		code = e.failure ? e.failure : driver_code();
		if (code == NVML_SUCCESS)
			initialised++;
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlInit_v2(void)
{
	return init("nvmlInit_v2");
}

NVML_API nvml_return nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	return init("nvmlInitWithFlags");
}

NVML_API nvml_return nvmlShutdown(void)
{
	nvml_return code = begin("nvmlShutdown");

	if (code == NVML_SUCCESS)
		initialised--;
	sim_leave(&sim);
	return code;
}

/* Answers at once in every state: it asks no driver. */
NVML_API const char *nvmlErrorString(nvml_return code)
{
	switch (code) {
	case NVML_SUCCESS:
		return "The operation was successful";
	case NVML_ERROR_UNINITIALIZED:
		return "Uninitialized";
	case NVML_ERROR_INVALID_ARGUMENT:
		return "Invalid Argument";
	case NVML_ERROR_NOT_SUPPORTED:
		return "Not Supported";
	case NVML_ERROR_NO_PERMISSION:
		return "Insufficient Permissions";
	case NVML_ERROR_NOT_FOUND:
		return "Not Found";
	case NVML_ERROR_INSUFFICIENT_SIZE:
		return "Insufficient Size";
	case NVML_ERROR_DRIVER_NOT_LOADED:
		return "Driver Not Loaded";
	case NVML_ERROR_TIMEOUT:
		return "Timeout";
	case NVML_ERROR_LIBRARY_NOT_FOUND:
		return "NVML Shared Library Not Found";
	case NVML_ERROR_FUNCTION_NOT_FOUND:
		return "Function Not Found";
	case NVML_ERROR_GPU_IS_LOST:
		return "GPU is lost";
	case NVML_ERROR_RESET_REQUIRED:
		return "GPU requires reset";
	case NVML_ERROR_LIB_RM_VERSION_MISMATCH:
		return "Driver/library version mismatch";
	case NVML_ERROR_MEMORY:
		return "Insufficient Memory";
	}
	return "Unknown Error";
}

NVML_API nvml_return nvmlSystemGetDriverVersion(char *out, unsigned size)
{
	nvml_return code = begin("nvmlSystemGetDriverVersion");

	if (code == NVML_SUCCESS)
		code = put_text(out, size, sim.driver->version);
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
	char text[TOPOLOGY_TEXT + 32];
	nvml_return code = begin("nvmlSystemGetNVMLVersion");

	if (code == NVML_SUCCESS) {
		snprintf(text, sizeof text, "%d.%s", sim.driver->cuda_major, sim.driver->version);
		code = put_text(out, size, text);
	}
	sim_leave(&sim);
	return code;
}

static nvml_return cuda_version(const char *function, int *out)
{
	nvml_return code = begin(function);

	if (code == NVML_SUCCESS && !out)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS)
		*out = sim.driver->cuda_major * 1000 + sim.driver->cuda_minor * 10;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlSystemGetCudaDriverVersion(int *out)
{
	return cuda_version("nvmlSystemGetCudaDriverVersion", out);
}

NVML_API nvml_return nvmlSystemGetCudaDriverVersion_v2(int *out)
{
	return cuda_version("nvmlSystemGetCudaDriverVersion_v2", out);
}

NVML_API nvml_return nvmlDeviceGetCount_v2(unsigned *out)
{
	nvml_return code = begin("nvmlDeviceGetCount_v2");

	if (code == NVML_SUCCESS && !out)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS)
		*out = (unsigned)sim.count;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **out)
{
	int card = index < TOPOLOGY_MAX_CARDS ? (int)index : TOPOLOGY_NO_CARD;
	nvml_return code = begin_at("nvmlDeviceGetHandleByIndex_v2", card);

	if (code == NVML_SUCCESS)
		code = out ? card_code(card) : NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS)
		*out = &devices[card];
	sim_leave(&sim);
	return code;
}

/* Writes a card's address into text, of 32 bytes, with the digits of domain that NVML has there. */
static void address(const struct card *card, int domain_digits, char *text)
{
	snprintf(text, 32, "%0*X:%02X:%02X.%X", domain_digits, card->pci_domain, card->pci_bus, card->pci_device,
		 card->pci_function);
}

/* Finds the first card of which matches says that it is the one. */
static nvml_return find_card(const char *function, const char *what, struct device **out,
			     bool (*matches)(const struct card *, const char *))
{
	nvml_return code = begin(function);

	if (code == NVML_SUCCESS && (!what || !out))
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		code = NVML_ERROR_NOT_FOUND;
		for (int i = 0; code == NVML_ERROR_NOT_FOUND && i < sim.count; i++) {
			if (!matches(sim.cards[i], what))
				continue;
			code = card_code(i);
			*out = &devices[i];
		}
	}
	sim_leave(&sim);
	return code;
}

static bool has_uuid(const struct card *card, const char *uuid)
{
	return strcmp(card->uuid, uuid) == 0;
}

static bool has_address(const struct card *card, const char *wanted)
{
	char text[32];

	address(card, 8, text);
	return strcasecmp(text, wanted) == 0 || strcasecmp(text + 4, wanted) == 0;
}

NVML_API nvml_return nvmlDeviceGetHandleByUUID(const char *uuid, struct device **out)
{
	return find_card("nvmlDeviceGetHandleByUUID", uuid, out, has_uuid);
}

NVML_API nvml_return nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, struct device **out)
{
	return find_card("nvmlDeviceGetHandleByPciBusId_v2", bus_id, out, has_address);
}

NVML_API nvml_return nvmlDeviceGetIndex(struct device *device, unsigned *out)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetIndex", device, out, &card);

	if (code == NVML_SUCCESS)
		*out = (unsigned)card_of(device);
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetUUID(struct device *device, char *out, unsigned size)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetUUID", device, out, &card);

	if (code == NVML_SUCCESS)
		code = put_text(out, size, card->uuid);
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetName(struct device *device, char *out, unsigned size)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetName", device, out, &card);

	if (code == NVML_SUCCESS)
		code = put_text(out, size, card->model);
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetSerial(struct device *device, char *out, unsigned size)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetSerial", device, out, &card);

	if (code == NVML_SUCCESS)
		code = card->serial[0] ? put_text(out, size, card->serial) : NVML_ERROR_NOT_SUPPORTED;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetMinorNumber(struct device *device, unsigned *out)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetMinorNumber", device, out, &card);

	if (code == NVML_SUCCESS)
		*out = (unsigned)card->minor;
	sim_leave(&sim);
	return code;
}

static void put_pci(struct nvml_pci *out, const struct card *card)
{
	*out = (struct nvml_pci){
		.domain = card->pci_domain,
		.bus = card->pci_bus,
		.device = card->pci_device,
		.pci_device_id = 0x20b010de, /* an A100 */
	};
	char text[32];
	address(card, 4, text);
	memcpy(out->bus_id_legacy, text, sizeof out->bus_id_legacy - 1); /* the rest stays NUL */
	address(card, 8, out->bus_id);
}

NVML_API nvml_return nvmlDeviceGetPciInfo_v3(struct device *device, struct nvml_pci *out)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetPciInfo_v3", device, out, &card);

	if (code == NVML_SUCCESS)
		put_pci(out, card);
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetMemoryInfo(struct device *device, struct nvml_memory *out)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetMemoryInfo", device, out, &card);

	if (code == NVML_SUCCESS) {
		*out = (struct nvml_memory){
			.total = card->memory_mib << 20,
			.free = (card->memory_mib - card->used_mib) << 20,
			.used = card->used_mib << 20,
		};
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetMemoryInfo_v2(struct device *device, struct nvml_memory_v2 *out)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetMemoryInfo_v2", device, out, &card);

	if (code == NVML_SUCCESS) {
		out->total = card->memory_mib << 20;
		out->reserved = 0;
		out->free = (card->memory_mib - card->used_mib) << 20;
		out->used = card->used_mib << 20;
	}
	sim_leave(&sim);
	return code;
}

/* The NUMA nodes whose memory is near, a bit each. */
NVML_API nvml_return nvmlDeviceGetMemoryAffinity(struct device *device, unsigned size, unsigned long *out,
						 unsigned scope)
{
	enum { BITS = 8 * sizeof *out };
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetMemoryAffinity", device, out, &card);

	(void)scope;
	if (code == NVML_SUCCESS && (size == 0 || card->numa >= (int)(size * BITS)))
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS && card->numa < 0)
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS) {
		memset(out, 0, size * sizeof *out);
		out[card->numa / BITS] = 1UL << card->numa % BITS;
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetCudaComputeCapability(struct device *device, int *major, int *minor)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetCudaComputeCapability", device, major && minor ? major : NULL, &card);

	if (code == NVML_SUCCESS) {
		*major = card->compute_major;
		*minor = card->compute_minor;
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetMigMode", device, current && pending ? current : NULL, &card);

	if (code == NVML_SUCCESS && card->mig == MIG_NOT_SUPPORTED)
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS)
		*current = *pending = card->mig == MIG_ENABLED;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *out)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetMaxMigDeviceCount", device, out, &card);

	if (code == NVML_SUCCESS)
		*out = card->mig == MIG_NOT_SUPPORTED ? 0 : 7;
	sim_leave(&sim);
	return code;
}

/* An unhealthy card is one that could not replace a bad row of its memory. */
NVML_API nvml_return nvmlDeviceGetRemappedRows(struct device *device, unsigned *correctable, unsigned *uncorrectable,
					       unsigned *pending, unsigned *failed)
{
	const struct card *card;
	bool all = correctable && uncorrectable && pending && failed;
	nvml_return code = begin_card("nvmlDeviceGetRemappedRows", device, all ? failed : NULL, &card);

	if (code == NVML_SUCCESS) {
		*correctable = *pending = 0;
		*uncorrectable = *failed = !card->healthy;
	}
	sim_leave(&sim);
	return code;
}

/* Whether a link forbids a to ask about b. */
static bool is_deaf(const struct card *a, const struct card *b)
{
	for (int i = 0; i < sim.topology.link_count; i++) {
		const struct link *l = &sim.topology.links[i];
		if (l->one_way && l->b == a->index && l->a == b->index)
			return true;
	}
	return false;
}

NVML_API nvml_return nvmlDeviceGetTopologyCommonAncestor(struct device *device, struct device *other, int *out)
{
	static const int levels[] = {
		[NEAR_BOARD] = 0,
		[NEAR_SWITCH] = 10,
		[NEAR_HOST_BRIDGE] = 30,
		[NEAR_SYSTEM] = 50,
	};
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetTopologyCommonAncestor", device, out, &card);

	if (code == NVML_SUCCESS)
		code = card_code(card_of(other));
	if (code == NVML_SUCCESS) {
		const struct card *second = sim.cards[card_of(other)];
		if (is_deaf(card, second))
			code = NVML_ERROR_UNKNOWN;
		else
			*out = levels[topology_nearness(card, second)];
	}
	sim_leave(&sim);
	return code;
}

/* A lane of a card. */
struct lane {
	const struct card *peer; /* NULL: the card has no such lane */
	bool up;
};

/* The lanes of a card are those of its links, in the order of the file. */
static struct lane lane_of(const struct card *card, unsigned number)
{
	unsigned before = 0;

	for (int i = 0; i < sim.topology.link_count; i++) {
		const struct link *l = &sim.topology.links[i];
		if (l->a != card->index && l->b != card->index)
			continue;
		if (number < before + (unsigned)l->lanes) {
			return (struct lane){
				.peer = &sim.topology.cards[l->a == card->index ? l->b : l->a],
				.up = l->a == card->index || !l->one_way,
			};
		}
		before += (unsigned)l->lanes;
	}
	return (struct lane){0};
}

/* Begins a call about a lane. sim_leave must follow. */
static nvml_return begin_lane(const char *function, struct device *device, unsigned number, const void *out,
			      struct lane *lane)
{
	const struct card *card;
	nvml_return code = begin_card(function, device, out, &card);

	if (code != NVML_SUCCESS)
		return code;
	if (number >= TOPOLOGY_MAX_LANES)
		return NVML_ERROR_INVALID_ARGUMENT;
	*lane = lane_of(card, number);
	return lane->peer ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvml_return nvmlDeviceGetNvLinkState(struct device *device, unsigned number, int *out)
{
	struct lane lane;
	nvml_return code = begin_lane("nvmlDeviceGetNvLinkState", device, number, out, &lane);

	if (code == NVML_SUCCESS)
		*out = lane.up;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *device, unsigned number, struct nvml_pci *out)
{
	struct lane lane;
	nvml_return code = begin_lane("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, number, out, &lane);

	if (code == NVML_SUCCESS && !lane.up)
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS)
		put_pci(out, lane.peer);
	sim_leave(&sim);
	return code;
}

/* No simulated card is part of a fabric. */
NVML_API nvml_return nvmlDeviceGetGpuFabricInfo(struct device *device, struct nvml_fabric_info *out)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetGpuFabricInfo", device, out, &card);

	if (code == NVML_SUCCESS)
		*out = (struct nvml_fabric_info){.status = NVML_ERROR_NOT_SUPPORTED};
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetGpuFabricInfoV(struct device *device, void *out)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetGpuFabricInfoV", device, out, &card);

	if (code == NVML_SUCCESS)
		code = NVML_ERROR_NOT_SUPPORTED;
	sim_leave(&sim);
	return code;
}

static const unsigned long long all_events =
	NVML_EVENT_SINGLE_BIT_ECC | NVML_EVENT_DOUBLE_BIT_ECC | NVML_EVENT_XID | NVML_EVENT_CLOCK;

NVML_API nvml_return nvmlDeviceGetSupportedEventTypes(struct device *device, unsigned long long *out)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceGetSupportedEventTypes", device, out, &card);

	if (code == NVML_SUCCESS)
		*out = all_events;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlEventSetCreate(struct event_set **out)
{
	nvml_return code = begin("nvmlEventSetCreate");

	if (code == NVML_SUCCESS && !out)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		code = NVML_ERROR_MEMORY;
		for (int i = 0; code != NVML_SUCCESS && i < MAX_EVENT_SETS; i++) {
			if (event_sets[i].used)
				continue;
			memset(&event_sets[i], 0, sizeof event_sets[i]);
			event_sets[i].used = true;
			*out = &event_sets[i];
			code = NVML_SUCCESS;
		}
	}
	sim_leave(&sim);
	return code;
}

static bool is_event_set(const struct event_set *set)
{
	return set >= event_sets && set < event_sets + MAX_EVENT_SETS && set->used;
}

/* Frees the set in every state of the driver. */
NVML_API nvml_return nvmlEventSetFree(struct event_set *set)
{
	nvml_return code = begin("nvmlEventSetFree");

	if (is_event_set(set))
		set->used = false;
	else if (code == NVML_SUCCESS)
		code = NVML_ERROR_INVALID_ARGUMENT;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceRegisterEvents(struct device *device, unsigned long long types, struct event_set *set)
{
	const struct card *card;
	nvml_return code = begin_card("nvmlDeviceRegisterEvents", device, set, &card);

	if (code == NVML_SUCCESS && (!is_event_set(set) || types & ~all_events))
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		struct registration *r = &set->cards[card_of(device)];
		if (!r->types)
			r->last = sim.happened; /* what was before is not told */
		r->types |= types;
	}
	sim_leave(&sim);
	return code;
}

/* How the library tells an event to those who hear types; false when it does not. */
static bool translate(const struct sim_event *e, unsigned long long types, struct nvml_event_data *out)
{
	*out = (struct nvml_event_data){
		.device = &devices[e->card],
		.type = NVML_EVENT_XID,
		.gpu_instance = UINT32_MAX,
		.compute_instance = UINT32_MAX,
	};
	switch (e->change) {
	case SIM_CARD_UNHEALTHY:
		out->data = XID_ROW_REMAPPING;
		break;
	case SIM_CARD_XID:
		if (e->value == XID_DOUBLE_BIT_ECC && types & NVML_EVENT_DOUBLE_BIT_ECC)
			out->type = NVML_EVENT_DOUBLE_BIT_ECC;
		else
			out->data = e->value;
		break;
	default:
		return false; /* a lost card says nothing, and good news is no critical error */
	}
	return (types & out->type) != 0;
}

/* Takes the next event that the set hears. */
static bool next_event(struct event_set *set, struct nvml_event_data *out)
{
	struct sim_event e;

	for (uint64_t after = 0; sim_event_after(&sim, after, &e); after = e.number) {
		struct registration *r = &set->cards[e.card];
		if (!r->types || e.number <= r->last)
			continue;
		r->last = e.number;
		if (translate(&e, r->types, out))
			return true;
	}
	return false;
}

/* Whether a card that the set hears is lost. */
static bool has_lost(const struct event_set *set)
{
	for (int i = 0; i < sim.count; i++) {
		if (set->cards[i].types && sim.cards[i]->lost)
			return true;
	}
	return false;
}

/* Waits up to ms milliseconds for an event. It refuses while a card of the set is lost. */
NVML_API nvml_return nvmlEventSetWait_v2(struct event_set *set, struct nvml_event_data *out, unsigned ms)
{
	nvml_return code = begin("nvmlEventSetWait_v2");
	int64_t end = sim_now_ns() + (int64_t)ms * SIM_NS_PER_MS;

	if (code == NVML_SUCCESS && (!out || !is_event_set(set)))
		code = NVML_ERROR_INVALID_ARGUMENT;
	while (code == NVML_SUCCESS) {
		if (next_event(set, out))
			break;
		int64_t left = end - sim_now_ns();
		if (has_lost(set))
			code = NVML_ERROR_GPU_IS_LOST;
		else if (left <= 0)
			code = NVML_ERROR_TIMEOUT;
		else if (!sim_wait_step(&sim, left))
			code = NVML_ERROR_UNKNOWN;
		else
			code = ready_code();
	}
	sim_leave(&sim);
	return code;
}
