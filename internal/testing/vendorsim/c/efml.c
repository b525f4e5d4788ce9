/*
 * Stand-in for libefml.so, Enflame's management library: its older interface,
 * in which a card is a number. It has no hardware behind it, only a topology
 * file.
 */
#include "sim.h"

#include <stdio.h>
#include <string.h>

#define EFML_API __attribute__((visibility("default")))

enum {
	EFML_SUCCESS = 0,
	EFML_NOT_SUPPORTED = 3,
	EFML_DRIVER_NOT_LOADED = 6,
	EFML_TIMEOUT = 253,
	EFML_FAILURE = 254,
};

enum { EFML_TEXT = 128 }; /* bytes of every text that the library returns */

/* Types of events. */
enum {
	EFML_EVENT_SUSPEND = 3,
	EFML_EVENT_RESET_FINISHED = 11,
};

struct efml_info {
	char name[EFML_TEXT];
	uint32_t vendor;
	uint32_t device;
	uint32_t domain;
	uint32_t bus;
	uint32_t dev;
	uint32_t func;
	uint32_t logic; /* N of /dev/gcuN */
};

struct efml_mem {
	uint64_t total; /* bytes */
	uint32_t used;	/* MiB, as the vendor has it */
	uint32_t pad;
};

/* What a process uses. The vendor's header names no unit; Divvy takes it for bytes. */
struct efml_process {
	uint32_t pid;
	uint64_t device, system;
};

enum { EFML_PROCESSES = 64 }; /* at most, of a card */

struct efml_event {
	uint32_t id; /* the card */
	int32_t type;
	char msg[EFML_TEXT];
};

_Static_assert(sizeof(struct efml_info) == 156, "EfmlGetDevInfo fills 156 bytes");
_Static_assert(sizeof(struct efml_mem) == 16, "EfmlGetDevMem fills 16 bytes");
_Static_assert(sizeof(struct efml_process) == 24, "EfmlGetProcessInfo fills 24 bytes for each process");
_Static_assert(sizeof(struct efml_event) == 136, "EfmlGetEvent fills 136 bytes");

static struct sim sim = SIM_INIT("enflame");

/*
 * EfmlInit succeeded and the driver has been there since; a driver that was
 * unloaded wants EfmlInit again. Guarded by sim.lock.
 */
static bool initialised;

/* The code for the state of the driver. The lock is held. */
static int driver_code(void)
{
	switch (sim.driver->state) {
	case DRIVER_LOADED:
		return EFML_SUCCESS;
	case DRIVER_ABSENT:
		return EFML_DRIVER_NOT_LOADED;
	case DRIVER_BROKEN:
		break;
	}
	return EFML_FAILURE;
}

/* What the state of driver and library lets a call return. The lock is held. */
static int ready_code(void)
{
	int code = driver_code();

	if (code != EFML_SUCCESS) {
		initialised = false;
		return code;
	}
	return initialised ? EFML_SUCCESS : EFML_FAILURE;
}

/* Begins a call that is not about one card. sim_leave must follow. */
static int begin(const char *function)
{
	struct sim_entry e = sim_enter(&sim, function, TOPOLOGY_NO_CARD);

	if (e.broken)
		return EFML_FAILURE;
	return e.failure ? e.failure : ready_code();
}

/*
 * Begins a call about a card, which it puts into *card. Calls about a lost
 * card fail, though it is still counted. sim_leave must follow.
 */
static int begin_card(const char *function, uint32_t index, const void *out, const struct card **card)
{
	struct sim_entry e = sim_enter(&sim, function, index < TOPOLOGY_MAX_CARDS ? (int)index : TOPOLOGY_NO_CARD);

	if (e.broken)
		return EFML_FAILURE;
	if (e.failure)
		return e.failure;
	int code = ready_code();
	if (code != EFML_SUCCESS)
		return code;
	if (!out || index >= (uint32_t)sim.count || sim.cards[index]->lost)
		return EFML_FAILURE;
	*card = sim.cards[index];
	return EFML_SUCCESS;
}

static void put_text(char *out, const char *text)
{
	snprintf(out, EFML_TEXT, "%s", text);
}

EFML_API int EfmlInit(bool no_driver)
{
	struct sim_entry e = sim_enter(&sim, "EfmlInit", TOPOLOGY_NO_CARD);
	int code = EFML_FAILURE;

	if (!e.broken) {
		code = e.failure ? e.failure : no_driver ? EFML_SUCCESS : driver_code();
		if (code == EFML_SUCCESS)
			initialised = true;
	}
	sim_leave(&sim);
	return code;
}

