// What is known of the cluster, and which part of it is to be shown. No elements here.

// A Device is what the server sends of it, and what is drawn of that. Fractions are from 0 to 1.
class Device {
  constructor(d, node) {
    Object.assign(this, d);
    this.node = node;
    this.key = `${d.id}/${d.chips ?? 0}`;
    this.model ??= node.model;
    this.offers = (d.offers ?? []).map((o) => {
      const offer = {used: 0, withheld: 0, other: 0, ...node.kinds[o.kind ?? 0], ...o};
      offer.free = Math.max(offer.total - offer.used - offer.withheld - offer.other, 0);
      return offer;
    });
    this.pods = d.pods ?? [];
    const part = (o) => (o?.total > 0 ? Math.min(o.used / o.total, 1) : 0);
    // Of a device that is offered as several resources, the one is shown that pods hold.
    this.offer = this.offers.reduce((a, b) => (part(b) > part(a) ? b : a), this.offers[0]);
    this.allocated = part(this.offer);
    this.withheld = this.offer?.total > 0 ? Math.min((this.offer.withheld + this.offer.other) / this.offer.total, 1) : 0;
    // A device that is allocated as another one is not one more.
    this.counted = this.pods.length > 0 || this.offers.length === 0 || this.offers.some((o) => o.other < o.total);
    this.used = d.use && !d.use.problem && d.use.total > 0 ? Math.min(d.use.used / d.use.total, 1) : undefined;
    this.over = this.pods.some((p) => p.allocatedBytes !== undefined && p.usedBytes > p.allocatedBytes);
  }

  // text is what a search looks at. Most devices are never looked for.
  get text() {
    this.words ??= [this.id, this.index, this.model, this.profile, this.state, ...this.offers.map((o) => o.resource),
      ...this.pods.map((p) => `${p.namespace}/${p.name}`)].join('\n').toLowerCase();
    return this.words;
  }
}

const free = (d) => !d.state && d.offers.some((o) => o.free > 0);

// unplaced is how many devices the pods hold of which the node has not named the device. If they may
// hold all that looks free, nothing is.
function unplaced(node) {
  let devices = 0;
  node.kinds.forEach((kind, at) => {
    const units = node.unplaced.reduce((sum, p) => ((p.kind ?? 0) === at ? sum + p.units : sum), 0);
    if (units === 0) return;
    const offers = node.devices.flatMap((d) => d.offers.filter((o) => (o.kind ?? 0) === at));
    if (offers.length) devices += units / Math.max(...offers.map((o) => o.total), 1);
    if (offers.reduce((sum, o) => sum + o.free, 0) <= units) offers.forEach((o) => { o.free = 0; });
  });
  return devices;
}

const states = {
  free, full: (d) => !d.state && !free(d), empty: (d) => d.counted && d.pods.length === 0, over: (d) => d.over, bad: (d) => Boolean(d.state),
  idle: (d) => d.pods.some((p) => p.usedBytes === 0) || (d.pods.length > 0 && d.used === 0),
};

const groups = {
  model: (n) => [...new Set(n.devices.map((d) => d.model || 'unknown model'))].join(', '),
  resource: (n) => n.kinds.map((k) => k.resource).sort().join(', ') || 'none',
  zone: (n) => n.zone || 'no zone',
  state: (n) => {
    if (n.problem || n.devices.some((d) => d.state)) return 'with unhealthy devices or devices in quarantine';
    if (n.closed) return 'closed to new pods';
    return n.devices.some(free) ? 'with free capacity' : 'full';
  },
};

const byName = new Intl.Collator('en', {numeric: true}).compare;
const orders = {full: (a, b) => b.allocated - a.allocated, free: (a, b) => a.allocated - b.allocated};

export class Model {
  nodes = new Map();
  waiting; // until it is known
  status = {};
  filter = {text: '', resource: '', namespace: '', state: '', group: '', sort: 'name'};
  // prefix is what all names begin with, up to the last separator.
  prefix = '';
  // Of a stream that begins: the nodes that it has named, until it is complete.
  #seen;
  #order; // nodes as sorted; undefined once that is to be done again
  #names = []; // by name, which takes the longest

