/*
 * efsmi stands in for Enflame's program of that name, as far as DRS goes: the table of cards
 * with their virtualization modes, and the commands that make and list DRS instances. The cards
 * are those of the topology file, in lib beside this program's folder or in the folder itself;
 * what the commands do is kept in a file beside it, as the cards keep it.
 *
 * Command line and table are the vendor's. The form of the list of instances is not
 * documented anywhere; this one has a line for each with its profile, number and uuid.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "topology.h"

enum { SLICES = 6, MAX_INSTANCES = 64 };

static const struct {
	int slices, sixths;
} profiles[] = {{1, 1}, {2, 2}, {3, 3}, {6, 6}};

enum { PROFILES = sizeof profiles / sizeof *profiles };

struct instance {
	int card, id, profile;
	char uuid[TOPOLOGY_TEXT];
};

/* What the cards keep. */
static struct {
	bool on[TOPOLOGY_MAX_CARDS];
	struct instance instances[MAX_INSTANCES];
	int count, made;
} kept;

static struct topology topology;
static char folder[PATH_MAX], state_file[PATH_MAX + 16];

static int fail(const char *text)
{
	fprintf(stderr, "efsmi: %s\n", text);
	return 1;
}

static bool read_topology(const char *dir, const char *sub)
{
	static char text[1 << 20];
	char path[PATH_MAX + 32], error[256];

	snprintf(path, sizeof path, "%s%s/topology.ini", dir, sub);
	FILE *f = fopen(path, "r");
	if (!f)
		return false;
	size_t size = fread(text, 1, sizeof text, f);
	fclose(f);
	if (!topology_parse(text, size, &topology, error, sizeof error)) {
		fprintf(stderr, "efsmi: %s: %s\n", path, error);
		return false;
	}
	snprintf(folder, sizeof folder, "%s%s", dir, sub);
	snprintf(state_file, sizeof state_file, "%s/drs.state", folder);
	return true;
}

/* The n-th card of Enflame's, NULL for none. */
static const struct card *card_at(int n)
{
	for (int i = 0; i < topology.count; i++)
		if (strcmp(topology.cards[i].vendor, "enflame") == 0 && n-- == 0)
			return &topology.cards[i];
	return NULL;
}

static void load(void)
{
	FILE *f = fopen(state_file, "r");
	int card;

	if (!f)
		return;
	if (fscanf(f, "made %d\n", &kept.made) != 1)
		kept.made = 0;
	while (fscanf(f, "on %d\n", &card) == 1)
		if (card >= 0 && card < TOPOLOGY_MAX_CARDS)
			kept.on[card] = true;
	struct instance *i = kept.instances;
	while (kept.count < MAX_INSTANCES && fscanf(f, " instance %d %d %d %63s", &i->card, &i->id, &i->profile, i->uuid) == 4) {
		kept.count++;
		i++;
	}
	fclose(f);
}

static int save(void)
{
	FILE *f = fopen(state_file, "w");

	if (!f)
		return fail("cannot keep the state");
	fprintf(f, "made %d\n", kept.made);
	for (int i = 0; i < TOPOLOGY_MAX_CARDS; i++)
		if (kept.on[i])
			fprintf(f, "on %d\n", i);
	for (int i = 0; i < kept.count; i++)
		fprintf(f, "instance %d %d %d %s\n", kept.instances[i].card, kept.instances[i].id, kept.instances[i].profile,
			kept.instances[i].uuid);
	return fclose(f) == 0 ? 0 : fail("cannot keep the state");
}

static void profile_name(const struct card *c, int profile, char *out, size_t size)
{
	snprintf(out, size, "%dg.%dgb", profiles[profile].slices, (int)(c->memory_mib * (uint64_t)profiles[profile].sixths / SLICES / 1024));
}