EFML_API int EfmlShutdown(void)
{
	int code = begin("EfmlShutdown");

	if (code == EFML_SUCCESS)
		initialised = false;
	sim_leave(&sim);
	return code;
}

/* Answers at once in every state: it asks no driver. */
EFML_API int EfmlErrorString(int code, char *out)
{
	if (!out)
		return EFML_FAILURE;
	switch (code) {
	case EFML_SUCCESS:
		put_text(out, "success");
		break;
	case EFML_NOT_SUPPORTED:
		put_text(out, "not supported");
		break;
	case EFML_DRIVER_NOT_LOADED:
		put_text(out, "driver not loaded");
		break;
	case EFML_TIMEOUT:
		put_text(out, "timeout");
		break;
	case EFML_FAILURE:
		pthread_mutex_lock(&sim.lock);
		if (sim.broken) {
			/* The end of a long text matters most: the line and the mistake. */
			enum { ROOM = EFML_TEXT - sizeof "failure: " };
			size_t n = strlen(sim.mistake);
			const char *tail = sim.mistake + (n > ROOM ? n - ROOM : 0);
			snprintf(out, EFML_TEXT, "failure: %.*s", (int)ROOM, tail);
		} else {
			put_text(out, "failure");
		}
		pthread_mutex_unlock(&sim.lock);
		break;
	default:
		put_text(out, "unknown error");
	}
	return EFML_SUCCESS;
}

EFML_API int EfmlGetDriverVer(char *out)
{
	int code = begin("EfmlGetDriverVer");

	if (code == EFML_SUCCESS && !out)
		code = EFML_FAILURE;
	if (code == EFML_SUCCESS)
		put_text(out, sim.driver->version);
	sim_leave(&sim);
	return code;
}

EFML_API int EfmlGetLibVer(char *out)
{
	struct sim_entry e = sim_enter(&sim, "EfmlGetLibVer", TOPOLOGY_NO_CARD);
	int code = e.broken || !out ? EFML_FAILURE : e.failure;

	if (code == EFML_SUCCESS)
		put_text(out, "1.0.0-divvy");
	sim_leave(&sim);
	return code;
}

EFML_API int EfmlGetDevCount(uint32_t *out)
{
	int code = begin("EfmlGetDevCount");

	if (code == EFML_SUCCESS && !out)
		code = EFML_FAILURE;
	if (code == EFML_SUCCESS)
		*out = (uint32_t)sim.count;
	sim_leave(&sim);
	return code;
}

EFML_API int EfmlGetDevName(uint32_t index, char *out)
{
	const struct card *card;
	int code = begin_card("EfmlGetDevName", index, out, &card);

	if (code == EFML_SUCCESS)
		put_text(out, card->model);
	sim_leave(&sim);
	return code;
}

EFML_API int EfmlGetDevUuid(uint32_t index, char *out)
{
	const struct card *card;
	int code = begin_card("EfmlGetDevUuid", index, out, &card);

	if (code == EFML_SUCCESS)
		put_text(out, card->uuid);
	sim_leave(&sim);
	return code;
}

EFML_API int EfmlGetDevSn(uint32_t index, char *out)
{
	const struct card *card;
	int code = begin_card("EfmlGetDevSn", index, out, &card);

	if (code == EFML_SUCCESS)
		snprintf(out, EFML_TEXT, "SN-%s", card->uuid);
	sim_leave(&sim);
	return code;
}

EFML_API int EfmlGetDevSKU(uint32_t index, char *out)
{
	const struct card *card;
	int code = begin_card("EfmlGetDevSKU", index, out, &card);

	if (code == EFML_SUCCESS)
		put_text(out, card->model);
	sim_leave(&sim);
	return code;
}

EFML_API int EfmlGetDevInfo(uint32_t index, struct efml_info *out)
{
	const struct card *card;
	int code = begin_card("EfmlGetDevInfo", index, out, &card);

	if (code == EFML_SUCCESS) {
		*out = (struct efml_info){
			.vendor = 0x1e36, /* Enflame's PCI vendor id */
			.device = 1,
			.domain = card->pci_domain,
			.bus = card->pci_bus,
			.dev = card->pci_device,
			.func = card->pci_function,
			.logic = (uint32_t)card->minor,
		};
		put_text(out->name, card->model);
	}
	sim_leave(&sim);
	return code;
}

EFML_API int EfmlGetDevMem(uint32_t index, struct efml_mem *out)
{
	const struct card *card;
	int code = begin_card("EfmlGetDevMem", index, out, &card);

	if (code == EFML_SUCCESS) {
		*out = (struct efml_mem){
			.total = card->memory_mib << 20,
			.used = (uint32_t)sim_used_mib(&sim, card),
		};
	}
	sim_leave(&sim);
	return code;
}

