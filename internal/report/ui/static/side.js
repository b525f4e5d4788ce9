// The panel beside the picture: the pods that wait, or the details of a device, a node or a pod.

import {el, set, clean, age, bytes, count} from './dom.js';
import {describe, paint} from './grid.js';

export const link = {
  device: (node, key) => `#device/${encodeURIComponent(node)}/${encodeURIComponent(key)}`,
  node: (node) => `#node/${encodeURIComponent(node)}`,
  pod: (namespace, name) => `#pod/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`,
};

// facts is a list of names and values, of which those without a value are left out.
const facts = (...pairs) => el('dl.facts', {}, pairs.filter(([, v]) => v !== undefined && v !== '' && v !== null && v !== false)
  .flatMap(([k, v]) => [el('dt', {}, k), el('dd', {}, v)]));

const back = () => el('a.back', {href: '#', 'data-key': 'back'}, '← Waiting pods');

function bar(d) {
  const e = el('span.cell.wide', {title: describe(d)}, el('span.bar'));
  paint(e, d);
  return e;
}

// podRow is one pod that holds something.
function podRow(p, node) {
  const bounded = p.allocatedBytes !== undefined, over = bounded && p.usedBytes > p.allocatedBytes;
  const part = p.usedBytes !== undefined && [' · uses ', bytes(p.usedBytes), bounded && ` of ${bytes(p.allocatedBytes)}`];
  return el('li', {}, el('strong', {}, `${p.namespace}/${p.name}`), el('span.holds', {}, p.holds ?? String(p.units)),
    el('small', {class: over ? 'warning' : undefined}, node.kinds[p.kind ?? 0]?.resource, ' · ', age(p.since),
      p.planned && ' · planned, not confirmed by the node yet', part));
}

function podList(title, pods, node, none) {
  return [el('h3', {}, title), pods.length ? el('ul.pods', {}, pods.map((p) => podRow(p, node))) : el('p.none', {}, none)];
}

function devicePanel(d) {
  const u = d.use;
  return [back(), el('h2', {}, `Device ${d.index}`), el('p.sub', {}, d.model, d.profile && ` · ${d.profile}`), bar(d),
    d.state && el('p.warning', {}, d.state === 'quarantine' ? 'In quarantine' : 'Unhealthy',
      `: ${d.reason || 'no reason given'}. No new pods are placed on it.`),
    d.offers.map((o) => facts(['Resource', o.resource], ['Shared', o.how], ['Allocated', `${o.used} of ${o.total}${d.state ? '' : `, ${o.free} free`}`],
      ['Withheld', o.withheld > 0 && `${o.withheld}: containers use more than their allocations`],
      ['Unavailable', o.other > 0 && `${o.other}: the device is allocated as another resource`])),
    u && facts(['In use', u.problem ? `unknown: ${u.problem}` : `${bytes(u.used)} of ${bytes(u.total)}`],
      ['By others', u.others > 0 && `${bytes(u.others)}: processes outside of the device's pods`]),
    podList('Pods', d.pods, d.node, 'No pod holds anything of this device.'),
    el('h3', {}, 'Device'),
    facts(['Node', el('a', {href: link.node(d.node.name), 'data-key': 'node'}, d.node.name)], ['ID', d.id], ['Board', d.board],
      ['Chips', d.chips],
      ['NUMA node', d.numa?.toString()], ['Cut from', d.parent], ['Isolation', d.isolation || 'none']),
    el('p.hint', {}, 'More: ', el('code', {}, `kubectl divvy inspect ${d.node.name} -o wide`))];
}

function nodePanel(n) {
  return [back(), el('h2', {}, n.name), el('p.sub', {}, [n.zone, ...(n.closed ?? [])].filter(Boolean).join(' · ')),
    n.problem && el('p.warning', {}, `What the node publishes cannot be read: ${n.problem}.`),
    el('ul.devices', {}, n.devices.map((d) => el('li', {},
      el('a', {href: link.device(n.name, d.key), 'data-key': d.key}, `Device ${d.index}`), bar(d),
      el('small', {}, d.state || [d.model, count(d.pods.length, 'pod')].filter(Boolean).join(' · '))))),
    n.unplaced.length > 0 && podList('On no device yet', n.unplaced, n, '')];
}

