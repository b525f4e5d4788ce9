/*
 * Stand-in for libixml.so, the management library of Iluvatar CoreX: NVML's
 * functions under NVML's names, and the vendor's own, which begin with "ixml".
 * It has no hardware behind it, only a topology file. nvmlabi.c has the
 * functions that NVIDIA's library has as well.
 */
#include "nvmlabi.h"

#include <stdlib.h>
#include <string.h>

/* Bits of ixmlDeviceGetHealth. */
enum {
	IXML_HEALTH_SYSHUB = 1 << 0, /* what a card reports that is unhealthy for no given reason */
	IXML_HEALTH_ECC = 1 << 4,
};

enum { XID_FELL_OFF_THE_BUS = 79, XID_INTERNAL = 62 };

struct ixml_utilization {
	uint32_t gpu, memory; /* percent */
};

struct ixml_process_info {
	uint32_t pid;
	uint64_t used_memory; /* bytes */
};

struct ixml_process {
	uint32_t pid;
	uint64_t used_memory;			 /* bytes */
	uint32_t gpu_instance, compute_instance; /* SIM_NO_INSTANCE: of none */
	uint64_t used_protected_memory;		 /* bytes */
};

_Static_assert(sizeof(struct ixml_utilization) == 8, "nvmlDeviceGetUtilizationRates fills 8 bytes");
_Static_assert(sizeof(struct ixml_process_info) == 16, "nvmlProcessInfo_v1_t has 16 bytes");
_Static_assert(sizeof(struct ixml_process) == 32, "nvmlProcessInfo_t of this vendor has 32 bytes");

/* Who listens to which cards. */
struct event_set {
	uint64_t types[TOPOLOGY_MAX_CARDS]; /* by card */
	uint64_t last;			    /* the last event that was looked at */
};

struct sim sim = SIM_INIT("iluvatar");

const uint32_t nvml_pci_device_id = 0x00011e3e;

/* All that this vendor's driver knows is in the topology file. */

bool nvml_driver_used(const struct card *card, uint64_t *bytes)
{
	(void)card;
	*bytes = 0;
	return true;
}

bool nvml_driver_cap(const struct card *card, struct nvml_memory_v2 *memory)
{
	(void)card;
	(void)memory;
	return true;
}

void nvml_driver_gone(void)
{
}

NVML_API nvml_return nvmlSystemGetNVMLVersion(char *out, uint32_t size)
{
	struct sim_entry e = sim_enter(&sim, "nvmlSystemGetNVMLVersion", TOPOLOGY_NO_CARD);
	nvml_return code = e.broken ? NVML_ERROR_UNKNOWN : e.failure;

	if (code == NVML_SUCCESS)
		code = out ? nvml_put_text(out, size, "1.0.0-divvy") : NVML_ERROR_INVALID_ARGUMENT;
	sim_leave(&sim);
	return code;
}

static bool has_serial(const struct card *card, const char *serial)
{
	return card->serial[0] && strcmp(card->serial, serial) == 0;
}

NVML_API nvml_return nvmlDeviceGetHandleBySerial(const char *serial, struct device **out)
{
	return nvml_find("nvmlDeviceGetHandleBySerial", serial, out, has_serial);
}

NVML_TEXT(nvmlDeviceGetBoardPartNumber, card->model)

static bool same_board(const struct card *a, const struct card *b)
{
	return a == b || (a->board[0] && strcmp(a->board, b->board) == 0);
}

/* Cards of the vendor on the board of card. The lock is held. */
static int chips_on_board(const struct card *card)
{
	int n = 0;

	for (int i = 0; i < sim.count; i++)
		n += same_board(card, sim.cards[i]);
	return n;
}

/* The number of the first card of card's board, which is the board's. The lock is held. */
static int board_id(const struct card *card)
{
	int i = 0;

	while (!same_board(card, sim.cards[i]))
		i++;
	return 0x100 * (1 + sim.cards[i]->index);
}

static uint64_t health_mask(const struct card *card)
{
	return card->health_bits || card->healthy ? card->health_bits : IXML_HEALTH_SYSHUB;
}

