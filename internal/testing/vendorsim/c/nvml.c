/*
 * Stand-in for libnvidia-ml.so.1, NVIDIA's management library (NVML). It has no
 * hardware behind it, only a topology file. nvmlabi.c has the functions that
 * other vendors' libraries have under the same names, nvmlmig.c those about MIG,
 * nvmlprocess.c those about processes,
 * nvmllimits.c those about limits of memory.
 */
#include "nvmlabi.h"

#include <stdio.h>
#include <string.h>

/* Codes of critical errors that mean something to this file. */
enum {
	XID_DOUBLE_BIT_ECC = 48,
	XID_ROW_REMAPPING = 63,
};

struct nvml_fabric_info {
	unsigned char cluster_uuid[16];
	nvml_return status;
	unsigned clique;
	unsigned char state;
};

/* Which events of a card an event set hears. */
struct registration {
	uint64_t types; /* 0: none */
	uint64_t last;	/* number of the last event that it was told, or that came before */
};

struct event_set {
	bool used;
	struct registration cards[TOPOLOGY_MAX_CARDS];
};

_Static_assert(sizeof(struct nvml_fabric_info) == 28, "nvmlGpuFabricInfo_t has 28 bytes");

enum { MAX_EVENT_SETS = 32 };

struct sim sim = SIM_INIT("nvidia");

const uint32_t nvml_pci_device_id = 0x20b010de; /* an A100 */

/* Guarded by sim.lock. */
static struct event_set event_sets[MAX_EVENT_SETS];

NVML_API nvml_return nvmlInitWithFlags(uint32_t flags)
{
	(void)flags;
	return nvmlInit_v2();
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
	case NVML_ERROR_OPERATING_SYSTEM:
		return "Operating System";
	case NVML_ERROR_LIB_RM_VERSION_MISMATCH:
		return "Driver/library version mismatch";
	case NVML_ERROR_MEMORY:
		return "Insufficient Memory";
	}
	return "Unknown Error";
}

NVML_API nvml_return nvmlSystemGetNVMLVersion(char *out, uint32_t size)
{
	char text[TOPOLOGY_TEXT + 32];
	nvml_return code = nvml_begin("nvmlSystemGetNVMLVersion");

	if (code == NVML_SUCCESS) {
		snprintf(text, sizeof text, "%d.%s", sim.driver->cuda_major, sim.driver->version);
		code = nvml_put_text(out, size, text);
	}
	sim_leave(&sim);
	return code;
}

/* The NUMA nodes whose memory is near, a bit each. */
NVML_API nvml_return nvmlDeviceGetMemoryAffinity(struct device *device, uint32_t size, unsigned long *out,
						 unsigned scope)
{
	enum { BITS = 8 * sizeof *out };
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetMemoryAffinity", device, out, &card);

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
	nvml_return code = nvml_begin_card("nvmlDeviceGetCudaComputeCapability", device, major && minor ? major : NULL, &card);

	if (code == NVML_SUCCESS) {
		*major = card->compute_major;
		*minor = card->compute_minor;
	}
	sim_leave(&sim);
	return code;
}