const kinds = {
  wait: 'Wait', node: 'Change a node', annotation: 'Annotate the pod', request: 'Change the request',
  endPods: 'End other pods', moreNodes: 'Add a node',
};

function change(c) {
  const where = [c.node, c.devices?.length && `device ${c.devices.join(', ')}`].filter(Boolean).join(' ');
  const about = [kinds[c.kind], where, c.by && `by the ${c.by}`].filter(Boolean).join(' · ');
  return el('li', {}, el('strong', {}, c.text), el('small', {}, about,
    el(c.verified ? 'span.good' : 'span.doubt', {}, c.verified ? ' ✓ verified' : ' not verified')),
    (c.commands ?? []).map((text, i) => el('div.command', {}, el('code', {}, text), el('button', {
      type: 'button', 'data-key': text + i, 'aria-label': 'Copy the command', onclick: async (e) => {
        await navigator.clipboard.writeText(clean(text));
        e.target.textContent = 'Copied';
      }}, 'Copy'))));
}

// lacks counts nodes by what they lack.
function lacks(nodes) {
  const found = new Map();
  for (const n of nodes) {
    const what = n.code ? n.missing || n.code : 'fits';
    found.set(what, [...(found.get(what) ?? []), n.name]);
  }
  return [...found].sort((a, b) => b[1].length - a[1].length).slice(0, 12).map(([what, names]) => el('li', {},
    el('strong', {}, what), el('small', {},
      `${count(names.length, 'node')}: ${names.slice(0, 4).join(', ')}${names.length > 4 ? ', …' : ''}`)));
}

function podPanel(namespace, name, why) {
  const top = [back(), el('h2', {}, name), el('p.sub', {}, `namespace ${namespace}`, why?.owner && ` · ${why.owner}`)];
  if (!why) return [...top, el('p.none', {}, 'Looking for the reason …')];
  if (why.error) return [...top, el('p.warning', {}, `${why.error}.`)];
  const r = why.request, [first, ...more] = why.causes, evidence = why.causes.flatMap((c) => c.evidence ?? []);
  return [...top,
    r && facts(['Requests', `${r.units} ${r.resource}${r.bytes ? ` (${bytes(r.bytes)})` : ''}`],
      ['Devices', r.devices > 1 && String(r.devices)],
      [{waits: 'Waits for', gated: 'Waits for', runs: 'Runs for', starting: 'Age', failed: 'Age'}[why.state], why.since && age(why.since)]),
    first ? el('p.cause', {}, el('span.code', {}, first.code), first.detail) : el('p.cause', {}, 'Nothing keeps this pod waiting.'),
    more.length > 0 && el('ul.more', {}, more.map((c) => el('li', {}, el('span.code', {}, c.code), c.detail))),
    why.changes.length > 0 && [el('h3', {}, 'What would help'), el('ol.changes', {}, why.changes.map(change))],
    why.waiting.why && why.state !== 'runs' && [el('h3', {}, 'Does waiting help?'),
      el('p', {}, `${why.waiting.helps ? 'Yes' : 'No'}: ${why.waiting.why}.`,
        why.autoscaler && !why.autoscaler.sees && ` An autoscaler will not act: ${why.autoscaler.why}.`)],
    why.nodes?.length > 0 && [el('h3', {}, 'Nodes'), el('ul.more', {}, lacks(why.nodes))],
    evidence.length > 0 && [el('h3', {}, 'Evidence'), el('ul.more', {}, evidence.map((t) => el('li', {}, t)))],
    (why.notes ?? []).map((t) => el('p.hint', {}, t))];
}

