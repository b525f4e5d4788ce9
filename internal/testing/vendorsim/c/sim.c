#include "sim.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
	STEP_NS = 10 * SIM_NS_PER_MS,	/* how often a waiting call looks at the file */
	MAX_FILE_BYTES = 1024 * 1024,	/* far above what TOPOLOGY_MAX_CARDS cards need */
};

int64_t sim_now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Sleeps for a step, or for ns nanoseconds if they are less. */
static void sleep_step(int64_t ns)
{
	struct timespec t = {.tv_nsec = ns < STEP_NS ? (long)ns : STEP_NS};

	while (nanosleep(&t, &t) != 0 && errno == EINTR)
		;
}

/* Finds the topology file: it is beside this library, and a process cannot choose another. */
static void locate(struct sim *s)
{
	static const char here; /* an address inside this very library */
	char real[PATH_MAX] = "topology.ini";
	Dl_info info;
	if (dladdr(&here, &info) && info.dli_fname && !realpath(info.dli_fname, real))
		snprintf(real, sizeof real, "%s", info.dli_fname);
	char *slash = strrchr(real, '/');
	int folder = slash ? (int)(slash - real) + 1 : 0;
	if (folder + (int)sizeof "topology.ini" > (int)sizeof s->path)
		folder = 0; /* too long to be opened anyway */
	snprintf(s->path, sizeof s->path, "%.*stopology.ini", folder, real);
}