NVML_VALUE(nvmlDeviceGetBoardId, uint32_t, board_id(card))
NVML_VALUE(nvmlDeviceGetMultiGpuBoard, uint32_t, chips_on_board(card) > 1)
NVML_VALUE(nvmlDeviceGetPowerUsage, uint32_t, 75000) /* mW, at rest */
NVML_VALUE(ixmlDeviceGetHealth, uint64_t, health_mask(card))

/* The chip's position on its board; a card with one chip has none. */
NVML_API nvml_return ixmlDeviceGetBoardPosition(struct device *device, uint32_t *out)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("ixmlDeviceGetBoardPosition", device, out, &card);

	if (code == NVML_SUCCESS && !card->board[0])
		code = NVML_ERROR_NOT_SUPPORTED;
	if (code == NVML_SUCCESS)
		*out = (uint32_t)card->chip;
	sim_leave(&sim);
	return code;
}

/* Errors that were corrected and that were not. The name is the vendor's. */
NVML_API nvml_return ixmlDeviceGetEccErros(struct device *device, uint32_t *single_bit, uint32_t *double_bit)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("ixmlDeviceGetEccErros", device, single_bit, &card);

	if (code == NVML_SUCCESS && !double_bit)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		*single_bit = 0;
		*double_bit = (card->health_bits & IXML_HEALTH_ECC) != 0;
	}
	sim_leave(&sim);
	return code;
}

/* Volts and thousandths of a volt. */
NVML_API nvml_return ixmlDeviceGetGPUVoltage(struct device *device, uint32_t *whole, uint32_t *thousandths)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("ixmlDeviceGetGPUVoltage", device, whole, &card);

	if (code == NVML_SUCCESS && !thousandths)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		*whole = 0;
		*thousandths = 850;
	}
	sim_leave(&sim);
	return code;
}

static const struct ixml_utilization at_rest;

NVML_VALUE(nvmlDeviceGetUtilizationRates, struct ixml_utilization, at_rest)

NVML_API nvml_return nvmlDeviceGetTemperature(struct device *device, int sensor, uint32_t *out)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceGetTemperature", device, out, &card);

	if (code == NVML_SUCCESS && sensor != 0)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS)
		*out = 40;
	sim_leave(&sim);
	return code;
}

/* The processes of a card; returns how many. The lock is held. */
static uint32_t processes_of(const struct card *card, const struct process *out[TOPOLOGY_MAX_PROCESSES])
{
	uint32_t n = 0;

	for (int i = 0; i < sim.topology.process_count; i++) {
		if (sim_uses(&sim.topology.processes[i], card))
			out[n++] = &sim.topology.processes[i];
	}
	return n;
}

/*
 * Begins a function that fills a list with the processes of a card. It returns them, sets
 * count to how many there are, and room to how many of them the list has room for.
 */
static nvml_return begin_processes(const char *function, struct device *device, uint32_t *count, const void *out,
				   const struct process **found, uint32_t *room)
{
	const struct card *card;
	nvml_return code = nvml_begin_card(function, device, count, &card);

	if (code != NVML_SUCCESS)
		return code;
	if (*count > 0 && !out)
		return NVML_ERROR_INVALID_ARGUMENT;
	*room = *count;
	*count = processes_of(card, found);
	if (*room > *count)
		*room = *count;
	return NVML_SUCCESS;
}

NVML_API nvml_return nvmlDeviceGetComputeRunningProcesses(struct device *device, uint32_t *count,
							  struct ixml_process_info *out)
{
	const struct process *found[TOPOLOGY_MAX_PROCESSES];
	uint32_t room = 0;
	nvml_return code = begin_processes("nvmlDeviceGetComputeRunningProcesses", device, count, out, found, &room);

	for (uint32_t i = 0; i < room; i++) {
		out[i] = (struct ixml_process_info){
			.pid = (uint32_t)found[i]->pid,
			.used_memory = nvml_process_bytes(found[i]),
		};
	}
	if (code == NVML_SUCCESS && *count > room)
		code = NVML_ERROR_INSUFFICIENT_SIZE;
	sim_leave(&sim);
	return code;
}

