/* Parser of the topology file. It stops at the first mistake. */
#include "topology.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum section { NO_SECTION, DRIVER, LIBRARY, CARD };

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
};

struct parser {
	struct topology *topology;
	int line;
	enum section section;
	unsigned seen;	    /* keys of the section so far */
	bool driver_seen;   /* [driver] was there */
	bool library_seen;  /* [library] was there */
	struct card *slots; /* TOPOLOGY_MAX_CARDS of them by index; line 0 is an empty slot */
	int current;	    /* index of the card of this section */
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

/* Parses "function:code[,function:code...]"; nothing at all is an empty list. */
static bool parse_failures(struct parser *p, char *value, struct failures *out)
{
	out->count = 0;
	if (*value == '\0')
		return true;
	for (char *item = value; item;) {
		char *next = strchr(item, ',');
		if (next)
			*next++ = '\0';
		item = trim(item);
		char *code = strchr(item, ':');
		if (code)
			*code++ = '\0';
		char *name = trim(item);
		if (!code || !is_function_name(name))
			return fail(p, p->line, "fail wants function:code, separated by commas");
		long long n;
		if (!parse_integer(p, "fail code", trim(code), 1, 999, &n))
			return false;
		if (failures_find(out, name) != 0)
			return fail(p, p->line, "fail names %s twice", name);
		if (out->count == TOPOLOGY_MAX_FAILURES)
			return fail(p, p->line, "fail has more than %d functions", TOPOLOGY_MAX_FAILURES);
		struct failure *f = &out->list[out->count++];
		memcpy(f->function, name, strlen(name) + 1);
		f->code = (int)n;
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

static bool driver_key(struct parser *p, const char *key, const char *value)
{
	if (strcmp(key, "state") == 0) {
		if (!once(p, KEY_STATE, key))
			return false;
		if (strcmp(value, "loaded") == 0)
			p->topology->driver = DRIVER_LOADED;
		else if (strcmp(value, "absent") == 0)
			p->topology->driver = DRIVER_ABSENT;
		else if (strcmp(value, "broken") == 0)
			p->topology->driver = DRIVER_BROKEN;
		else
			return fail(p, p->line, "state = \"%s\" is not loaded, absent or broken", value);
		return true;
	}
	if (strcmp(key, "version") == 0)
		return once(p, KEY_VERSION, key) && parse_text(p, key, value, p->topology->driver_version);
	return fail(p, p->line, "unknown key \"%s\" in [driver]", key);
}

static bool library_key(struct parser *p, const char *key, char *value)
{
	if (strcmp(key, "delay_ms") == 0) {
		long long n;
		if (!once(p, KEY_DELAY, key) || !parse_integer(p, key, value, 0, 3600 * 1000, &n))
			return false;
		p->topology->delay_ms = (int)n;
		return true;
	}
	if (strcmp(key, "fail") == 0)
		return once(p, KEY_FAIL, key) && parse_failures(p, value, &p->topology->failures);
	return fail(p, p->line, "unknown key \"%s\" in [library]", key);
}

static bool card_key(struct parser *p, const char *key, char *value)
{
	struct card *c = &p->slots[p->current];
	long long n;

	if (strcmp(key, "vendor") == 0) {
		if (strcmp(value, "enflame") != 0 && strcmp(value, "nvidia") != 0 && strcmp(value, "iluvatar") != 0)
			return fail(p, p->line, "vendor = \"%s\" is not enflame, nvidia or iluvatar", value);
		return once(p, KEY_VENDOR, key) && parse_text(p, key, value, c->vendor);
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
		if (!once(p, KEY_MINOR, key) || !parse_integer(p, key, value, 0, 1048575, &n))
			return false;
		c->minor = (int)n;
		return true;
	}
	if (strcmp(key, "health") == 0) {
		c->healthy = strcmp(value, "healthy") == 0;
		if (!c->healthy && strcmp(value, "unhealthy") != 0)
			return fail(p, p->line, "health = \"%s\" is not healthy or unhealthy", value);
		return once(p, KEY_HEALTH, key);
	}
	if (strcmp(key, "lost") == 0) {
		c->lost = strcmp(value, "true") == 0;
		if (!c->lost && strcmp(value, "false") != 0)
			return fail(p, p->line, "lost = \"%s\" is not true or false", value);
		return once(p, KEY_LOST, key);
	}
	if (strcmp(key, "fail") == 0)
		return once(p, KEY_FAIL, key) && parse_failures(p, value, &c->failures);
	return fail(p, p->line, "unknown key \"%s\" in [card %d]", key, p->current);
}

/* Checks a section that has ended. */
static bool end_section(struct parser *p)
{
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

static bool begin_section(struct parser *p, char *name)
{
	size_t n = strlen(name);

	if (!end_section(p))
		return false;
	if (name[n - 1] != ']')
		return fail(p, p->line, "a section has no closing ]");
	name[n - 1] = '\0';
	name = trim(name + 1);
	p->seen = 0;
	if (strcmp(name, "driver") == 0) {
		if (p->driver_seen)
			return fail(p, p->line, "section [driver] is given twice");
		p->driver_seen = true;
		p->section = DRIVER;
		return true;
	}
	if (strcmp(name, "library") == 0) {
		if (p->library_seen)
			return fail(p, p->line, "section [library] is given twice");
		p->library_seen = true;
		p->section = LIBRARY;
		return true;
	}
	if (strncmp(name, "card", 4) == 0 && is_space(name[4])) {
		long long index;
		if (!parse_integer(p, "card", trim(name + 4), 0, TOPOLOGY_MAX_CARDS - 1, &index))
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
		};
		p->current = (int)index;
		p->section = CARD;
		return true;
	}
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
	case CARD:
		return card_key(p, key, value);
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
	return end_section(p) && gather_cards(p);
}

bool topology_parse(const char *text, size_t size, struct topology *out, char *error, size_t error_size)
{
	struct topology t = {.driver = DRIVER_LOADED, .driver_version = "1.0.0"};
	struct parser p = {.topology = &t, .error = error, .error_size = error_size};
	bool ok = false;

	char *copy = malloc(size + 1);
	p.slots = calloc(TOPOLOGY_MAX_CARDS, sizeof *p.slots);
	if (!copy || !p.slots) {
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
	if (ok)
		*out = t;
	else
		topology_free(&t);
	return ok;
}

void topology_free(struct topology *t)
{
	free(t->cards);
	*t = (struct topology){0};
}

int failures_find(const struct failures *f, const char *function)
{
	for (int i = 0; i < f->count; i++) {
		if (strcmp(f->list[i].function, function) == 0)
			return f->list[i].code;
	}
	return 0;
}
