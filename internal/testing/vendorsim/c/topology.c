/* Parser of the topology file. It stops at the first mistake. */
#include "mig.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum section { NO_SECTION, DRIVER, LIBRARY, CGROUP, CARD, MIG, LINK, PROCESS };

const char *const topology_vendors[TOPOLOGY_VENDORS] = {"enflame", "nvidia", "iluvatar"};

enum {
	MAX_POSITION = 1023,	  /* of a chip on its board */
	MAX_MINOR = 1048575,
	MAX_MIG_DEVICES = TOPOLOGY_MAX_CARDS * TOPOLOGY_MAX_MIG, /* of all cards */
	MAX_DELAY_MS = 3600 * 1000,
	MAX_PID = 4194304, /* Linux has no higher one */
};

/* Keys of a section, to notice those that are missing or given twice. */
enum key {
	KEY_STATE = 1 << 0,
	KEY_VERSION = 1 << 1,
	KEY_DELAY = 1 << 2,
	KEY_FAIL = 1 << 3,
	KEY_VENDOR = 1 << 4,
	KEY_MODEL = 1 << 5,
	KEY_UUID = 1 << 6,
	KEY_MEMORY = 1 << 7,
	KEY_NUMA = 1 << 8,
	KEY_MINOR = 1 << 9,
	KEY_HEALTH = 1 << 10,
	KEY_LOST = 1 << 11,
	KEY_USED = 1 << 12,
	KEY_CUDA = 1 << 13,
	KEY_BOARD = 1 << 14,
	KEY_CHIP = 1 << 15,
	KEY_PCI = 1 << 16,
	KEY_SWITCH = 1 << 17,
	KEY_COMPUTE = 1 << 18,
	KEY_MIG = 1 << 19,
	KEY_XID = 1 << 20,
	KEY_BITS = 1 << 21,
	KEY_SERIAL = 1 << 22,
	KEY_LANES = 1 << 23,
	KEY_ONE_WAY = 1 << 24,
	KEY_SLOW = 1 << 25,
	KEY_LOCK = 1 << 26,
	KEY_PROFILE = 1 << 27,
	KEY_GI = 1 << 28,
	KEY_CI = 1 << 29,
	KEY_CAPS = 1 << 30,
	/* Of sections without the keys above that have the same bit. */
	KEY_CARD = 1 << 0,
	KEY_PID = 1 << 1,
	KEY_MIB = 1 << 2,
	KEY_ON_MIG = 1 << 3,
	KEY_UTILIZATION = 1 << 4,
	KEY_LISTS = 1 << 5,
	KEY_MEMACCT = 1 << 4,
	KEY_PERSISTENCE = 1 << 5,
	KEY_RUN = 1 << 6,
	KEY_LACKS = 1 << 4,
	KEY_ROOT = 1 << 0,
	KEY_PROC = 1 << 1,
	KEY_HIERARCHY = 1 << 2,
};

/* A [mig] section: a MIG device of a card that may not have been described yet. */
struct mig_section {
	int card, index;
	struct mig_device device;
};

struct parser {
	struct topology *topology;
	int line;
	enum section section;
	char name[48];	    /* of the section, as messages show it */
	unsigned seen;	    /* keys of the section so far */
	struct card *slots; /* TOPOLOGY_MAX_CARDS of them by index; line 0 is an empty slot */
	int current;	    /* index of this section's driver, library or card, line of a section [cgroup] */
	struct mig_section *migs; /* MAX_MIG_DEVICES of them */
	int mig_count;		  /* the last is that of a section [mig] */
	struct link *links; /* TOPOLOGY_MAX_LINKS of them */
	int link_count;	    /* the last is that of a section [link] */
	struct process *processes; /* TOPOLOGY_MAX_PROCESSES of them */
	int process_count;	   /* the last is that of a section [process] */
	char *error;
	size_t error_size;
};