/* Fills as much as there is room for, and succeeds with the count of all. */
NVML_API nvml_return ixmlDeviceGetComputeAllProcesses(struct device *device, uint32_t *count, struct ixml_process *out)
{
	const struct process *found[TOPOLOGY_MAX_PROCESSES];
	uint32_t room = 0;
	nvml_return code = begin_processes("ixmlDeviceGetComputeAllProcesses", device, count, out, found, &room);

	for (uint32_t i = 0; i < room; i++) {
		out[i] = (struct ixml_process){
			.pid = (uint32_t)found[i]->pid,
			.used_memory = nvml_process_bytes(found[i]),
			.gpu_instance = SIM_NO_INSTANCE,
			.compute_instance = SIM_NO_INSTANCE,
		};
	}
	sim_leave(&sim);
	return code;
}

NVML_API nvml_return nvmlDeviceOnSameBoard(struct device *a, struct device *b, int *out)
{
	const struct card *card_a, *card_b;
	nvml_return code = nvml_begin_pair("nvmlDeviceOnSameBoard", a, b, out, &card_a, &card_b);

	if (code == NVML_SUCCESS)
		*out = same_board(card_a, card_b);
	sim_leave(&sim);
	return code;
}

NVML_VALUE(nvmlDeviceGetSupportedEventTypes, uint64_t,
	   NVML_EVENT_SINGLE_BIT_ECC | NVML_EVENT_DOUBLE_BIT_ECC | NVML_EVENT_XID)

/* The new set hears of what happens from now on. */
NVML_API nvml_return nvmlEventSetCreate(struct event_set **out)
{
	nvml_return code = nvml_begin("nvmlEventSetCreate");

	if (code == NVML_SUCCESS && !out)
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS) {
		struct event_set *set = calloc(1, sizeof *set);
		if (set) {
			set->last = sim.happened;
			*out = set;
		} else {
			code = NVML_ERROR_UNKNOWN;
		}
	}
	sim_leave(&sim);
	return code;
}

/* Works in every state: it is memory of the library's. */
NVML_API nvml_return nvmlEventSetFree(struct event_set *set)
{
	if (!set)
		return NVML_ERROR_INVALID_ARGUMENT;
	free(set);
	return NVML_SUCCESS;
}

NVML_API nvml_return nvmlDeviceRegisterEvents(struct device *device, uint64_t types, struct event_set *set)
{
	const struct card *card;
	nvml_return code = nvml_begin_card("nvmlDeviceRegisterEvents", device, set, &card);

	if (code == NVML_SUCCESS)
		set->types[nvml_card_of(device)] |= types;
	sim_leave(&sim);
	return code;
}

/* What the library tells of a change; false for those that it does not tell. */
static bool tell(struct sim_event e, struct nvml_event_data *out)
{
	*out = (struct nvml_event_data){.device = &devices[e.card], .type = NVML_EVENT_XID};
	switch (e.change) {
	case SIM_CARD_XID:
		out->data = e.value;
		return true;
	case SIM_CARD_LOST:
		out->data = XID_FELL_OFF_THE_BUS;
		return true;
	case SIM_CARD_UNHEALTHY:
		out->data = XID_INTERNAL;
		return true;
	case SIM_CARD_BITS:
		out->data = XID_INTERNAL;
		if (e.value & IXML_HEALTH_ECC)
			out->type = NVML_EVENT_DOUBLE_BIT_ECC;
		return e.value != 0;
	case SIM_CARD_HEALTHY:
	case SIM_CARD_BACK:
		break;
	}
	return false;
}

/* Takes the next event that the set listens to. */
static nvml_return take(void *listener, struct nvml_event_data *out)
{
	struct event_set *set = listener;
	struct sim_event e;

	while (sim_event_after(&sim, set->last, &e)) {
		set->last = e.number;
		if (tell(e, out) && (set->types[e.card] & out->type))
			return NVML_SUCCESS;
	}
	return NVML_ERROR_TIMEOUT;
}

/* Waits up to ms milliseconds for an event that set listens to. */
NVML_API nvml_return nvmlEventSetWait_v2(struct event_set *set, struct nvml_event_data *out, uint32_t ms)
{
	nvml_return code = nvml_begin("nvmlEventSetWait_v2");

	if (code == NVML_SUCCESS && (!set || !out))
		code = NVML_ERROR_INVALID_ARGUMENT;
	if (code == NVML_SUCCESS)
		code = nvml_await(ms, take, set, out);
	sim_leave(&sim);
	return code;
}
