/*
 * Stand-in for libixml.so, the management library of Iluvatar CoreX: NVML's
 * functions under NVML's names, and the vendor's own, which begin with "ixml".
 * It has no hardware behind it, only a topology file.
 *
 * As in NVML, functions of one version call those of another through the
 * dynamic linker, so a process that lets NVIDIA's library answer for this one's
 * names is noticed: see nvmlSystemGetCudaDriverVersion_v2.
 */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IXML_API __attribute__((visibility("default")))

enum {
	IXML_SUCCESS = 0,
	IXML_UNINITIALIZED = 1,
	IXML_INVALID_ARGUMENT = 2,
	IXML_NOT_SUPPORTED = 3,
	IXML_NOT_FOUND = 6,
	IXML_INSUFFICIENT_SIZE = 7,
	IXML_DRIVER_NOT_LOADED = 9,
	IXML_TIMEOUT = 10,
	IXML_GPU_IS_LOST = 15,
	IXML_ARGUMENT_VERSION_MISMATCH = 25,
	IXML_UNKNOWN = 999,
};

/* Levels of nvmlDeviceGetTopologyCommonAncestor. */
enum {
	IXML_TOPOLOGY_INTERNAL = 0,
	IXML_TOPOLOGY_SINGLE = 10,
	IXML_TOPOLOGY_HOST_BRIDGE = 30,
	IXML_TOPOLOGY_SYSTEM = 50,
};

enum {
	IXML_EVENT_SINGLE_BIT_ECC = 1 << 0,
	IXML_EVENT_DOUBLE_BIT_ECC = 1 << 1,
	IXML_EVENT_XID_CRITICAL = 1 << 3,
};

/* Bits of ixmlDeviceGetHealth. */
enum {
	IXML_HEALTH_SYSHUB = 1 << 0, /* what a card reports that is unhealthy for no given reason */
	IXML_HEALTH_ECC = 1 << 4,
};

enum { XID_FELL_OFF_THE_BUS = 79, XID_INTERNAL = 62 };

struct ixml_pci_info {
	char bus_id_legacy[16];
	uint32_t domain;
	uint32_t bus;
	uint32_t device;
	uint32_t pci_device_id;
	uint32_t pci_subsystem_id;
	char bus_id[32];
};

struct ixml_memory {
	uint64_t total, free, used; /* bytes */
};

struct ixml_memory_v2 {
	uint32_t version;
	uint64_t total, reserved, free, used; /* bytes */
};

struct ixml_utilization {
	uint32_t gpu, memory; /* percent */
};

struct ixml_process_info {
	uint32_t pid;
	uint64_t used_memory;
};

/* A device is its place among the cards of the vendor. */
struct ixml_device_st {
	char unused;
};
typedef struct ixml_device_st *ixml_device;

struct ixml_event_data {
	ixml_device device;
	uint64_t type;
	uint64_t data;
	uint32_t gpu_instance;
	uint32_t compute_instance;
};

_Static_assert(sizeof(struct ixml_pci_info) == 68, "nvmlDeviceGetPciInfo_v3 fills 68 bytes");
_Static_assert(sizeof(struct ixml_memory) == 24, "nvmlDeviceGetMemoryInfo fills 24 bytes");
_Static_assert(sizeof(struct ixml_memory_v2) == 40, "nvmlDeviceGetMemoryInfo_v2 fills 40 bytes");
_Static_assert(sizeof(struct ixml_utilization) == 8, "nvmlDeviceGetUtilizationRates fills 8 bytes");
_Static_assert(sizeof(struct ixml_process_info) == 16, "a process has 16 bytes");
_Static_assert(sizeof(struct ixml_event_data) == 32, "nvmlEventSetWait_v2 fills 32 bytes");

/* Who listens to which cards. */
struct ixml_event_set_st {
	uint64_t types[TOPOLOGY_MAX_CARDS]; /* by card */
	uint64_t last;			    /* the last event that was looked at */
};
typedef struct ixml_event_set_st *ixml_event_set;

static struct sim sim = SIM_INIT("iluvatar");

/*
 * How often nvmlInit succeeded without nvmlShutdown while the driver was there;
 * a driver that was unloaded wants it again. Guarded by sim.lock.
 */
static int initialised;

static struct ixml_device_st devices[TOPOLOGY_MAX_CARDS];

/* The code for the state of the driver. The lock is held. */
static int driver_code(void)
{
	switch (sim.driver->state) {
	case DRIVER_LOADED:
		return IXML_SUCCESS;
	case DRIVER_ABSENT:
		return IXML_DRIVER_NOT_LOADED;
	case DRIVER_BROKEN:
		break;
	}
	return IXML_UNKNOWN;
}