static bool fail(struct parser *p, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Records the mistake and returns false. */
static bool fail(struct parser *p, int line, const char *format, ...)
{
	char text[256];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	snprintf(p->error, p->error_size, "%d: %s", line, text);
	return false;
}

static bool is_space(char c)
{
	return c == ' ' || c == '\t' || c == '\r';
}

/* Cuts white space off both ends of s, in place. */
static char *trim(char *s)
{
	while (is_space(*s))
		s++;
	size_t n = strlen(s);
	while (n > 0 && is_space(s[n - 1]))
		s[--n] = '\0';
	return s;
}

/* Cuts off a comment: # at the start of a line or after white space. */
static void cut_comment(char *s)
{
	for (char *c = s; *c; c++) {
		if (*c == '#' && (c == s || is_space(c[-1]))) {
			*c = '\0';
			return;
		}
	}
}

static bool parse_integer(struct parser *p, const char *key, const char *value, long long low, long long high,
			  long long *out)
{
	char *end;

	errno = 0;
	long long n = strtoll(value, &end, 10);
	bool digits = (value[0] >= '0' && value[0] <= '9') || (value[0] == '-' && value[1] >= '0' && value[1] <= '9');
	if (!digits || *end != '\0' || errno != 0 || n < low || n > high)
		return fail(p, p->line, "%s = \"%s\" is not an integer from %lld to %lld", key, value, low, high);
	*out = n;
	return true;
}

static bool parse_text(struct parser *p, const char *key, const char *value, char out[TOPOLOGY_TEXT])
{
	size_t n = strlen(value);

	if (n >= TOPOLOGY_TEXT)
		return fail(p, p->line, "%s is longer than %d bytes", key, TOPOLOGY_TEXT - 1);
	memcpy(out, value, n + 1);
	return true;
}

static bool parse_path(struct parser *p, const char *key, const char *value, char out[TOPOLOGY_PATH])
{
	size_t n = strlen(value);

	if (n == 0)
		return fail(p, p->line, "%s is empty", key);
	if (n >= TOPOLOGY_PATH)
		return fail(p, p->line, "%s is longer than %d bytes", key, TOPOLOGY_PATH - 1);
	memcpy(out, value, n + 1);
	return true;
}

static bool is_function_name(const char *s)
{
	if (*s == '\0' || strlen(s) >= TOPOLOGY_TEXT)
		return false;
	for (; *s; s++) {
		bool letter = (*s >= 'a' && *s <= 'z') || (*s >= 'A' && *s <= 'Z');
		if (!letter && !(*s >= '0' && *s <= '9') && *s != '_')
			return false;
	}
	return true;
}

/* Parses "function:number[,function:number...]"; nothing at all is an empty list. */
static bool parse_calls(struct parser *p, const char *key, const char *what, long long most, char *value,
			struct calls *out)
{
	char number_name[48];

	snprintf(number_name, sizeof number_name, "%s %s", key, what);
	out->count = 0;
	if (*value == '\0')
		return true;
	for (char *item = value; item;) {
		char *next = strchr(item, ',');
		if (next)
			*next++ = '\0';
		item = trim(item);
		char *number = strchr(item, ':');
		if (number)
			*number++ = '\0';
		char *name = trim(item);
		if (!number || !is_function_name(name))
			return fail(p, p->line, "%s wants function:%s, separated by commas", key, what);
		long long n;
		if (!parse_integer(p, number_name, trim(number), 1, most, &n))
			return false;
		if (calls_find(out, name) != 0)
			return fail(p, p->line, "%s names %s twice", key, name);
		if (out->count == TOPOLOGY_MAX_CALLS)
			return fail(p, p->line, "%s has more than %d functions", key, TOPOLOGY_MAX_CALLS);
		memcpy(out->list[out->count].function, name, strlen(name) + 1);
		out->list[out->count++].number = (int)n;
		item = next;
	}
	return true;
}

/*
 * Parses names of functions, separated by commas, that the library is built
 * without: none of them calls this.
 */
static bool parse_lacks(struct parser *p, char *value)
{
	struct calls names = {0};

	if (*value == '\0')
		return true;
	for (char *item = value; item;) {
		char *next = strchr(item, ',');
		if (next)
			*next++ = '\0';
		item = trim(item);
		if (!is_function_name(item))
			return fail(p, p->line, "lacks names \"%s\", which is no function", item);
		if (calls_find(&names, item) != 0)
			return fail(p, p->line, "lacks names %s twice", item);
		if (names.count == TOPOLOGY_MAX_CALLS)
			return fail(p, p->line, "lacks has more than %d functions", TOPOLOGY_MAX_CALLS);
		memcpy(names.list[names.count].function, item, strlen(item) + 1);
		names.list[names.count++].number = 1;
		item = next;
	}
	return true;
}

static bool once(struct parser *p, enum key key, const char *name)
{
	if (p->seen & key)
		return fail(p, p->line, "%s is given twice in this section", name);
	p->seen |= key;
	return true;
}

static bool unknown_key(struct parser *p, const char *key)
{
	return fail(p, p->line, "unknown key \"%s\" in [%s]", key, p->name);
}

static bool is_digit(char c)
{
	return c >= '0' && c <= '9';
}

/* Parses a version such as 12.4: two digits at most, a point, a digit. */
static bool parse_version(struct parser *p, const char *key, const char *value, int *major, int *minor)
{
	const char *c = value;
	int n = 0;

	for (; is_digit(*c) && c < value + 2; c++)
		n = 10 * n + (*c - '0');
	if (c == value || c[0] != '.' || !is_digit(c[1]) || c[2] != '\0')
		return fail(p, p->line, "%s = \"%s\" is not a version such as 12.4", key, value);
	*major = n;
	*minor = c[1] - '0';
	return true;
}

/*
 * Parses hexadecimal digits, low to high of them, and moves *s behind them.
 * Another number of digits is a mistake of the caller's text.
 */
static bool parse_hex(const char **s, int low, int high, uint64_t *out)
{
	int n = 0;

	*out = 0;
	for (; n < high; n++, (*s)++) {
		char c = **s;
		if (is_digit(c))
			*out = *out << 4 | (uint64_t)(c - '0');
		else if (c >= 'a' && c <= 'f')
			*out = *out << 4 | (uint64_t)(c - 'a' + 10);
		else if (c >= 'A' && c <= 'F')
			*out = *out << 4 | (uint64_t)(c - 'A' + 10);
		else
			break;
	}
	return n >= low;
}

/* Parses a PCI address such as 0000:3b:00.0. */
static bool parse_pci(struct parser *p, const char *value, struct card *out)
{
	uint64_t domain, bus, device, function;
	const char *c = value;

	bool ok = parse_hex(&c, 4, 8, &domain) && *c++ == ':' && parse_hex(&c, 2, 2, &bus) && *c++ == ':' &&
		  parse_hex(&c, 2, 2, &device) && *c++ == '.' && parse_hex(&c, 1, 1, &function) && *c == '\0';
	if (!ok || device > 31 || function > 7)
		return fail(p, p->line, "pci = \"%s\" is not an address such as 0000:3b:00.0", value);
	out->pci_domain = (uint32_t)domain;
	out->pci_bus = (uint32_t)bus;
	out->pci_device = (uint32_t)device;
	out->pci_function = (uint32_t)function;
	return true;
}

static bool parse_bits(struct parser *p, const char *value, uint64_t *out)
{
	const char *c = value;

	if (*c++ != '0' || *c++ != 'x' || !parse_hex(&c, 1, 16, out) || *c != '\0')
		return fail(p, p->line, "health_bits = \"%s\" is not a mask such as 0x4", value);
	return true;
}

/* Parses CODE or CODE@NUMBER. */
static bool parse_xid(struct parser *p, char *value, int *xid, int *xid_number)
{
	long long code, number = 0;

	char *at = strchr(value, '@');
	if (at)
		*at++ = '\0';
	if (!parse_integer(p, "xid", trim(value), 1, 999, &code))
		return false;
	if (at && !parse_integer(p, "number of the xid", trim(at), 0, 1000000, &number))
		return false;
	*xid = (int)code;
	*xid_number = (int)number;
	return true;
}

static bool parse_bool(struct parser *p, const char *key, const char *value, bool *out)
{
	*out = strcmp(value, "true") == 0;
	if (!*out && strcmp(value, "false") != 0)
		return fail(p, p->line, "%s = \"%s\" is not true or false", key, value);
	return true;
}

static bool driver_key(struct parser *p, const char *key, const char *value)
{
	struct driver *d = &p->topology->drivers[p->current];

	if (strcmp(key, "state") == 0) {
		if (!once(p, KEY_STATE, key))
			return false;
		if (strcmp(value, "loaded") == 0)
			d->state = DRIVER_LOADED;
		else if (strcmp(value, "absent") == 0)
			d->state = DRIVER_ABSENT;
		else if (strcmp(value, "broken") == 0)
			d->state = DRIVER_BROKEN;
		else
			return fail(p, p->line, "state = \"%s\" is not loaded, absent or broken", value);
		return true;
	}
	if (strcmp(key, "version") == 0)
		return once(p, KEY_VERSION, key) && parse_text(p, key, value, d->version);
	if (strcmp(key, "cuda") == 0)
		return once(p, KEY_CUDA, key) && parse_version(p, key, value, &d->cuda_major, &d->cuda_minor);
	if (strcmp(key, "memacct") == 0) {
		if (!once(p, KEY_MEMACCT, key))
			return false;
		if (strcmp(value, "off") == 0)
			d->memacct = MEMACCT_OFF;
		else if (strcmp(value, "misc") == 0)
			d->memacct = MEMACCT_MISC;
		else if (strcmp(value, "dmem") == 0)
			d->memacct = MEMACCT_DMEM;
		else
			return fail(p, p->line, "memacct = \"%s\" is not dmem, misc or off", value);
		return true;
	}
	if (strcmp(key, "persistence") == 0) {
		if (!once(p, KEY_PERSISTENCE, key))
			return false;
		d->persistence = strcmp(value, "on") == 0;
		if (!d->persistence && strcmp(value, "off") != 0)
			return fail(p, p->line, "persistence = \"%s\" is not on or off", value);
		return true;
	}
	if (strcmp(key, "run") == 0)
		return once(p, KEY_RUN, key) && parse_path(p, key, value, d->run);
	return unknown_key(p, key);
}

static bool cgroup_key(struct parser *p, const char *key, const char *value)
{
	struct cgroup_view *v = &p->topology->cgroup;

	if (strcmp(key, "root") == 0)
		return once(p, KEY_ROOT, key) && parse_path(p, key, value, v->root);
	if (strcmp(key, "proc") == 0)
		return once(p, KEY_PROC, key) && parse_path(p, key, value, v->proc);
	if (strcmp(key, "hierarchy") == 0)
		return once(p, KEY_HIERARCHY, key) && parse_text(p, key, value, v->hierarchy);
	return unknown_key(p, key);
}

/*
 * Parses the keys that say how calls behave, of a library or of calls about one
 * card. *known is false for another key.
 */
static bool call_key(struct parser *p, const char *key, char *value, int *delay_ms, struct calls *slow,
		     struct calls *failing, bool *known)
{
	long long n;

	*known = true;
	if (strcmp(key, "delay_ms") == 0) {
		if (!once(p, KEY_DELAY, key) || !parse_integer(p, key, value, 0, MAX_DELAY_MS, &n))
			return false;
		*delay_ms = (int)n;
		return true;
	}
	if (strcmp(key, "slow") == 0)
		return once(p, KEY_SLOW, key) && parse_calls(p, key, "milliseconds", MAX_DELAY_MS, value, slow);
	if (strcmp(key, "fail") == 0)
		return once(p, KEY_FAIL, key) && parse_calls(p, key, "code", 999, value, failing);
	*known = false;
	return true;
}

static bool library_key(struct parser *p, const char *key, char *value)
{
	struct library *l = &p->topology->libraries[p->current];
	bool known;

	if (strcmp(key, "one_lock") == 0)
		return once(p, KEY_LOCK, key) && parse_bool(p, key, value, &l->one_lock);
	if (strcmp(key, "lacks") == 0)
		return once(p, KEY_LACKS, key) && parse_lacks(p, value);
	if (!call_key(p, key, value, &l->delay_ms, &l->slow, &l->failing, &known))
		return false;
	return known || unknown_key(p, key);
}

/* The place of a vendor in topology_vendors, or -1. */
static int vendor_number(const char *vendor)
{
	for (int i = 0; i < TOPOLOGY_VENDORS; i++) {
		if (strcmp(topology_vendors[i], vendor) == 0)
			return i;
	}
	return -1;
}

static bool card_key(struct parser *p, const char *key, char *value)
{
	struct card *c = &p->slots[p->current];
	long long n;

	if (strcmp(key, "vendor") == 0) {
		if (!once(p, KEY_VENDOR, key))
			return false;
		if (vendor_number(value) < 0)
			return fail(p, p->line, "vendor = \"%s\" is not enflame, nvidia or iluvatar", value);
		return parse_text(p, key, value, c->vendor);
	}
	if (strcmp(key, "model") == 0)
		return once(p, KEY_MODEL, key) && parse_text(p, key, value, c->model);
	if (strcmp(key, "uuid") == 0)
		return once(p, KEY_UUID, key) && parse_text(p, key, value, c->uuid);
	if (strcmp(key, "memory_mib") == 0) {
		if (!once(p, KEY_MEMORY, key) || !parse_integer(p, key, value, 0, UINT32_MAX, &n))
			return false;
		c->memory_mib = (uint64_t)n;
		return true;
	}
	if (strcmp(key, "used_mib") == 0) {
		if (!once(p, KEY_USED, key) || !parse_integer(p, key, value, 0, UINT32_MAX, &n))
			return false;
		c->used_mib = (uint64_t)n;
		return true;
	}
	if (strcmp(key, "numa") == 0) {
		if (!once(p, KEY_NUMA, key) || !parse_integer(p, key, value, -1, 1023, &n))
			return false;
		c->numa = (int)n;
		return true;
	}
	if (strcmp(key, "minor") == 0) {
		if (!once(p, KEY_MINOR, key) || !parse_integer(p, key, value, 0, MAX_MINOR, &n))
			return false;
		c->minor = (int)n;
		return true;
	}
	if (strcmp(key, "health") == 0) {
		if (!once(p, KEY_HEALTH, key))
			return false;
		c->healthy = strcmp(value, "healthy") == 0;
		if (!c->healthy && strcmp(value, "unhealthy") != 0)
			return fail(p, p->line, "health = \"%s\" is not healthy or unhealthy", value);
		return true;
	}
	if (strcmp(key, "lost") == 0) {
		return once(p, KEY_LOST, key) && parse_bool(p, key, value, &c->lost);
	}
	if (strcmp(key, "serial") == 0)
		return once(p, KEY_SERIAL, key) && parse_text(p, key, value, c->serial);
	if (strcmp(key, "board") == 0)
		return once(p, KEY_BOARD, key) && parse_text(p, key, value, c->board);
	if (strcmp(key, "chip") == 0) {
		if (!once(p, KEY_CHIP, key) || !parse_integer(p, key, value, 0, MAX_POSITION, &n))
			return false;
		c->chip = (int)n;
		return true;
	}
	if (strcmp(key, "pci") == 0)
		return once(p, KEY_PCI, key) && parse_pci(p, value, c);
	if (strcmp(key, "switch") == 0)
		return once(p, KEY_SWITCH, key) && parse_text(p, key, value, c->pci_switch);
	if (strcmp(key, "compute") == 0)
		return once(p, KEY_COMPUTE, key) && parse_version(p, key, value, &c->compute_major, &c->compute_minor);
	if (strcmp(key, "mig") == 0) {
		if (!once(p, KEY_MIG, key))
			return false;
		if (strcmp(value, "disabled") == 0)
			c->mig = MIG_DISABLED;
		else if (strcmp(value, "enabled") == 0)
			c->mig = MIG_ENABLED;
		else
			return fail(p, p->line, "mig = \"%s\" is not disabled or enabled", value);
		return true;
	}
	if (strcmp(key, "xid") == 0)
		return once(p, KEY_XID, key) && parse_xid(p, value, &c->xid, &c->xid_number);
	if (strcmp(key, "health_bits") == 0)
		return once(p, KEY_BITS, key) && parse_bits(p, value, &c->health_bits);
	bool known;
	if (!call_key(p, key, value, &c->delay_ms, &c->slow, &c->failing, &known))
		return false;
	return known || unknown_key(p, key);
}

/* Parses two minors with a comma between them, or "none". They are files, which are not the library's. */
static bool parse_caps(struct parser *p, char *value)
{
	long long n;

	if (strcmp(value, "none") == 0)
		return true;
	char *second = strchr(value, ',');
	if (!second)
		return fail(p, p->line, "caps = \"%s\" is not two minors such as 66,67, or none", value);
	*second++ = '\0';
	return parse_integer(p, "caps", trim(value), 1, MAX_MINOR, &n) &&
	       parse_integer(p, "caps", trim(second), 1, MAX_MINOR, &n);
}

static bool mig_key(struct parser *p, const char *key, char *value)
{
	struct mig_device *m = &p->migs[p->mig_count - 1].device;
	long long n;

	if (strcmp(key, "profile") == 0)
		return once(p, KEY_PROFILE, key) && parse_text(p, key, value, m->profile);
	if (strcmp(key, "uuid") == 0)
		return once(p, KEY_UUID, key) && parse_text(p, key, value, m->uuid);
	if (strcmp(key, "gi") == 0) {
		if (!once(p, KEY_GI, key) || !parse_integer(p, key, value, 0, TOPOLOGY_GPU_INSTANCES - 1, &n))
			return false;
		m->gi = (int)n;
		m->gi_given = true;
		return true;
	}
	if (strcmp(key, "ci") == 0) {
		if (!once(p, KEY_CI, key) || !parse_integer(p, key, value, 0, TOPOLOGY_COMPUTE_INSTANCES - 1, &n))
			return false;
		m->ci = (int)n;
		m->ci_given = true;
		return true;
	}
	if (strcmp(key, "memory_mib") == 0) {
		if (!once(p, KEY_MEMORY, key) || !parse_integer(p, key, value, 0, UINT32_MAX, &n))
			return false;
		m->memory_mib = (uint64_t)n;
		m->memory_given = true;
		return true;
	}
	if (strcmp(key, "caps") == 0)
		return once(p, KEY_CAPS, key) && parse_caps(p, value);
	if (strcmp(key, "xid") == 0)
		return once(p, KEY_XID, key) && parse_xid(p, value, &m->xid, &m->xid_number);
	return unknown_key(p, key);
}

static bool link_key(struct parser *p, const char *key, const char *value)
{
	struct link *l = &p->links[p->link_count - 1];
	long long n;

	if (strcmp(key, "lanes") == 0) {
		if (!once(p, KEY_LANES, key) || !parse_integer(p, key, value, 1, TOPOLOGY_MAX_LANES, &n))
			return false;
		l->lanes = (int)n;
		return true;
	}
	if (strcmp(key, "one_way") == 0)
		return once(p, KEY_ONE_WAY, key) && parse_bool(p, key, value, &l->one_way);
	return unknown_key(p, key);
}

/* Parses "compute", "graphics" and "mps", separated by commas. */
static bool parse_lists(struct parser *p, char *value, unsigned *out)
{
	static const char *const names[] = {"compute", "graphics", "mps"};

	*out = 0;
	for (char *item = value; item;) {
		char *next = strchr(item, ',');
		if (next)
			*next++ = '\0';
		item = trim(item);
		size_t i = 0;
		while (i < sizeof names / sizeof *names && strcmp(names[i], item) != 0)
			i++;
		if (i == sizeof names / sizeof *names)
			return fail(p, p->line, "lists names \"%s\", which is not compute, graphics or mps", item);
		if (*out & 1U << i)
			return fail(p, p->line, "lists names %s twice", item);
		*out |= 1U << i;
		item = next;
	}
	return true;
}

static bool process_key(struct parser *p, const char *key, char *value)
{
	struct process *one = &p->processes[p->process_count - 1];
	long long n;

	if (strcmp(key, "card") == 0) {
		if (!once(p, KEY_CARD, key) || !parse_integer(p, key, value, 0, TOPOLOGY_MAX_CARDS - 1, &n))
			return false;
		one->card = (int)n;
		return true;
	}
	if (strcmp(key, "pid") == 0) {
		if (!once(p, KEY_PID, key) || !parse_integer(p, key, value, 1, MAX_PID, &n))
			return false;
		one->pid = (int)n;
		return true;
	}
	if (strcmp(key, "mib") == 0) {
		if (!once(p, KEY_MIB, key))
			return false;
		one->memory_unknown = strcmp(value, "n/a") == 0;
		if (one->memory_unknown)
			return true;
		if (!parse_integer(p, key, value, 0, UINT32_MAX, &n))
			return false;
		one->memory_mib = (uint64_t)n;
		return true;
	}
	if (strcmp(key, "mig") == 0) {
		if (!once(p, KEY_ON_MIG, key) || !parse_integer(p, key, value, 0, TOPOLOGY_MAX_MIG - 1, &n))
			return false;
		one->mig = (int)n;
		return true;
	}
	if (strcmp(key, "utilization") == 0) {
		if (!once(p, KEY_UTILIZATION, key) || !parse_integer(p, key, value, 0, 100, &n))
			return false;
		one->utilization = (int)n;
		one->nvidia_only |= n > 0;
		return true;
	}
	if (strcmp(key, "lists") == 0) {
		one->nvidia_only = true;
		return once(p, KEY_LISTS, key) && parse_lists(p, value, &one->lists);
	}
	return unknown_key(p, key);
}

/* Checks a section [process] that has ended. */
static bool end_process(struct parser *p)
{
	const char *missing = NULL;

	if (!(p->seen & KEY_CARD))
		missing = "card";
	else if (!(p->seen & KEY_PID))
		missing = "pid";
	else if (!(p->seen & KEY_MIB))
		missing = "mib";
	if (missing)
		return fail(p, p->processes[p->process_count - 1].line, "[%s] has no %s", p->name, missing);
	return true;
}

/* Checks a section that has ended. */
static bool end_section(struct parser *p)
{
	if (p->section == LINK && !(p->seen & KEY_LANES))
		return fail(p, p->links[p->link_count - 1].line, "[%s] has no lanes", p->name);
	if (p->section == MIG && !(p->seen & KEY_PROFILE))
		return fail(p, p->migs[p->mig_count - 1].device.line, "[%s] has no profile", p->name);
	if (p->section == CGROUP && !(p->seen & KEY_ROOT))
		return fail(p, p->current, "[%s] has no root", p->name);
	if (p->section == PROCESS)
		return end_process(p);
	if (p->section != CARD)
		return true;

	const struct card *c = &p->slots[p->current];
	const char *missing = NULL;
	if (!(p->seen & KEY_VENDOR))
		missing = "vendor";
	else if (!(p->seen & KEY_UUID))
		missing = "uuid";
	else if (!(p->seen & KEY_MEMORY))
		missing = "memory_mib";
	if (missing)
		return fail(p, c->line, "[card %d] has no %s", c->index, missing);
	if (c->used_mib > c->memory_mib)
		return fail(p, c->line, "[card %d] has used_mib above memory_mib", c->index);
	return true;
}

/*
 * Whether name begins with word, alone or followed by white space and more,
 * which *rest then is.
 */
static bool begins_with(char *name, const char *word, char **rest)
{
	size_t n = strlen(word);

	if (strncmp(name, word, n) != 0 || (name[n] != '\0' && !is_space(name[n])))
		return false;
	*rest = trim(name + n);
	return true;
}

/* Begins [driver], [library] or one of them for a vendor. */
static bool begin_settings(struct parser *p, enum section section, const char *word, const char *vendor, bool *seen)
{
	int number = *vendor ? vendor_number(vendor) : -1;

	if (*vendor && number < 0)
		return fail(p, p->line, "unknown section [%s %s]", word, vendor);
	snprintf(p->name, sizeof p->name, "%s%s%s", word, *vendor ? " " : "", vendor);
	p->current = number + 1;
	if (seen[p->current])
		return fail(p, p->line, "section [%s] is given twice", p->name);
	seen[p->current] = true;
	p->section = section;
	return true;
}

static bool begin_cgroup(struct parser *p)
{
	if (p->topology->has_cgroup)
		return fail(p, p->line, "section [cgroup] is given twice");
	p->topology->has_cgroup = true;
	snprintf(p->name, sizeof p->name, "cgroup");
	p->current = p->line;
	p->section = CGROUP;
	return true;
}

static bool begin_card(struct parser *p, char *number)
{
	long long index;

	if (!parse_integer(p, "card", number, 0, TOPOLOGY_MAX_CARDS - 1, &index))
		return false;
	struct card *c = &p->slots[index];
	if (c->line != 0)
		return fail(p, p->line, "card %lld is described twice, first in line %d", index, c->line);
	*c = (struct card){
		.index = (int)index,
		.line = p->line,
		.minor = (int)index,
		.numa = -1,
		.healthy = true,
		.pci_domain = (uint32_t)index / 0x80, /* a bus of its own for each card */
		.pci_bus = 0x10 + (uint32_t)index % 0x80,
		.compute_major = 8,
	};
	snprintf(p->name, sizeof p->name, "card %lld", index);
	p->current = (int)index;
	p->section = CARD;
	return true;
}

static bool begin_mig(struct parser *p, char *numbers)
{
	long long card, index;

	char *second = strchr(numbers, '.');
	if (!second)
		return fail(p, p->line, "mig = \"%s\" is not a card and a number such as 0.1", numbers);
	*second++ = '\0';
	if (!parse_integer(p, "mig", trim(numbers), 0, TOPOLOGY_MAX_CARDS - 1, &card) ||
	    !parse_integer(p, "number of the mig", trim(second), 0, TOPOLOGY_MAX_MIG - 1, &index))
		return false;
	for (int i = 0; i < p->mig_count; i++) {
		const struct mig_section *m = &p->migs[i];
		if (m->card == card && m->index == index)
			return fail(p, p->line, "mig %lld.%lld is described twice, first in line %d", card, index,
				    m->device.line);
	}
	p->migs[p->mig_count++] = (struct mig_section){
		.card = (int)card,
		.index = (int)index,
		.device.line = p->line,
	};
	snprintf(p->name, sizeof p->name, "mig %lld.%lld", card, index);
	p->section = MIG;
	return true;
}

static bool begin_link(struct parser *p, char *numbers)
{
	long long a, b;

	char *second = numbers;
	while (*second && !is_space(*second))
		second++;
	if (*second)
		*second++ = '\0';
	if (!parse_integer(p, "link", numbers, 0, TOPOLOGY_MAX_CARDS - 1, &a) ||
	    !parse_integer(p, "link", trim(second), 0, TOPOLOGY_MAX_CARDS - 1, &b))
		return false;
	if (a == b)
		return fail(p, p->line, "link %lld %lld joins a card with itself", a, b);
	for (int i = 0; i < p->link_count; i++) {
		const struct link *l = &p->links[i];
		if ((l->a == a && l->b == b) || (l->a == b && l->b == a))
			return fail(p, p->line, "link %lld %lld is described twice, first in line %d", a, b, l->line);
	}
	if (p->link_count == TOPOLOGY_MAX_LINKS)
		return fail(p, p->line, "there are more than %d links", TOPOLOGY_MAX_LINKS);
	p->links[p->link_count++] = (struct link){.a = (int)a, .b = (int)b, .line = p->line};
	snprintf(p->name, sizeof p->name, "link %lld %lld", a, b);
	p->section = LINK;
	return true;
}

static bool begin_process(struct parser *p, const char *number)
{
	long long n;

	if (!parse_integer(p, "process", number, 0, TOPOLOGY_MAX_PROCESSES - 1, &n))
		return false;
	for (int i = 0; i < p->process_count; i++) {
		if (p->processes[i].number == n)
			return fail(p, p->line, "process %lld is described twice, first in line %d", n, p->processes[i].line);
	}
	p->processes[p->process_count++] = (struct process){
		.number = (int)n,
		.line = p->line,
		.mig = TOPOLOGY_NO_MIG,
		.lists = LIST_COMPUTE,
	};
	snprintf(p->name, sizeof p->name, "process %lld", n);
	p->section = PROCESS;
	return true;
}

static bool begin_section(struct parser *p, char *name)
{
	size_t n = strlen(name);
	char *rest;

	if (!end_section(p))
		return false;
	if (name[n - 1] != ']')
		return fail(p, p->line, "a section has no closing ]");
	name[n - 1] = '\0';
	name = trim(name + 1);
	p->seen = 0;
	if (begins_with(name, "driver", &rest))
		return begin_settings(p, DRIVER, "driver", rest, p->topology->has_driver);
	if (begins_with(name, "library", &rest))
		return begin_settings(p, LIBRARY, "library", rest, p->topology->has_library);
	if (begins_with(name, "cgroup", &rest) && !*rest)
		return begin_cgroup(p);
	if (begins_with(name, "card", &rest) && *rest)
		return begin_card(p, rest);
	if (begins_with(name, "mig", &rest) && *rest)
		return begin_mig(p, rest);
	if (begins_with(name, "link", &rest) && *rest)
		return begin_link(p, rest);
	if (begins_with(name, "process", &rest) && *rest)
		return begin_process(p, rest);
	return fail(p, p->line, "unknown section [%s]", name);
}

static bool parse_line(struct parser *p, char *line)
{
	cut_comment(line);
	line = trim(line);
	if (*line == '\0')
		return true;
	if (*line == '[')
		return begin_section(p, line);

	char *value = strchr(line, '=');
	if (!value)
		return fail(p, p->line, "neither a section nor key = value: \"%s\"", line);
	*value++ = '\0';
	char *key = trim(line);
	value = trim(value);
	switch (p->section) {
	case DRIVER:
		return driver_key(p, key, value);
	case LIBRARY:
		return library_key(p, key, value);
	case CGROUP:
		return cgroup_key(p, key, value);
	case CARD:
		return card_key(p, key, value);
	case MIG:
		return mig_key(p, key, value);
	case LINK:
		return link_key(p, key, value);
	case PROCESS:
		return process_key(p, key, value);
	case NO_SECTION:
		break;
	}
	return fail(p, p->line, "key \"%s\" stands before the first section", key);
}

/* Moves the cards from the slots into the topology. */
static bool gather_cards(struct parser *p)
{
	int count = 0, last = TOPOLOGY_NO_CARD;

	for (int i = 0; i < TOPOLOGY_MAX_CARDS; i++) {
		if (p->slots[i].line == 0)
			continue;
		count++;
		last = i;
	}
	for (int i = 0; i < last; i++) {
		if (p->slots[i].line == 0)
			return fail(p, p->slots[last].line, "there is a card %d but no card %d", last, i);
	}
	p->topology->count = count;
	if (count == 0)
		return true;
	p->topology->cards = malloc((size_t)count * sizeof *p->slots);
	if (!p->topology->cards)
		return fail(p, p->line, "out of memory");
	memcpy(p->topology->cards, p->slots, (size_t)count * sizeof *p->slots);
	return true;
}

/* Moves the MIG devices into their cards, which are in the topology. */
static bool gather_migs(struct parser *p)
{
	struct topology *t = p->topology;

	for (int i = 0; i < p->mig_count; i++) {
		struct mig_section *s = &p->migs[i];
		struct mig_device *m = &s->device;
		if (s->card >= t->count)
			return fail(p, m->line, "[mig %d.%d] names a card that is not there", s->card, s->index);
		struct card *card = &t->cards[s->card];
		if (strcmp(card->vendor, "nvidia") != 0)
			return fail(p, m->line, "[mig %d.%d] is of a card that is not NVIDIA's", s->card, s->index);
		if (!mig_profile_named(card, m->profile, &m->of, &m->slices))
			return fail(p, m->line, "[mig %d.%d] has profile \"%s\", which its card does not have", s->card,
				    s->index, m->profile);
		card->mig_devices[s->index] = *m;
	}
	for (int i = 0; i < t->count; i++)
		mig_derive(&t->cards[i]);
	return true;
}

/* Moves the links into the topology; the cards are there. */
static bool gather_links(struct parser *p)
{
	struct topology *t = p->topology;

	for (int i = 0; i < p->link_count; i++) {
		const struct link *l = &p->links[i];
		if (l->a >= t->count || l->b >= t->count)
			return fail(p, l->line, "[link %d %d] names a card that is not there", l->a, l->b);
		if (strcmp(t->cards[l->a].vendor, t->cards[l->b].vendor) != 0)
			return fail(p, l->line, "[link %d %d] joins cards of two vendors", l->a, l->b);
	}
	if (p->link_count == 0)
		return true;
	t->links = malloc((size_t)p->link_count * sizeof *p->links);
	if (!t->links)
		return fail(p, p->line, "out of memory");
	memcpy(t->links, p->links, (size_t)p->link_count * sizeof *p->links);
	t->link_count = p->link_count;
	return true;
}

/* Moves the processes into the topology; the cards are there. */
static bool gather_processes(struct parser *p)
{
	struct topology *t = p->topology;

	for (int i = 0; i < p->process_count; i++) {
		const struct process *one = &p->processes[i];
		uint64_t used = 0;
		if (one->card >= t->count)
			return fail(p, one->line, "[process %d] names a card that is not there", one->number);
		for (int j = 0; j <= i; j++) {
			if (p->processes[j].card == one->card)
				used += p->processes[j].memory_mib;
		}
		const struct card *card = &t->cards[one->card];
		if (one->nvidia_only && strcmp(card->vendor, "nvidia") != 0)
			return fail(p, one->line, "[process %d] has what only NVIDIA's library reports", one->number);
		if (one->mig != TOPOLOGY_NO_MIG && !card->mig_devices[one->mig].line)
			return fail(p, one->line, "[process %d] is on a MIG device that its card does not have", one->number);
		if (card->used_mib + used > card->memory_mib)
			return fail(p, one->line, "[process %d] needs more memory than its card has left", one->number);
	}
	if (p->process_count == 0)
		return true;
	t->processes = malloc((size_t)p->process_count * sizeof *p->processes);
	if (!t->processes)
		return fail(p, p->line, "out of memory");
	memcpy(t->processes, p->processes, (size_t)p->process_count * sizeof *p->processes);
	t->process_count = p->process_count;
	return true;
}

static bool parse(struct parser *p, char *text)
{
	for (char *line = text; line;) {
		char *next = strchr(line, '\n');
		if (next)
			*next++ = '\0';
		p->line++;
		if (!parse_line(p, line))
			return false;
		line = next;
	}
	return end_section(p) && gather_cards(p) && gather_migs(p) && gather_links(p) && gather_processes(p);
}

bool topology_parse(const char *text, size_t size, struct topology *out, char *error, size_t error_size)
{
	struct topology t = {0};
	struct parser p = {.topology = &t, .error = error, .error_size = error_size};
	bool ok = false;

	for (int i = 0; i <= TOPOLOGY_VENDORS; i++)
		t.drivers[i] = (struct driver){.version = "1.0.0", .cuda_major = 12, .cuda_minor = 4};

	char *copy = malloc(size + 1);
	p.slots = calloc(TOPOLOGY_MAX_CARDS, sizeof *p.slots);
	p.migs = calloc(MAX_MIG_DEVICES, sizeof *p.migs);
	p.links = calloc(TOPOLOGY_MAX_LINKS, sizeof *p.links);
	p.processes = calloc(TOPOLOGY_MAX_PROCESSES, sizeof *p.processes);
	if (!copy || !p.slots || !p.migs || !p.links || !p.processes) {
		fail(&p, 1, "out of memory");
	} else if (memchr(text, '\0', size)) {
		fail(&p, 1, "the file is not text, it contains a NUL byte");
	} else {
		memcpy(copy, text, size);
		copy[size] = '\0';
		ok = parse(&p, copy);
	}
	free(copy);
	free(p.slots);
	free(p.migs);
	free(p.links);
	free(p.processes);
	if (ok)
		*out = t;
	else
		topology_free(&t);
	return ok;
}

void topology_free(struct topology *t)
{
	free(t->cards);
	free(t->links);
	free(t->processes);
	*t = (struct topology){0};
}

const struct driver *topology_driver(const struct topology *t, const char *vendor)
{
	int i = vendor_number(vendor) + 1;

	return &t->drivers[t->has_driver[i] ? i : 0];
}

const struct library *topology_library(const struct topology *t, const char *vendor)
{
	int i = vendor_number(vendor) + 1;

	return &t->libraries[t->has_library[i] ? i : 0];
}

enum nearness topology_nearness(const struct card *a, const struct card *b)
{
	if (a->board[0] && strcmp(a->board, b->board) == 0)
		return NEAR_BOARD;
	if (a->pci_switch[0] && strcmp(a->pci_switch, b->pci_switch) == 0)
		return NEAR_SWITCH;
	return a->numa >= 0 && a->numa == b->numa ? NEAR_HOST_BRIDGE : NEAR_SYSTEM;
}

int calls_find(const struct calls *c, const char *function)
{
	for (int i = 0; i < c->count; i++) {
		if (strcmp(c->list[i].function, function) == 0)
			return c->list[i].number;
	}
	return 0;
}