// WaitingList is the panel of the pods that wait. A row stays the same element as long as its pod waits.
class WaitingList {
  #number = el('span.number'); #none = el('p.none'); #rows = new Map(); #list = el('ul.waiting'); #more = el('p.hint');
  elements = [el('h2', {}, 'Waiting pods ', this.#number), this.#none, this.#list, this.#more];

  show(waiting) {
    const {total, pods} = waiting ?? {total: '', pods: []};
    set(this.#number, total);
    set(this.#none, waiting === undefined ? 'Reading the cluster …' : pods.length ? '' : 'No pod waits for a device.');
    set(this.#more, total > pods.length ? `The oldest ${pods.length} of ${total} are listed.` : '');
    const keep = new Set(pods.map((p) => `${p.namespace}/${p.name}`));
    for (const [key, row] of this.#rows) {
      if (keep.has(key)) continue;
      row.remove();
      this.#rows.delete(key);
    }
    pods.forEach((p, i) => {
      const key = `${p.namespace}/${p.name}`;
      let row = this.#rows.get(key);
      if (!row) {
        row = el('li', {}, el('a', {href: link.pod(p.namespace, p.name), 'data-key': key}, el('strong', {}, p.name), el('span.age'),
          el('small'), el('span.reason')));
        this.#rows.set(key, row);
      }
      const [, since, request, reason] = row.firstChild.children;
      since.dataset.since = p.since;
      set(since, age(p.since));
      set(request, `${p.namespace} · ${p.request}`);
      set(reason, p.reason || 'not looked at by a scheduler yet');
      if (this.#list.children[i] !== row) this.#list.insertBefore(row, this.#list.children[i] ?? null);
    });
  }
}

export class Side {
  #root; #model; #shown; #route = []; #why; #asked = 0; #timer; #list = new WaitingList();

  constructor(root, model) {
    [this.#root, this.#model] = [root, model];
    setInterval(() => root.querySelectorAll('[data-since]').forEach((e) => { e.textContent = age(e.dataset.since); }), 10000);
  }

  // go opens what the part of the address after # names; anything else are the pods that wait.
  go(hash) {
    try {
      this.#route = hash.slice(1).split('/').map(decodeURIComponent);
    } catch {
      this.#route = [];
    }
    this.#why = this.#shown = undefined;
    this.#asked = 0;
    this.update();
    this.#root.scrollTop = 0;
    return this.#route;
  }

  // update shows the newest. The panel is built again only if something in it changed; the focus stays
  // where it was.
  update() {
    const [kind, a, b] = this.#route;
    let source, build;
    if (kind === 'device') {
      source = this.#model.device(a, b);
      build = () => (source ? devicePanel(source) : [back(), el('p.warning', {}, `Node ${a} has no such device, or you may not see it.`)]);
    } else if (kind === 'node') {
      source = this.#model.nodes.get(a);
      build = () => (source ? nodePanel(source) :
        [back(), el('p.warning', {}, `There is no node ${a} with devices, or you may not see it.`)]);
    } else if (kind === 'pod') {
      this.#ask(a, b);
      source = this.#why;
      build = () => podPanel(a, b, source);
    } else {
      this.#list.show(this.#model.waiting);
      source = this.#list;
      build = () => source.elements;
    }
    if (this.#shown !== undefined && this.#shown === source) return;
    this.#shown = source ?? null;
    const focused = this.#root.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    this.#root.replaceChildren(...build().flat(Infinity).filter(Boolean));
    if (focused !== undefined) this.#root.querySelector(`[data-key="${CSS.escape(clean(focused))}"]`)?.focus();
  }

  // ask asks why a pod waits: at once, and again at most every 5 s as the cluster changes.
  async #ask(namespace, name) {
    const wait = this.#asked + 5000 - Date.now();
    if (wait > 0) {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.update(), wait);
      return;
    }
    this.#asked = Date.now();
    const route = this.#route;
    let found;
    try {
      const answer = await fetch(`api/why?${new URLSearchParams({namespace, name})}`);
      found = await answer.json();
    } catch {
      found = {error: 'kubectl divvy ui does not answer'};
    }
    const same = (x, y) => JSON.stringify({...x, taken: 0}) === JSON.stringify({...y, taken: 0});
    if (route !== this.#route || (this.#why && same(this.#why, found))) return; // another one is open, or nothing is new
    this.#why = found;
    this.update();
  }
}
