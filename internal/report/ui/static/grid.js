// The picture: a tile for each node, a cell for each device. Only tiles in sight exist as elements, so
// 5000 nodes cost no more than 500, and a tile stays the same element as long as it is in sight.

import {el, set, clean, count} from './dom.js';

const beyond = 200; // pixels above and below that are drawn as well
const head = 34; // height of a group's header

// Sizes of tiles. Heights of details depend on the node.
const details = {gap: 8, width: 400, height: (n) => 54 + 24 * n.devices.length + (n.unplaced.length || n.problem ? 20 : 0)};
const dense = {gap: 5, width: 76, height: () => 38};

// Cells are copied from these, since there are thousands.
const cells = {
  details: el('button.cell', {type: 'button', tabindex: -1}, el('span.index'), el('span.bar'), el('span.about')),
  dense: el('button.cell', {type: 'button', tabindex: -1}, el('span.bar')),
};

// describe says what a cell shows, for tooltips and readers of the screen.
export function describe(d) {
  const o = d.offer;
  const parts = [`Device ${d.index}`, d.model, d.profile, o && `${o.used} of ${o.total} allocated as ${o.resource}`,
    count(d.pods.length, 'pod'), d.used !== undefined && `${Math.round(d.used * 100)}% of memory in use`,
    d.over && 'used above allocation', d.state && `${d.state}: ${d.reason || 'no reason given'}`];
  return clean(parts.filter(Boolean).join(', '));
}

// contents says which devices a node has: "4 × A100 · nvidia.com/gpu-memory in units of 1 GB".
function contents(node) {
  const models = Object.entries(Object.groupBy(node.devices, (d) => d.model || 'device')).map(([m, all]) => `${all.length} × ${m}`);
  return [...models, ...node.kinds.map((k) => `${k.resource} ${k.how ?? ''}`)].join(' · ');
}

// paint sets what the style sheet draws a cell from. What few cells have is set on those alone.
export function paint(cell, d) {
  cell.style.setProperty('--a', d.allocated);
  if (cell.w || d.withheld) cell.style.setProperty('--w', cell.w = d.withheld);
  cell.style.setProperty('--u', d.used ?? 0);
  if (cell.dataset.state || d.state) cell.dataset.state = d.state ?? '';
  cell.toggleAttribute('data-over', d.over);
}

export class Grid {
  prefix = ''; // what all names begin with; left out where tiles are small
  #root; #sheet; #open;
  #rows = []; // {y, height, title} of a header, or {y, height, items: [{node, matches}]}
  #where = new Map(); // node name to [row, column]
  #tiles = new Map(); // node name to {tile, node, cells, ...}
  #heads = new Map();
  #size = details;
  #step = 0; // from one column to the next
  #current; // [node name, device key] of the one cell that Tab reaches
  #selected = []; // the same of what is open in the panel
  #stop; #chosen; // the elements of both

