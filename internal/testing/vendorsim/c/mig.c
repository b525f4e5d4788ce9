#include "mig.h"

#include <stdio.h>
#include <string.h>

/* A row of a table of profiles. Pairs are those of the older and the newer GPUs of the table. */
struct row {
	struct mig_profile profile;
	int multiprocessors[2], decoders[2], jpegs[2];
};

/* A table is of the GPUs that are divided alike. */
struct table {
	const char *models[2]; /* a part of the model's name; NULL for all others */
	int newer;	       /* the newer GPUs have at least this major compute capability */
	const struct row *rows;
	int count;
};

#define ROW(number, id, suffix, slices, eighths, instances, copy_engines, ofas) \
	{number, id, suffix, slices, eighths, instances, 0, copy_engines, 0, 0, ofas}

/* A100; H100 and H200. */
static const struct row sevenths[] = {
	{ROW(0, 19, "", 1, 1, 7, 1, 0), {14, 16}, {0, 1}, {0, 1}},
	{ROW(7, 20, "+me", 1, 1, 1, 1, 1), {14, 16}, {1, 1}, {1, 1}},
	{ROW(9, 15, "", 1, 2, 4, 1, 0), {14, 26}, {1, 1}, {0, 1}},
	{ROW(1, 14, "", 2, 2, 3, 2, 0), {28, 32}, {1, 2}, {0, 2}},
	{ROW(2, 9, "", 3, 4, 2, 3, 0), {42, 60}, {2, 3}, {0, 3}},
	{ROW(3, 5, "", 4, 4, 1, 4, 0), {56, 64}, {2, 4}, {0, 4}},
	{ROW(4, 0, "", 7, 8, 1, 7, 1), {98, 132}, {5, 7}, {1, 7}},
};

/* A30, which has no profiles for graphics in truth; RTX PRO 6000. */
static const struct row quarters[] = {
	{ROW(0, 14, "", 1, 2, 4, 1, 0), {14, 46}, {0, 1}, {0, 1}},
	{ROW(7, 21, "+me", 1, 2, 1, 1, 1), {14, 46}, {1, 1}, {1, 1}},
	{ROW(10, 47, "+gfx", 1, 2, 4, 1, 0), {14, 46}, {0, 1}, {0, 1}},
	{ROW(15, 65, "+me.all", 1, 2, 1, 1, 1), {14, 46}, {4, 4}, {1, 4}},
	{ROW(13, 67, "-me", 1, 2, 4, 1, 0), {14, 46}, {0, 0}, {0, 0}},
	{ROW(1, 5, "", 2, 4, 2, 2, 0), {28, 94}, {2, 2}, {0, 2}},
	{ROW(8, 6, "+me", 2, 4, 1, 2, 1), {28, 94}, {2, 2}, {1, 2}},
	{ROW(11, 35, "+gfx", 2, 4, 2, 2, 0), {28, 94}, {2, 2}, {0, 2}},
	{ROW(16, 64, "+me.all", 2, 4, 1, 2, 1), {28, 94}, {4, 4}, {1, 4}},
	{ROW(14, 66, "-me", 2, 4, 2, 2, 0), {28, 94}, {0, 0}, {0, 0}},
	{ROW(3, 0, "", 4, 8, 1, 4, 1), {56, 188}, {4, 4}, {1, 4}},
	{ROW(12, 32, "+gfx", 4, 8, 1, 4, 1), {56, 188}, {4, 4}, {1, 4}},
};

#define ROWS(rows) rows, sizeof rows / sizeof *rows

static const struct table tables[] = {
	{{"A30", "RTX PRO"}, 12, ROWS(quarters)},
	{{NULL, NULL}, 9, ROWS(sevenths)},
};

static const struct table *table_of(const struct card *card)
{
	const struct table *t = tables;

	while (t->models[0] && !strstr(card->model, t->models[0]) && !strstr(card->model, t->models[1]))
		t++;
	return t;
}

static struct mig_profile profile_of(const struct card *card, const struct table *t, const struct row *row)
{
	struct mig_profile p = row->profile;
	int newer = card->compute_major >= t->newer;

	p.multiprocessors = row->multiprocessors[newer];
	p.decoders = row->decoders[newer];
	p.jpegs = row->jpegs[newer];
	return p;
}

bool mig_profile_at(const struct card *card, uint32_t number, struct mig_profile *out)
{
	const struct table *t = table_of(card);

	for (int i = 0; i < t->count; i++) {
		if ((uint32_t)t->rows[i].profile.number == number) {
			*out = profile_of(card, t, &t->rows[i]);
			return true;
		}
	}
	return false;
}

bool mig_profile_named(const struct card *card, const char *name, struct mig_profile *out, int *slices)
{
	const struct table *t = table_of(card);
	char text[TOPOLOGY_TEXT];

	for (int i = 0; i < t->count; i++) {
		*out = profile_of(card, t, &t->rows[i]);
		for (*slices = 1; *slices <= MIG_MAX_SLICES; ++*slices) {
			mig_name(card, out, *slices, text);
			if (mig_has_compute(out, *slices) && strcmp(text, name) == 0)
				return true;
		}
	}
	return false;
}