  begin() { this.#seen = new Set(); }

  // complete removes what the new stream has not named.
  complete() {
    this.#names = undefined;
    this.gone([...this.nodes.keys()].filter((name) => !this.#seen.has(name)));
    this.#seen = undefined;
  }

  gone(names) {
    for (const name of names) this.nodes.delete(name);
    if (names.length) this.#names = undefined;
    this.#order = undefined;
  }

  // take takes in nodes that are new or have changed. The others stay the same objects.
  take(nodes) {
    for (const raw of nodes) {
      const node = {...raw, text: `${raw.name}\n${raw.zone ?? ''}\n${(raw.closed ?? []).join('\n')}`.toLowerCase()};
      node.kinds = raw.kinds ?? [];
      node.devices = raw.devices.map((d) => new Device(d, node));
      node.unplaced = raw.unplaced ?? [];
      node.unplacedText = node.unplaced.map((p) => `${p.namespace}/${p.name}`).join('\n').toLowerCase();
      node.counted = node.devices.filter((d) => d.counted).length;
      const held = node.devices.reduce((sum, d) => sum + d.allocated, 0) + unplaced(node);
      node.allocated = node.counted ? Math.min(held / node.counted, 1) : 0;
      node.all = node.devices.map(() => true);
      node.namespaces = new Set(node.devices.flatMap((d) => d.pods.map((p) => p.namespace)));
      if (!this.nodes.has(node.name)) this.#names = undefined;
      this.nodes.set(node.name, node);
      this.#seen?.add(node.name);
    }
    this.#order = undefined;
  }

  // matches says for each device of a node whether it is looked for; undefined if none is.
  matches(node) {
    if (!this.filtered) return node.all;
    const {text, resource, namespace, state} = this.filter;
    const words = text.toLowerCase().split(/\s+/).filter((w) => w && !node.text.includes(w));
    const some = node.devices.map((d) => words.every((w) => d.text.includes(w) || node.unplacedText.includes(w)) &&
      (!resource || d.offers.some((o) => o.resource === resource)) &&
      (!namespace || d.pods.some((p) => p.namespace === namespace)) &&
      (!state || states[state](d)));
    if (node.devices.length === 0) return words.length || resource || namespace || state ? undefined : some;
    return some.includes(true) ? some : undefined;
  }

  get filtered() { return ['text', 'resource', 'namespace', 'state'].some((f) => this.filter[f]); }

  // visible returns the groups that are shown: [{name, nodes: [{node, matches}]}].
  visible() {
    if (!this.#names) this.#sort();
    if (!this.#order) {
      this.#order = this.#names.map((name) => this.nodes.get(name));
      if (this.filter.sort !== 'name') this.#order.sort(orders[this.filter.sort]); // which keeps names in order
    }
    const by = groups[this.filter.group] ?? (() => '');
    const found = new Map();
    for (const node of this.#order) {
      const matches = this.matches(node);
      if (!matches) continue;
      const name = by(node);
      if (!found.has(name)) found.set(name, []);
      found.get(name).push({node, matches});
    }
    return [...found].sort(([a], [b]) => byName(a, b)).map(([name, nodes]) => ({name, nodes}));
  }

  #sort() {
    this.#names = [...this.nodes.keys()];
    if (!this.#seen) this.#names.sort(byName); // as they come, in which order the server sends them
    let common = this.#names.length > 1 ? this.#names[0] : '';
    for (const name of this.#names) while (!name.startsWith(common)) common = common.slice(0, -1);
    this.prefix = common.slice(0, Math.max(common.lastIndexOf('-'), common.lastIndexOf('.')) + 1);
  }

  set(name, value) {
    this.filter[name] = value;
    if (name === 'sort') this.#order = undefined;
  }

  // sums adds up what the header shows.
  sums() {
    const s = {nodes: this.nodes.size, devices: 0, allocated: 0, empty: 0, bad: 0, used: 0, measured: 0};
    for (const node of this.nodes.values()) {
      s.devices += node.counted;
      s.allocated += node.allocated * node.counted;
      const empty = node.devices.filter((d) => !d.state && states.empty(d)).length;
      s.empty += Math.max(empty - node.unplaced.length, 0);
      for (const d of node.devices) {
        if (d.state) s.bad++;
        if (d.used !== undefined) {
          s.used += d.used;
          s.measured++;
        }
      }
    }
    return s;
  }

  // choices are the resources and namespaces that can be selected.
  choices() {
    const resources = new Set(), namespaces = new Set();
    for (const node of this.nodes.values()) {
      for (const k of node.kinds) resources.add(k.resource);
      for (const n of node.namespaces) namespaces.add(n);
    }
    return {resource: [...resources].sort(), namespace: [...namespaces].sort()};
  }

  device(name, key) { return this.nodes.get(name)?.devices.find((d) => d.key === key); }
}