bool sim_path(const struct sim *s, const char *named, char *out, size_t size)
{
	char real[PATH_MAX];

	if (*named == '/')
		return snprintf(out, size, "%s", named) < (int)size;
	if (!realpath(s->path, real))
		snprintf(real, sizeof real, "%s", s->path);
	const char *slash = strrchr(real, '/');
	return snprintf(out, size, "%.*s%s", slash ? (int)(slash - real) + 1 : 0, real, named) < (int)size;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
	       a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static bool set_mistake(struct sim *s, const char *text)
{
	s->broken = true;
	snprintf(s->mistake, sizeof s->mistake, "%.300s:%.200s", s->path, text);
	fprintf(stderr, "%s\n", s->mistake);
	return false;
}

/* Reads the file into *out. Returns false after set_mistake. */
static bool read_file(struct sim *s, struct topology *out)
{
	char text[256];

	int fd = open(s->path, O_RDONLY | O_CLOEXEC);
	if (fd < 0) {
		snprintf(text, sizeof text, " %s", strerror(errno));
		return set_mistake(s, text);
	}
	char *data = malloc(MAX_FILE_BYTES + 1);
	size_t size = 0;
	ssize_t n = -1;
	if (data && fstat(fd, &s->file) == 0) {
		while (size <= MAX_FILE_BYTES && (n = read(fd, data + size, MAX_FILE_BYTES + 1 - size)) != 0) {
			if (n > 0)
				size += (size_t)n;
			else if (errno != EINTR)
				break;
		}
	}
	int error = errno;
	close(fd);

	bool ok = false;
	if (!data || n < 0) {
		snprintf(text, sizeof text, " %s", strerror(data ? error : ENOMEM));
		set_mistake(s, text);
	} else if (size > MAX_FILE_BYTES) {
		snprintf(text, sizeof text, " the file is larger than %d bytes", MAX_FILE_BYTES);
		set_mistake(s, text);
	} else {
		ok = topology_parse(data, size, out, text, sizeof text);
		if (!ok)
			set_mistake(s, text);
	}
	free(data);
	return ok;
}

/* Puts an event into the queue, and numbers it. */
static void push(struct sim *s, struct sim_event e)
{
	if (s->pending == SIM_EVENTS) {
		s->first = (s->first + 1) % SIM_EVENTS;
		s->pending--;
	}
	e.number = ++s->happened;
	s->events[(s->first + s->pending++) % SIM_EVENTS] = e;
}

static void push_event(struct sim *s, int card, enum sim_change change, uint64_t value)
{
	push(s, (struct sim_event){
		.card = card,
		.change = change,
		.value = value,
		.gpu_instance = SIM_NO_INSTANCE,
		.compute_instance = SIM_NO_INSTANCE,
	});
}

/* The MIG device at the same instance as m, or NULL. */
static const struct mig_device *same_instance(const struct card *card, const struct mig_device *m)
{
	for (int i = 0; i < TOPOLOGY_MAX_MIG; i++) {
		const struct mig_device *other = &card->mig_devices[i];
		if (other->line && other->gi == m->gi && other->ci == m->ci)
			return other;
	}
	return NULL;
}

/* Puts the new errors of a card's MIG devices into the queue. */
static void compare_migs(struct sim *s, int number, const struct card *old, const struct card *new)
{
	if (new->mig != MIG_ENABLED)
		return;
	for (int i = 0; i < TOPOLOGY_MAX_MIG; i++) {
		const struct mig_device *m = &new->mig_devices[i];
		const struct mig_device *was = m->line && m->xid ? same_instance(old, m) : NULL;
		if (!was || (was->xid == m->xid && was->xid_number == m->xid_number))
			continue;
		push(s, (struct sim_event){
			.card = number,
			.change = SIM_CARD_XID,
			.value = (uint64_t)m->xid,
			.gpu_instance = (uint32_t)m->gi,
			.compute_instance = (uint32_t)m->ci,
		});
	}
}

/* Lists the cards of the vendor in *cards; returns how many, or -1. */
static int select_cards(const struct sim *s, struct topology *t, struct card ***cards)
{
	struct card **list = malloc(sizeof *list * ((size_t)t->count + 1));
	int n = 0;

	if (!list)
		return -1;
	for (int i = 0; i < t->count; i++) {
		if (strcmp(t->cards[i].vendor, s->vendor) == 0)
			list[n++] = &t->cards[i];
	}
	*cards = list;
	return n;
}

/* Puts what differs between the old cards and the new ones into the queue. */
static void compare_cards(struct sim *s, struct card **cards, int count)
{
	for (int i = 0; i < count || i < s->count; i++) {
		const struct card *old = i < s->count ? s->cards[i] : NULL;
		const struct card *new = i < count ? cards[i] : NULL;
		bool was = old && !old->lost;
		bool is = new && !new->lost;
		if (was != is)
			push_event(s, i, is ? SIM_CARD_BACK : SIM_CARD_LOST, 0);
		else if (is && old->healthy != new->healthy)
			push_event(s, i, new->healthy ? SIM_CARD_HEALTHY : SIM_CARD_UNHEALTHY, 0);
		if (!old || !new)
			continue;
		if (new->xid != 0 && (old->xid != new->xid || old->xid_number != new->xid_number))
			push_event(s, i, SIM_CARD_XID, (uint64_t)new->xid);
		compare_migs(s, i, old, new);
		if (old->health_bits != new->health_bits)
			push_event(s, i, SIM_CARD_BITS, new->health_bits);
	}
}

/* Reads the file again if it is another one than last time. The lock is held. */
static void refresh(struct sim *s)
{
	struct stat now;

	if (!s->path[0])
		locate(s);
	if (stat(s->path, &now) != 0)
		now = (struct stat){0}; /* no file: the same as itself until one is there */
	if (s->read && same_file(&now, &s->file))
		return;
	s->read = true;
	s->file = now;

	struct topology t;
	if (!read_file(s, &t))
		return;
	struct card **cards;
	int count = select_cards(s, &t, &cards);
	if (count < 0) {
		topology_free(&t);
		set_mistake(s, " out of memory");
		return;
	}
	if (s->valid)
		compare_cards(s, cards, count);
	free(s->cards);
	topology_free(&s->topology);
	s->topology = t; /* cards point into t.cards, which stays where it is */
	s->cards = cards;
	s->count = count;
	s->driver = topology_driver(&s->topology, s->vendor);
	s->library = topology_library(&s->topology, s->vendor);
	s->valid = true;
	s->broken = false;
}

static int larger(int a, int b)
{
	return a > b ? a : b;
}

/* How many milliseconds a call takes by the topology as it is now. The lock is held. */
static int delay_of(const struct sim *s, const char *function, int card)
{
	if (s->broken)
		return 0;
	int ms = larger(s->library->delay_ms, calls_find(&s->library->slow, function));
	if (card >= 0 && card < s->count) {
		const struct card *c = s->cards[card];
		ms = larger(ms, larger(c->delay_ms, calls_find(&c->slow, function)));
	}
	return ms;
}

struct sim_entry sim_enter(struct sim *s, const char *function, int card)
{
	int64_t start = sim_now_ns();
	bool holds = false;

	pthread_mutex_lock(&s->lock);
	for (;;) {
		refresh(s);
		int64_t left = start + (int64_t)delay_of(s, function, card) * SIM_NS_PER_MS - sim_now_ns();
		bool held_up = !s->broken && s->library->one_lock && s->held && !holds;
		if (left <= 0 && !held_up)
			break;
		if (!s->held)
			s->held = holds = true;
		pthread_mutex_unlock(&s->lock);
		sleep_step(left > 0 ? left : STEP_NS);
		pthread_mutex_lock(&s->lock);
	}
	if (holds)
		s->held = false;

	struct sim_entry e = {.broken = s->broken};
	if (!e.broken) {
		e.failure = calls_find(&s->library->failing, function);
		if (e.failure == 0 && card >= 0 && card < s->count)
			e.failure = calls_find(&s->cards[card]->failing, function);
	}
	return e;
}

void sim_leave(struct sim *s)
{
	pthread_mutex_unlock(&s->lock);
}

bool sim_uses(const struct process *p, const struct card *card)
{
	if (p->card != card->index)
		return false;
	return p->mig == TOPOLOGY_NO_MIG || (card->mig == MIG_ENABLED && card->mig_devices[p->mig].line);
}

uint64_t sim_used_mib(const struct sim *s, const struct card *card)
{
	uint64_t used = card->used_mib;

	for (int i = 0; i < s->topology.process_count; i++) {
		const struct process *p = &s->topology.processes[i];
		if (sim_uses(p, card))
			used += p->memory_mib;
	}
	return used;
}

bool sim_next_event(struct sim *s, int card, struct sim_event *out)
{
	for (int i = 0; i < s->pending; i++) {
		struct sim_event e = s->events[(s->first + i) % SIM_EVENTS];
		if (card != TOPOLOGY_NO_CARD && e.card != card)
			continue;
		for (; i > 0; i--) /* close the gap by moving the older ones up */
			s->events[(s->first + i) % SIM_EVENTS] = s->events[(s->first + i - 1) % SIM_EVENTS];
		s->first = (s->first + 1) % SIM_EVENTS;
		s->pending--;
		*out = e;
		return true;
	}
	return false;
}

bool sim_event_after(const struct sim *s, uint64_t after, struct sim_event *out)
{
	for (int i = 0; i < s->pending; i++) {
		const struct sim_event *e = &s->events[(s->first + i) % SIM_EVENTS];
		if (e->number > after) {
			*out = *e;
			return true;
		}
	}
	return false;
}

bool sim_wait_step(struct sim *s, int64_t ns)
{
	pthread_mutex_unlock(&s->lock);
	sleep_step(ns);
	pthread_mutex_lock(&s->lock);
	refresh(s);
	return !s->broken;
}