static int print_table(void)
{
	static const char *const border = "+-----------------------+-----------------------+-------------------+\n";
	const struct card *c;

	fputs(border, stdout);
	fputs("| DEV     NAME          | FW VER                | BUS-ID            |\n", stdout);
	fputs("| Temp  Pwr(Usage/Cap)  | Mem(Used/Total)       | Virt              |\n", stdout);
	fputs(border, stdout);
	for (int i = 0; (c = card_at(i)) != NULL; i++) {
		printf("| %-7d %-13s | 1.0.0                 | %02x:%02x:%02x.%x       |\n", i, c->model, c->pci_domain & 0xff, c->pci_bus,
		       c->pci_device, c->pci_function);
		printf("| 35C   75W / 300W      | %dMiB / %dMiB   | %-17s |\n", (int)c->used_mib, (int)c->memory_mib, kept.on[i] ? "DRS" : "Disable");
		fputs(border, stdout);
	}
	return 0;
}

static int list(int only)
{
	const struct card *c;

	for (int n = 0; (c = card_at(n)) != NULL; n++) {
		if (only >= 0 && n != only)
			continue;
		printf("GCU %d: %s (UUID: GCU-%s)\n", n, c->model, c->uuid);
		for (int i = 0; i < kept.count; i++) {
			const struct instance *one = &kept.instances[i];
			char name[32];
			if (one->card != n)
				continue;
			profile_name(c, one->profile, name, sizeof name);
			printf("  DRS %s Instance %d (UUID: %s)\n", name, one->id, one->uuid);
		}
	}
	return 0;
}

static int create(int n, int profile)
{
	int used = 0, id = 0;

	if (!kept.on[n])
		return fail("the card is not in DRS mode");
	if (profile < 0 || profile >= PROFILES)
		return fail("there is no such profile");
	for (int i = 0; i < kept.count; i++)
		if (kept.instances[i].card == n) {
			used += profiles[kept.instances[i].profile].slices;
			if (kept.instances[i].id >= id)
				id = kept.instances[i].id + 1;
		}
	if (used + profiles[profile].slices > SLICES || kept.count == MAX_INSTANCES)
		return fail("insufficient slices");
	struct instance *one = &kept.instances[kept.count++];
	*one = (struct instance){.card = n, .id = id, .profile = profile};
	kept.made++;
	snprintf(one->uuid, sizeof one->uuid, "5d5f0000-0000-4000-8000-%012d", kept.made);
	return save();
}

static int destroy(int n, int id)
{
	for (int i = 0; i < kept.count; i++)
		if (kept.instances[i].card == n && kept.instances[i].id == id) {
			kept.instances[i] = kept.instances[--kept.count];
			return save();
		}
	return fail("there is no such instance");
}

static int switch_mode(int n, bool on)
{
	for (int i = 0; i < kept.count; i++)
		if (kept.instances[i].card == n)
			return on ? 0 : fail("the card has instances");
	kept.on[n] = on;
	return save();
}

int main(int argc, char **argv)
{
	char path[PATH_MAX], *slash;
	int card = -1;
	const char *command[3] = {0};
	int words = 0;

	if (!realpath(argv[0], path) || !(slash = strrchr(path, '/')))
		return fail("no place");
	*slash = '\0';
	if (!read_topology(path, "/../lib") && !read_topology(path, "") && !read_topology(path, "/lib"))
		return fail("the driver is not loaded");
	if (topology_driver(&topology, "enflame")->state != DRIVER_LOADED)
		return fail("the driver is not loaded");
	load();
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "-i") == 0 && i + 1 < argc) {
			card = atoi(argv[++i]);
			if (card < 0 || !card_at(card))
				return fail("there is no such card");
		} else if (words < 3) {
			command[words++] = argv[i];
		}
	}
	if (words == 0)
		return print_table();
	if (words == 1 && strcmp(command[0], "-L") == 0)
		return list(card);
	if (words < 2 || strcmp(command[0], "--drs") != 0 || card < 0)
		return fail("unknown command");
	if (strcmp(command[1], "on") == 0 || strcmp(command[1], "off") == 0)
		return switch_mode(card, strcmp(command[1], "on") == 0);
	if (strcmp(command[1], "--list-profile") == 0) {
		for (int i = 0; i < PROFILES; i++) {
			char name[32];
			profile_name(card_at(card), i, name, sizeof name);
			printf("| %d | %s |\n", i, name);
		}
		return 0;
	}
	if (words == 3 && strcmp(command[1], "--create-instance") == 0)
		return create(card, atoi(command[2]));
	if (words == 3 && strcmp(command[1], "--destroy-instance") == 0)
		return destroy(card, atoi(command[2]));
	return fail("unknown command");
}