/* The caller has room for EFML_PROCESSES processes and says nothing in *count. */
EFML_API int EfmlGetProcessInfo(uint32_t index, uint32_t *count, struct efml_process *out)
{
	const struct card *card;
	int code = begin_card("EfmlGetProcessInfo", index, count, &card);

	if (code == EFML_SUCCESS && !out)
		code = EFML_FAILURE;
	if (code == EFML_SUCCESS) {
		*count = 0;
		for (int i = 0; *count < EFML_PROCESSES && i < sim.topology.process_count; i++) {
			const struct process *p = &sim.topology.processes[i];
			if (!sim_uses(p, card))
				continue;
			out[(*count)++] = (struct efml_process){
				.pid = (uint32_t)p->pid,
				.device = p->memory_unknown ? UINT64_MAX : p->memory_mib << 20,
			};
		}
	}
	sim_leave(&sim);
	return code;
}

static int get_health(const char *function, uint32_t index, bool *out)
{
	const struct card *card;
	int code = begin_card(function, index, out, &card);

	if (code == EFML_SUCCESS)
		*out = card->healthy;
	sim_leave(&sim);
	return code;
}

EFML_API int EfmlGetDevHealth(uint32_t index, bool *out)
{
	return get_health("EfmlGetDevHealth", index, out);
}

EFML_API int EfmlGetDevIsHealth(uint32_t index, bool *out)
{
	return get_health("EfmlGetDevIsHealth", index, out);
}

EFML_API int EfmlGetNumaNode(uint32_t index, int *out)
{
	const struct card *card;
	int code = begin_card("EfmlGetNumaNode", index, out, &card);

	if (code == EFML_SUCCESS)
		*out = card->numa;
	sim_leave(&sim);
	return code;
}

/* Takes the next event of a kind that this library tells of. */
static bool next_event(int card, struct sim_event *out)
{
	while (sim_next_event(&sim, card, out)) {
		if (out->change <= SIM_CARD_BACK)
			return true;
	}
	return false;
}

static void put_event(struct efml_event *out, struct sim_event e)
{
	static const char *const texts[] = {
		[SIM_CARD_UNHEALTHY] = "suspended: unhealthy",
		[SIM_CARD_HEALTHY] = "reset finished: healthy",
		[SIM_CARD_LOST] = "suspended: lost",
		[SIM_CARD_BACK] = "reset finished: back",
	};
	bool good = e.change == SIM_CARD_HEALTHY || e.change == SIM_CARD_BACK;

	*out = (struct efml_event){
		.id = (uint32_t)e.card,
		.type = good ? EFML_EVENT_RESET_FINISHED : EFML_EVENT_SUSPEND,
	};
	snprintf(out->msg, sizeof out->msg, "card %d %s", e.card, texts[e.change]);
}

/* Waits up to ms milliseconds for an event of any card; below 0, for ever. */
EFML_API int EfmlGetEvent(int ms, struct efml_event *out)
{
	int code = begin("EfmlGetEvent");
	int64_t end = sim_now_ns() + (int64_t)ms * SIM_NS_PER_MS;

	if (!out)
		code = EFML_FAILURE;
	while (code == EFML_SUCCESS) {
		struct sim_event e;
		if (next_event(TOPOLOGY_NO_CARD, &e)) {
			put_event(out, e);
			break;
		}
		int64_t left = ms < 0 ? INT64_MAX : end - sim_now_ns();
		if (left <= 0)
			code = EFML_TIMEOUT;
		else if (!sim_wait_step(&sim, left))
			code = EFML_FAILURE;
		else
			code = ready_code();
	}
	sim_leave(&sim);
	return code;
}

/* The oldest event of one card; a timeout at once when there is none. */
EFML_API int EfmlGetEventV2(uint32_t index, struct efml_event *out)
{
	struct sim_entry entry =
		sim_enter(&sim, "EfmlGetEventV2", index < TOPOLOGY_MAX_CARDS ? (int)index : TOPOLOGY_NO_CARD);
	int code = entry.broken ? EFML_FAILURE : entry.failure ? entry.failure : ready_code();
	struct sim_event e;

	/* A lost card's events are still told, so begin_card is not for here. */
	if (code == EFML_SUCCESS && (!out || index >= (uint32_t)sim.count))
		code = EFML_FAILURE;
	if (code == EFML_SUCCESS) {
		if (next_event((int)index, &e))
			put_event(out, e);
		else
			code = EFML_TIMEOUT;
	}
	sim_leave(&sim);
	return code;
}