/* What the state of driver and library lets a call return. The lock is held. */
static int ready_code(void)
{
	int code = driver_code();

	if (code != IXML_SUCCESS) {
		initialised = 0;
		return code;
	}
	return initialised ? IXML_SUCCESS : IXML_UNINITIALIZED;
}

/* Begins a call that is not about one card. sim_leave must follow. */
static int begin(const char *function)
{
	struct sim_entry e = sim_enter(&sim, function, TOPOLOGY_NO_CARD);

	if (e.broken)
		return IXML_UNKNOWN;
	return e.failure ? e.failure : ready_code();
}

/* The number of a card, TOPOLOGY_NO_CARD for what is no device. */
static int number_of(ixml_device device)
{
	if (device < devices || device >= devices + TOPOLOGY_MAX_CARDS)
		return TOPOLOGY_NO_CARD;
	return (int)(device - devices);
}

/* Puts the card of a number into *card. The lock is held. */
static int find_card(int number, const struct card **card)
{
	if (number < 0 || number >= sim.count)
		return IXML_INVALID_ARGUMENT;
	if (sim.cards[number]->lost)
		return IXML_GPU_IS_LOST;
	*card = sim.cards[number];
	return IXML_SUCCESS;
}

/*
 * Begins a call about a card, which it puts into *card. Calls about a lost
 * card fail, though it is still counted. sim_leave must follow.
 */
static int begin_card(const char *function, ixml_device device, const void *out, const struct card **card)
{
	int number = number_of(device);
	struct sim_entry e = sim_enter(&sim, function, number);

	if (e.broken)
		return IXML_UNKNOWN;
	if (e.failure)
		return e.failure;
	int code = ready_code();
	if (code == IXML_SUCCESS)
		code = out ? find_card(number, card) : IXML_INVALID_ARGUMENT;
	return code;
}

/* begin_card for two cards; it is the first one's failures that count. */
static int begin_pair(const char *function, ixml_device a, ixml_device b, const void *out, const struct card **card_a,
		      const struct card **card_b)
{
	int code = begin_card(function, a, out, card_a);

	return code == IXML_SUCCESS ? find_card(number_of(b), card_b) : code;
}

static int put_text(char *out, uint32_t size, const char *text)
{
	if (strlen(text) >= size)
		return IXML_INSUFFICIENT_SIZE;
	memcpy(out, text, strlen(text) + 1);
	return IXML_SUCCESS;
}