/* An unhealthy card is one that could not replace a bad row of its memory. */
NVML_API nvml_return nvmlDeviceGetRemappedRows(struct device *device, uint32_t *correctable, uint32_t *uncorrectable,
					       uint32_t *pending, uint32_t *failed)
{
	const struct card *card;
	bool all = correctable && uncorrectable && pending && failed;
	nvml_return code = nvml_begin_card("nvmlDeviceGetRemappedRows", device, all ? failed : NULL, &card);

	if (code == NVML_SUCCESS) {
		*correctable = *pending = 0;
		*uncorrectable = *failed = !card->healthy;
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
static struct lane lane_of(const struct card *card, uint32_t number)
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
static nvml_return begin_lane(const char *function, struct device *device, uint32_t number, const void *out,
			      struct lane *lane)
{
	const struct card *card;
	nvml_return code = nvml_begin_card(function, device, out, &card);

	if (code != NVML_SUCCESS)
		return code;
	if (number >= TOPOLOGY_MAX_LANES)
		return NVML_ERROR_INVALID_ARGUMENT;
	*lane = lane_of(card, number);
	return lane->peer ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvml_return nvmlDeviceGetNvLinkState(struct device *device, uint32_t number, int *out)
{
	struct lane lane;
	nvml_return code = begin_lane("nvmlDeviceGetNvLinkState", device, number, out, &lane);

	if (code == NVML_SUCCESS)
		*out = lane.up;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *device, uint32_t number, struct nvml_pci *out)
{
	struct lane lane;
	nvml_return code = begin_lane("nvmlDeviceGetNvLinkRemotePciInfo_v2", device, number, out, &lane);

	if (code == NVML_SUCCESS && !lane.up)
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS)
		nvml_put_pci(out, lane.peer);
	sim_leave(&sim);
	return code;
}

static const struct nvml_fabric_info no_fabric = {.status = NVML_ERROR_NOT_SUPPORTED};

/* No simulated card is part of a fabric. */
NVML_VALUE(nvmlDeviceGetGpuFabricInfo, struct nvml_fabric_info, no_fabric)

NVML_API nvml_return nvmlDeviceGetGpuFabricInfoV(struct device *device, void *out)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetGpuFabricInfoV", device, out, &card);

	if (code == NVML_SUCCESS)
		code = NVML_ERROR_NOT_SUPPORTED;
	sim_leave(&sim);
	return code;
}

enum { ALL_EVENTS = NVML_EVENT_SINGLE_BIT_ECC | NVML_EVENT_DOUBLE_BIT_ECC | NVML_EVENT_XID | NVML_EVENT_CLOCK };

NVML_VALUE(nvmlDeviceGetSupportedEventTypes, uint64_t, ALL_EVENTS)

NVML_API nvml_return nvmlEventSetCreate(struct event_set **out)
{
	nvml_return code = nvml_begin("nvmlEventSetCreate");

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
	nvml_return code = nvml_begin("nvmlEventSetFree");

	if (is_event_set(set))
		set->used = false;
	else if (code == NVML_SUCCESS)
		code = NVML_ERROR_INVALID_ARGUMENT;
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceRegisterEvents(struct device *device, uint64_t types, struct event_set *set)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceRegisterEvents", device, set, &card);

	if (code == NVML_SUCCESS && (!is_event_set(set) || types & ~(uint64_t)ALL_EVENTS))
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		struct registration *r = &set->cards[nvml_card_of(device)];
		if (!r->types)
			r->last = sim.happened; /* what was before is not told */
		r->types |= types;
	}
	sim_leave(&sim);
	return code;
}

/* How the library tells an event to those who hear types; false when it does not. */
static bool translate(const struct sim_event *e, uint64_t types, struct nvml_event_data *out)
{
	*out = (struct nvml_event_data){
		.device = &devices[e->card],
		.type = NVML_EVENT_XID,
		.gpu_instance = e->gpu_instance,
		.compute_instance = e->compute_instance,
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
	if (out->type != NVML_EVENT_XID) /* only these name an instance */
		out->gpu_instance = out->compute_instance = SIM_NO_INSTANCE;
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

/* Takes the next event. It refuses while a card of the set is lost. */
static nvml_return take(void *set, struct nvml_event_data *out)
{
	if (next_event(set, out))
		return NVML_SUCCESS;
	return has_lost(set) ? NVML_ERROR_GPU_IS_LOST : NVML_ERROR_TIMEOUT;
}

/* Waits up to ms milliseconds for an event. */
NVML_API nvml_return nvmlEventSetWait_v2(struct event_set *set, struct nvml_event_data *out, uint32_t ms)
{
	nvml_return code = nvml_begin("nvmlEventSetWait_v2");

	if (code == NVML_SUCCESS && (!out || !is_event_set(set)))
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS)
		code = nvml_await(ms, take, set, out);
	sim_leave(&sim);
	return code;
}