  constructor(root, sheet, open) {
    [this.#root, this.#sheet, this.#open] = [root, sheet, open];
    root.addEventListener('scroll', () => this.draw(), {passive: true});
    sheet.addEventListener('click', (e) => this.#click(e));
    sheet.addEventListener('keydown', (e) => this.#key(e));
    sheet.addEventListener('focusin', (e) => {
      const cell = e.target.closest('.cell');
      if (cell) this.#enter(cell.closest('.tile').dataset.node, cell.dataset.key);
    });
  }

  // show lays out the groups, and draws what is in sight.
  show(groups, view) {
    const all = groups.reduce((n, g) => n + g.nodes.length, 0);
    const isDense = view === 'dense' || (view === 'auto' && all > 24);
    this.#size = isDense ? dense : details;
    this.#sheet.classList.toggle('dense', isDense);
    const most = groups.reduce((n, g) => g.nodes.reduce((m, i) => Math.max(m, i.node.devices.length), n), 0);
    // Tiles share the width of the window; these are the narrowest.
    const width = isDense ? Math.max(dense.width, 12 + 7 * Math.min(most, 32)) : details.width;
    const gap = this.#size.gap;
    const columns = Math.max(1, Math.floor((this.#root.clientWidth - gap) / (width + gap)));
    this.#step = (this.#root.clientWidth - gap) / columns;
    this.#sheet.style.setProperty('--tile', `${this.#step - gap}px`);
    this.#rows = [];
    this.#where.clear();
    let y = gap;
    for (const {name, nodes} of groups) {
      if (name) {
        const devices = nodes.reduce((n, i) => n + i.node.counted, 0);
        const part = nodes.reduce((n, i) => n + i.node.allocated * i.node.counted, 0) / Math.max(devices, 1);
        this.#rows.push({y, height: head, name,
          about: `${count(nodes.length, 'node')}, ${count(devices, 'device')}, ${Math.round(part * 100)}% allocated`});
        y += head;
      }
      for (let i = 0; i < nodes.length; i += columns) {
        const items = nodes.slice(i, i + columns);
        const height = Math.max(...items.map((item) => this.#size.height(item.node)));
        items.forEach((item, column) => this.#where.set(item.node.name, [this.#rows.length, column]));
        this.#rows.push({y, height, items});
        y += height + gap;
      }
    }
    this.#sheet.style.height = `${y}px`;
    this.draw();
  }

  // draw makes the elements in sight what they are to be, and removes others.
  draw() {
    const top = this.#root.scrollTop - beyond, bottom = this.#root.scrollTop + this.#root.clientHeight + beyond;
    const tiles = new Set(), heads = new Set();
    for (let i = this.#first(top); i < this.#rows.length && this.#rows[i].y < bottom; i++) {
      const row = this.#rows[i];
      if (row.items) {
        row.items.forEach((item, column) => {
          tiles.add(item.node.name);
          this.#tile(item, this.#size.gap + column * this.#step, row.y);
        });
      } else {
        heads.add(row.name);
        this.#head(row);
      }
    }
    const focused = document.activeElement?.closest?.('.tile')?.dataset.node;
    for (const [name, {tile}] of this.#tiles) {
      if (tiles.has(name) || (name === focused && this.#where.has(name))) continue;
      tile.remove();
      this.#tiles.delete(name);
    }
    for (const [name, h] of this.#heads) {
      if (heads.has(name)) continue;
      h.remove();
      this.#heads.delete(name);
    }
    this.#tabStop();
  }

  // first is the first row that ends below y.
  #first(y) {
    let low = 0, high = this.#rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#rows[middle].y + this.#rows[middle].height < y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  #head(row) {
    let h = this.#heads.get(row.name);
    if (!h) {
      h = el('h2', {}, el('span'), el('small'));
      this.#heads.set(row.name, h);
      this.#sheet.append(h);
    }
    set(h.firstChild, row.name);
    set(h.lastChild, row.about);
    h.style.transform = `translateY(${row.y}px)`;
  }

  #tile({node, matches}, x, y) {
    let t = this.#tiles.get(node.name);
    if (!t) {
      const title = el('button.name', {type: 'button', tabindex: -1});
      const badge = el('span.badge'), amount = el('span.amount'), what = el('p.what'), body = el('div.cells'), foot = el('p.foot');
      t = {tile: el('section.tile', {'aria-label': `Node ${node.name}`}, el('header', {}, title, badge, amount), what, body, foot),
        title, badge, amount, what, body, foot, cells: new Map()};
      t.tile.dataset.node = node.name; // as it is: a key
      this.#tiles.set(node.name, t);
      this.#sheet.append(t.tile);
    }
    const at = `translate(${x}px, ${y}px)`;
    if (t.tile.style.transform !== at) t.tile.style.transform = at;
    const shown = matches.join();
    const isDense = this.#size === dense;
    if (t.node === node && t.shown === shown && t.dense === isDense && t.prefix === this.prefix) return;
    if (t.dense !== isDense) { // whose cells are others
      t.body.replaceChildren();
      t.cells.clear();
    }
    // What is in use changes all the time.
    const held = node.devices.map((d) => [d.key, d.state, d.pods.map((p) => [p.namespace, p.name, p.units])]).join();
    if (t.held !== undefined && t.held !== held) this.#flash(t.tile);
    Object.assign(t, {node, held, shown, dense: isDense, prefix: this.prefix});
    set(t.title, t.dense ? node.name.slice(this.prefix.length) : node.name);
    const note = node.problem ??
      (node.unplaced.length ? `${count(node.unplaced.length, 'pod')} on a device that the node has not named` : '');
    t.title.title = t.tile.title = clean(note ? `${node.name}: ${note}` : node.name);
    t.title.tabIndex = node.devices.length ? -1 : 0; // nothing else of it can be reached
    t.tile.classList.toggle('noted', note !== '');
    set(t.badge, node.problem ? 'cannot be read' : (node.closed ?? []).join(', '));
    t.tile.classList.toggle('closed', Boolean(node.closed || node.problem));
    set(t.what, t.dense ? '' : contents(node));
    set(t.amount, `${Math.round(node.allocated * 100)}%`);
    set(t.foot, note);
    const keep = new Set();
    node.devices.forEach((d, i) => {
      keep.add(d.key);
      this.#cell(t, d, matches[i], i);
    });
    for (const [key, c] of t.cells) {
      if (keep.has(key)) continue;
      c.cell.remove();
      t.cells.delete(key);
    }
  }

  #cell(t, d, matches, i) {
    let c = t.cells.get(d.key);
    if (!c) {
      const cell = (t.dense ? cells.dense : cells.details).cloneNode(true);
      c = {cell, index: cell.querySelector('.index'), bar: cell.querySelector('.bar'), about: cell.querySelector('.about')};
      c.cell.dataset.key = d.key;
      t.cells.set(d.key, c);
    }
    if (t.body.children[i] !== c.cell) t.body.insertBefore(c.cell, t.body.children[i] ?? null);
    paint(c.cell, d);
    c.cell.classList.toggle('other', !matches);
    c.cell.title = describe(d);
    c.cell.setAttribute('aria-label', `${describe(d)}, node ${d.node.name}`);
    if (t.dense) return;
    set(c.index, d.index);
    const o = d.offer;
    set(c.about, d.state ? d.state : o ? `${o.used} / ${o.total}` : '');
    c.bar.replaceChildren(...d.pods.map((p) => {
      const e = el('i', {}, p.name);
      e.style.width = `${o?.total ? Math.min(p.units / o.total, 1) * 100 : 0}%`;
      return e;
    }));
  }

  #flash(tile) {
    if (matchMedia('(prefers-reduced-motion: reduce)').matches) return;
    tile.animate([{outlineColor: 'var(--accent)'}, {outlineColor: 'transparent'}], {duration: 1500});
  }

  // select marks a device or node as the one whose details are open.
  select(name, key) {
    this.#selected = [name, key];
    if (name !== undefined) this.#current = [name, key ?? this.#current?.[1]];
    this.#tabStop();
  }

  // tabStop lets Tab reach one cell, the one that had the focus last, else the first; and marks what
  // is selected.
  #tabStop() {
    const cell = ([name, key]) => this.#tiles.get(name)?.cells.get(key)?.cell;
    const stop = cell(this.#current ?? []) ?? this.#sheet.querySelector('.cell');
    const chosen = cell(this.#selected) ?? (this.#selected[1] === undefined ? this.#tiles.get(this.#selected[0])?.tile : undefined);
    if (this.#stop !== stop) {
      if (this.#stop) this.#stop.tabIndex = -1;
      if (stop) stop.tabIndex = 0;
      this.#stop = stop;
    }
    if (this.#chosen !== chosen) {
      this.#chosen?.classList.remove('selected');
      chosen?.classList.add('selected');
      this.#chosen = chosen;
    }
  }

  #enter(name, key) {
    this.#current = [name, key];
    this.#tabStop();
  }

  // focus puts the focus on a cell, which it brings in sight, or on the one that had it last.
  focus(name = this.#current?.[0], key = this.#current?.[1]) {
    if (!this.#where.has(name)) {
      const items = this.#rows.flatMap((r) => r.items ?? []);
      const first = (items.find((i) => i.node.devices.length) ?? items[0])?.node;
      [name, key] = [first?.name, first?.devices[0]?.key];
    }
    if (name === undefined) return;
    const row = this.#rows[this.#where.get(name)[0]];
    if (row.y < this.#root.scrollTop) this.#root.scrollTop = row.y - this.#size.gap;
    else if (row.y + row.height > this.#root.scrollTop + this.#root.clientHeight) {
      this.#root.scrollTop = row.y + row.height + this.#size.gap - this.#root.clientHeight;
    }
    this.draw();
    const t = this.#tiles.get(name);
    ((t?.cells.get(key) ?? t?.cells.values().next().value)?.cell ?? t?.title)?.focus({preventScroll: true});
  }

  #click(e) {
    const name = e.target.closest('.tile')?.dataset.node;
    if (e.target.closest('.cell')) this.#open(name, e.target.closest('.cell').dataset.key);
    else if (e.target.closest('.name')) this.#open(name);
  }

  #key(e) {
    const cell = e.target.closest('.cell');
    if (!cell || e.ctrlKey || e.metaKey || e.altKey) return;
    const name = cell.closest('.tile').dataset.node;
    const [row, column] = this.#where.get(name) ?? [];
    if (row === undefined) return;
    const to = this.#beside(e.key, row, column, this.#rows[row].items[column].node, cell.dataset.key);
    if (!to) return;
    e.preventDefault();
    this.focus(to.node.name, to.key);
  }

  // beside returns the device that a key leads to, past nodes without devices. In details devices of a node are below each other,
  // else beside each other.
  #beside(key, row, column, node, device) {
    const at = node.devices.findIndex((d) => d.key === device);
    const along = this.#size === dense ? ['ArrowLeft', 'ArrowRight'] : ['ArrowUp', 'ArrowDown'];
    const devices = (n, i) => n?.devices[Math.min(i < 0 ? n.devices.length - 1 : i, n.devices.length - 1)];
    const all = this.#rows.flatMap((r, row) => (r.items ?? []).map((item, column) => ({node: item.node, row, column})))
      .filter((n) => n.node.devices.length);
    const here = all.findIndex((n) => n.row === row && n.column === column);
    const beside = (step) => all[here + step]?.node;
    const above = (step) => {
      const next = step > 0 ? all.find((n) => n.row > row) : all.findLast((n) => n.row < row);
      const distance = (n) => Math.abs(n.column - column);
      return next && all.filter((n) => n.row === next.row).reduce((a, b) => (distance(b) < distance(a) ? b : a)).node;
    };
    switch (key) {
      case along[0]: return node.devices[at - 1] ?? devices(this.#size === dense ? beside(-1) : above(-1), -1);
      case along[1]: return node.devices[at + 1] ?? devices(this.#size === dense ? beside(1) : above(1), 0);
      case 'ArrowLeft': return devices(beside(-1), at);
      case 'ArrowRight': return devices(beside(1), at);
      case 'ArrowUp': return devices(above(-1), at);
      case 'ArrowDown': return devices(above(1), at);
      case 'Home': return devices(all[0]?.node, 0);
      case 'End': return devices(all.at(-1)?.node, -1);
    }
    return undefined;
  }
}