/* Smaller compute instances than the GPU instance leave room for another one. */
bool mig_has_compute(const struct mig_profile *profile, int slices)
{
	return slices == profile->slices || (slices > 0 && 2 * slices <= profile->slices + 1);
}

int mig_multiprocessors(const struct card *card, const struct mig_profile *profile, int slices)
{
	struct mig_profile one;

	if (slices == profile->slices || !mig_profile_at(card, 0, &one))
		return profile->multiprocessors;
	return slices * one.multiprocessors;
}

/* A thirty-second of the memory is the driver's. */
uint64_t mig_memory_mib(const struct card *card, const struct mig_profile *profile)
{
	return card->memory_mib * (uint64_t)profile->eighths * 31 / (8 * 32);
}

void mig_name(const struct card *card, const struct mig_profile *profile, int slices, char out[TOPOLOGY_TEXT])
{
	char part[16] = "";
	uint64_t gib = (card->memory_mib + 1023) / 1024;

	if (slices != profile->slices)
		snprintf(part, sizeof part, "%dc.", slices);
	snprintf(out, TOPOLOGY_TEXT, "%s%dg.%llugb%s", part, profile->slices,
		 (unsigned long long)((gib * (uint64_t)profile->eighths + 4) / 8), profile->suffix);
}

int mig_first_instance(const struct mig_profile *profile)
{
	return 8 / profile->eighths - 1;
}

/* Whether the GPU instance of before, which needs no number of its own, has a place left for m. */
static bool fits_beside(const struct card *card, const struct mig_device *before, const struct mig_device *m)
{
	int used = 0;

	if (!before || before->gi_given || strcmp(before->profile, m->profile) != 0 || m->slices == m->of.slices)
		return false;
	for (const struct mig_device *other = card->mig_devices; other < m; other++) {
		if (other->line && other->gi == before->gi)
			used += other->slices;
	}
	return used + m->slices <= m->of.slices;
}

static void derive_gpu_instances(struct card *card)
{
	bool taken[TOPOLOGY_GPU_INSTANCES] = {false};
	const struct mig_device *before = NULL;

	for (int i = 0; i < TOPOLOGY_MAX_MIG; i++) {
		const struct mig_device *m = &card->mig_devices[i];
		if (m->line && m->gi_given)
			taken[m->gi] = true;
	}
	for (int i = 0; i < TOPOLOGY_MAX_MIG; i++) {
		struct mig_device *m = &card->mig_devices[i];
		if (!m->line)
			continue;
		if (!m->gi_given && fits_beside(card, before, m)) {
			m->gi = before->gi;
		} else if (!m->gi_given) {
			m->gi = mig_first_instance(&m->of);
			while (taken[m->gi]) /* there are more numbers than MIG devices */
				m->gi++;
			taken[m->gi] = true;
		}
		before = m;
	}
}

static void derive_compute_instances(struct card *card)
{
	bool taken[TOPOLOGY_GPU_INSTANCES][TOPOLOGY_COMPUTE_INSTANCES] = {{false}};

	for (int i = 0; i < TOPOLOGY_MAX_MIG; i++) {
		const struct mig_device *m = &card->mig_devices[i];
		if (m->line && m->ci_given)
			taken[m->gi][m->ci] = true;
	}
	for (int i = 0; i < TOPOLOGY_MAX_MIG; i++) {
		struct mig_device *m = &card->mig_devices[i];
		if (!m->line || m->ci_given)
			continue;
		m->ci = 0;
		while (taken[m->gi][m->ci])
			m->ci++;
		taken[m->gi][m->ci] = true;
	}
}

/* FNV-1a of a text, continued from hash. */
static uint64_t fnv(uint64_t hash, const char *text)
{
	for (; *text; text++)
		hash = (hash ^ (unsigned char)*text) * 0x100000001b3;
	return hash;
}

/* A uuid that is the same for the same instance of the same GPU. */
static void derive_uuid(const struct card *card, struct mig_device *m)
{
	char text[TOPOLOGY_TEXT + 32];

	snprintf(text, sizeof text, "%s/%d/%d", card->uuid, m->gi, m->ci);
	uint64_t a = fnv(0xcbf29ce484222325, text), b = fnv(a, text);
	snprintf(m->uuid, sizeof m->uuid, "MIG-%08x-%04x-5%03x-%04x-%012llx", (unsigned)(a >> 32),
		 (unsigned)(a >> 16) & 0xffff, (unsigned)a & 0xfff, ((unsigned)(b >> 48) & 0x3fff) | 0x8000,
		 (unsigned long long)(b & 0xffffffffffff));
}

void mig_derive(struct card *card)
{
	derive_gpu_instances(card);
	derive_compute_instances(card);
	for (int i = 0; i < TOPOLOGY_MAX_MIG; i++) {
		struct mig_device *m = &card->mig_devices[i];
		if (!m->line)
			continue;
		if (!m->uuid[0])
			derive_uuid(card, m);
		if (!m->memory_given)
			m->memory_mib = mig_memory_mib(card, &m->of);
	}
}