IXML_API int nvmlInit_v2(void)
{
	struct sim_entry e = sim_enter(&sim, "nvmlInit_v2", TOPOLOGY_NO_CARD);
	int code = IXML_UNKNOWN;

	if (!e.broken) {
		code = e.failure ? e.failure : driver_code();
		if (code == IXML_SUCCESS)
			initialised++;
	}
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlShutdown(void)
{
	int code = begin("nvmlShutdown");

	if (code == IXML_SUCCESS)
		initialised--;
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlSystemGetDriverVersion(char *out, uint32_t size)
{
	int code = begin("nvmlSystemGetDriverVersion");

	if (code == IXML_SUCCESS)
		code = out ? put_text(out, size, sim.driver->version) : IXML_INVALID_ARGUMENT;
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlSystemGetNVMLVersion(char *out, uint32_t size)
{
	struct sim_entry e = sim_enter(&sim, "nvmlSystemGetNVMLVersion", TOPOLOGY_NO_CARD);
	int code = e.broken ? IXML_UNKNOWN : e.failure;

	if (code == IXML_SUCCESS)
		code = out ? put_text(out, size, "1.0.0-divvy") : IXML_INVALID_ARGUMENT;
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlSystemGetCudaDriverVersion(int *out)
{
	int code = begin("nvmlSystemGetCudaDriverVersion");

	if (code == IXML_SUCCESS && !out)
		code = IXML_INVALID_ARGUMENT;
	if (code == IXML_SUCCESS)
		*out = sim.driver->cuda_major * 1000 + sim.driver->cuda_minor * 10;
	sim_leave(&sim);
	return code;
}

/* Calls an exported function as a library does that was not linked to itself. */
IXML_API int nvmlSystemGetCudaDriverVersion_v2(int *out)
{
	int code = begin("nvmlSystemGetCudaDriverVersion_v2");

	sim_leave(&sim);
	return code == IXML_SUCCESS ? nvmlSystemGetCudaDriverVersion(out) : code;
}

IXML_API int nvmlDeviceGetCount_v2(uint32_t *out)
{
	int code = begin("nvmlDeviceGetCount_v2");

	if (code == IXML_SUCCESS && !out)
		code = IXML_INVALID_ARGUMENT;
	if (code == IXML_SUCCESS)
		*out = (uint32_t)sim.count;
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetHandleByIndex_v2(uint32_t index, ixml_device *out)
{
	ixml_device device = index < TOPOLOGY_MAX_CARDS ? &devices[index] : NULL;
	const struct card *card;
	int code = begin_card("nvmlDeviceGetHandleByIndex_v2", device, out, &card);

	if (code == IXML_SUCCESS)
		*out = device;
	sim_leave(&sim);
	return code;
}

enum search { BY_UUID, BY_SERIAL, BY_BUS_ID };

static bool is_wanted(const struct card *c, enum search by, const char *text)
{
	uint32_t domain, bus, device, function;

	switch (by) {
	case BY_UUID:
		return strcmp(c->uuid, text) == 0;
	case BY_SERIAL:
		return c->serial[0] && strcmp(c->serial, text) == 0;
	case BY_BUS_ID:
		return sscanf(text, "%x:%x:%x.%x", &domain, &bus, &device, &function) == 4 && domain == c->pci_domain &&
		       bus == c->pci_bus && device == c->pci_device && function == c->pci_function;
	}
	return false;
}

/* The first card of that uuid, serial number or PCI address. */
static int get_handle(const char *function, enum search by, const char *text, ixml_device *out)
{
	int code = begin(function);

	if (code == IXML_SUCCESS && (!text || !out))
		code = IXML_INVALID_ARGUMENT;
	if (code == IXML_SUCCESS) {
		code = IXML_NOT_FOUND;
		for (int i = 0; i < sim.count && code == IXML_NOT_FOUND; i++) {
			if (!is_wanted(sim.cards[i], by, text))
				continue;
			code = sim.cards[i]->lost ? IXML_GPU_IS_LOST : IXML_SUCCESS;
			*out = &devices[i];
		}
	}
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetHandleByUUID(const char *uuid, ixml_device *out)
{
	return get_handle("nvmlDeviceGetHandleByUUID", BY_UUID, uuid, out);
}

IXML_API int nvmlDeviceGetHandleBySerial(const char *serial, ixml_device *out)
{
	return get_handle("nvmlDeviceGetHandleBySerial", BY_SERIAL, serial, out);
}

IXML_API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, ixml_device *out)
{
	return get_handle("nvmlDeviceGetHandleByPciBusId_v2", BY_BUS_ID, bus_id, out);
}

IXML_API int nvmlDeviceGetUUID(ixml_device device, char *out, uint32_t size)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetUUID", device, out, &card);

	if (code == IXML_SUCCESS)
		code = put_text(out, size, card->uuid);
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetName(ixml_device device, char *out, uint32_t size)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetName", device, out, &card);

	if (code == IXML_SUCCESS)
		code = put_text(out, size, card->model);
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetSerial(ixml_device device, char *out, uint32_t size)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetSerial", device, out, &card);

	if (code == IXML_SUCCESS)
		code = card->serial[0] ? put_text(out, size, card->serial) : IXML_NOT_SUPPORTED;
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetBoardPartNumber(ixml_device device, char *out, uint32_t size)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetBoardPartNumber", device, out, &card);

	if (code == IXML_SUCCESS)
		code = put_text(out, size, card->model);
	sim_leave(&sim);
	return code;
}

/* A function that fills a number about a card. */
#define NUMBER_OF_CARD(function, type, expression)                             \
	IXML_API int function(ixml_device device, type *out)                   \
	{                                                                      \
		const struct card *card;                                       \
		int code = begin_card(#function, device, out, &card);          \
                                                                               \
		if (code == IXML_SUCCESS)                                      \
			*out = (type)(expression);                             \
		sim_leave(&sim);                                               \
		return code;                                                   \
	}

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

NUMBER_OF_CARD(nvmlDeviceGetMinorNumber, uint32_t, card->minor)
NUMBER_OF_CARD(nvmlDeviceGetIndex, uint32_t, device - devices)
NUMBER_OF_CARD(nvmlDeviceGetBoardId, uint32_t, board_id(card))
NUMBER_OF_CARD(nvmlDeviceGetMultiGpuBoard, uint32_t, chips_on_board(card) > 1)
NUMBER_OF_CARD(nvmlDeviceGetPowerUsage, uint32_t, 75000) /* mW, at rest */
NUMBER_OF_CARD(ixmlDeviceGetHealth, uint64_t, health_mask(card))

/* The chip's position on its board; a card with one chip has none. */
IXML_API int ixmlDeviceGetBoardPosition(ixml_device device, uint32_t *out)
{
	const struct card *card;
	int code = begin_card("ixmlDeviceGetBoardPosition", device, out, &card);

	if (code == IXML_SUCCESS && !card->board[0])
		code = IXML_NOT_SUPPORTED;
	if (code == IXML_SUCCESS)
		*out = (uint32_t)card->chip;
	sim_leave(&sim);
	return code;
}

/* Errors that were corrected and that were not. The name is the vendor's. */
IXML_API int ixmlDeviceGetEccErros(ixml_device device, uint32_t *single_bit, uint32_t *double_bit)
{
	const struct card *card;
	int code = begin_card("ixmlDeviceGetEccErros", device, single_bit, &card);

	if (code == IXML_SUCCESS && !double_bit)
		code = IXML_INVALID_ARGUMENT;
	if (code == IXML_SUCCESS) {
		*single_bit = 0;
		*double_bit = (card->health_bits & IXML_HEALTH_ECC) != 0;
	}
	sim_leave(&sim);
	return code;
}

/* Volts and thousandths of a volt. */
IXML_API int ixmlDeviceGetGPUVoltage(ixml_device device, uint32_t *whole, uint32_t *thousandths)
{
	const struct card *card;
	int code = begin_card("ixmlDeviceGetGPUVoltage", device, whole, &card);

	if (code == IXML_SUCCESS && !thousandths)
		code = IXML_INVALID_ARGUMENT;
	if (code == IXML_SUCCESS) {
		*whole = 0;
		*thousandths = 850;
	}
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetPciInfo_v3(ixml_device device, struct ixml_pci_info *out)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetPciInfo_v3", device, out, &card);

	if (code == IXML_SUCCESS) {
		*out = (struct ixml_pci_info){
			.domain = card->pci_domain,
			.bus = card->pci_bus,
			.device = card->pci_device,
			.pci_device_id = 0x00011e3e, /* the vendor's PCI id is the lower half */
		};
		/* The first text is filled up with NULs, as the vendor's. */
		snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.%X", card->pci_domain & 0xffff,
			 card->pci_bus & 0xff, card->pci_device & 0xff, card->pci_function & 0xf);
		snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.%X", card->pci_domain, card->pci_bus,
			 card->pci_device, card->pci_function);
	}
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetMemoryInfo(ixml_device device, struct ixml_memory *out)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetMemoryInfo", device, out, &card);

	if (code == IXML_SUCCESS) {
		*out = (struct ixml_memory){
			.total = card->memory_mib << 20,
			.free = (card->memory_mib - card->used_mib) << 20,
			.used = card->used_mib << 20,
		};
	}
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetMemoryInfo_v2(ixml_device device, struct ixml_memory_v2 *out)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetMemoryInfo_v2", device, out, &card);

	/* The caller says in version which struct it has room for. */
	if (code == IXML_SUCCESS && out->version != (sizeof *out | 2 << 24))
		code = IXML_ARGUMENT_VERSION_MISMATCH;
	if (code == IXML_SUCCESS) {
		out->total = card->memory_mib << 20;
		out->reserved = 0;
		out->free = (card->memory_mib - card->used_mib) << 20;
		out->used = card->used_mib << 20;
	}
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetUtilizationRates(ixml_device device, struct ixml_utilization *out)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetUtilizationRates", device, out, &card);

	if (code == IXML_SUCCESS)
		*out = (struct ixml_utilization){0};
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetTemperature(ixml_device device, int sensor, uint32_t *out)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetTemperature", device, out, &card);

	if (code == IXML_SUCCESS && sensor != 0)
		code = IXML_INVALID_ARGUMENT;
	if (code == IXML_SUCCESS)
		*out = 40;
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetComputeRunningProcesses(ixml_device device, uint32_t *count, struct ixml_process_info *out)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetComputeRunningProcesses", device, count, &card);

	(void)out; /* there are none to tell of */
	if (code == IXML_SUCCESS)
		*count = 0;
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceOnSameBoard(ixml_device a, ixml_device b, int *out)
{
	const struct card *card_a, *card_b;
	int code = begin_pair("nvmlDeviceOnSameBoard", a, b, out, &card_a, &card_b);

	if (code == IXML_SUCCESS)
		*out = same_board(card_a, card_b);
	sim_leave(&sim);
	return code;
}

/* Whether from knows nothing of its connection to to. The lock is held. */
static bool is_one_way(const struct card *from, const struct card *to)
{
	for (int i = 0; i < sim.topology.link_count; i++) {
		const struct link *l = &sim.topology.links[i];
		if (l->one_way && l->b == from->index && l->a == to->index)
			return true;
	}
	return false;
}

IXML_API int nvmlDeviceGetTopologyCommonAncestor(ixml_device a, ixml_device b, int *out)
{
	static const int levels[] = {
		[NEAR_BOARD] = IXML_TOPOLOGY_INTERNAL,
		[NEAR_SWITCH] = IXML_TOPOLOGY_SINGLE,
		[NEAR_HOST_BRIDGE] = IXML_TOPOLOGY_HOST_BRIDGE,
		[NEAR_SYSTEM] = IXML_TOPOLOGY_SYSTEM,
	};
	const struct card *card_a, *card_b;
	int code = begin_pair("nvmlDeviceGetTopologyCommonAncestor", a, b, out, &card_a, &card_b);

	if (code == IXML_SUCCESS && is_one_way(card_a, card_b))
		code = IXML_UNKNOWN;
	if (code == IXML_SUCCESS)
		*out = levels[topology_nearness(card_a, card_b)];
	sim_leave(&sim);
	return code;
}

IXML_API int nvmlDeviceGetSupportedEventTypes(ixml_device device, uint64_t *out)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceGetSupportedEventTypes", device, out, &card);

	if (code == IXML_SUCCESS)
		*out = IXML_EVENT_SINGLE_BIT_ECC | IXML_EVENT_DOUBLE_BIT_ECC | IXML_EVENT_XID_CRITICAL;
	sim_leave(&sim);
	return code;
}

/* The new set hears of what happens from now on. */
IXML_API int nvmlEventSetCreate(ixml_event_set *out)
{
	int code = begin("nvmlEventSetCreate");

	if (code == IXML_SUCCESS && !out)
		code = IXML_INVALID_ARGUMENT;
	if (code == IXML_SUCCESS) {
		ixml_event_set set = calloc(1, sizeof *set);
		if (set) {
			set->last = sim.happened;
			*out = set;
		} else {
			code = IXML_UNKNOWN;
		}
	}
	sim_leave(&sim);
	return code;
}

/* Works in every state: it is memory of the library's. */
IXML_API int nvmlEventSetFree(ixml_event_set set)
{
	if (!set)
		return IXML_INVALID_ARGUMENT;
	free(set);
	return IXML_SUCCESS;
}

IXML_API int nvmlDeviceRegisterEvents(ixml_device device, uint64_t types, ixml_event_set set)
{
	const struct card *card;
	int code = begin_card("nvmlDeviceRegisterEvents", device, set, &card);

	if (code == IXML_SUCCESS)
		set->types[number_of(device)] |= types;
	sim_leave(&sim);
	return code;
}

/* What the library tells of a change; false for those that it does not tell. */
static bool tell(struct sim_event e, struct ixml_event_data *out)
{
	*out = (struct ixml_event_data){.device = &devices[e.card], .type = IXML_EVENT_XID_CRITICAL};
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
			out->type = IXML_EVENT_DOUBLE_BIT_ECC;
		return e.value != 0;
	case SIM_CARD_HEALTHY:
	case SIM_CARD_BACK:
		break;
	}
	return false;
}

/* Waits up to ms milliseconds for an event that set listens to. */
IXML_API int nvmlEventSetWait_v2(ixml_event_set set, struct ixml_event_data *out, uint32_t ms)
{
	int code = begin("nvmlEventSetWait_v2");
	int64_t end = sim_now_ns() + (int64_t)ms * SIM_NS_PER_MS;

	if (code == IXML_SUCCESS && (!set || !out))
		code = IXML_INVALID_ARGUMENT;
	while (code == IXML_SUCCESS) {
		struct sim_event e;
		bool told = false;
		while (!told && sim_event_after(&sim, set->last, &e)) {
			set->last = e.number;
			told = tell(e, out) && (set->types[e.card] & out->type);
		}
		if (told)
			break;
		int64_t left = end - sim_now_ns();
		if (left <= 0)
			code = IXML_TIMEOUT;
		else if (!sim_wait_step(&sim, left))
			code = IXML_UNKNOWN;
		else
			code = ready_code();
	}
	sim_leave(&sim);
	return code;
}
