// The page: the stream of the server into the model, the model into picture, panel and header.

import {el, set} from './dom.js';
import {Model} from './model.js';
import {Grid} from './grid.js';
import {Side, link} from './side.js';

const $ = (id) => document.getElementById(id);
const model = new Model();
const grid = new Grid($('grid'), $('sheet'), (node, key) => {
  location.hash = key === undefined ? link.node(node) : link.device(node, key);
});
const side = new Side($('side'), model);
let connected = 'connecting', complete = false, pending = false, partly = 0;

// refresh draws before the next frame, once for all that changes until then. While a large cluster
// arrives, a part of it is drawn now and then.
function refresh() {
  if (pending || (!complete && partly > performance.now())) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    performance.mark('draw-begins');
    draw();
    performance.measure(complete ? 'drawn' : 'drawn-in-part', 'draw-begins');
    partly = performance.now() + 1000;
  });
}

function draw() {
  header();
  const groups = model.visible();
  const shown = groups.reduce((n, g) => n + g.nodes.length, 0);
  grid.prefix = model.prefix;
  grid.show(groups, $('view').value);
  set($('count'), model.filtered ? `${shown} of ${model.nodes.size} nodes` : '');
  $('clear').hidden = !model.filtered;
  set($('empty'), empty(shown));
  side.update();
}

// empty is what stands in the place of a picture without nodes.
function empty(shown) {
  if (shown > 0) return '';
  if (model.nodes.size > 0) return 'No device matches.';
  if (connected === 'connecting') return 'Connecting …';
  if (model.status.reading) return `Reading the cluster … (${model.status.reading})`;
  if (!complete) return 'Reading the cluster …';
  if (model.status.notes?.length) return 'Nothing to show with your permissions.';
  return 'No node publishes devices that Divvy shares. To find out why, run: kubectl divvy doctor';
}

const percent = (part, of) => (of > 0 ? `${Math.round(part / of * 100)}%` : '–');

function header() {
  const s = model.sums();
  const wanted = [['Nodes', s.nodes], ['Devices', s.devices], ['Allocated', percent(s.allocated, s.devices)],
    ...(s.measured ? [['In use', percent(s.used, s.measured)]] : []), ['Without pods', s.empty], ['Unhealthy', s.bad, s.bad > 0],
    ['Waiting pods', model.waiting?.total, model.waiting?.total > 0]];
  const sums = $('sums');
  if (sums.children.length !== wanted.length) sums.replaceChildren(...wanted.map(() => el('div', {}, el('dt'), el('dd'))));
  wanted.forEach(([name, value, warn], i) => {
    const pair = sums.children[i];
    set(pair.firstChild, name);
    set(pair.lastChild, connected === 'connecting' || model.status.reading ? '–' : value ?? '–');
    pair.classList.toggle('warn', Boolean(warn));
  });
  set($('cluster'), model.status.cluster ?? '');
  set($('live'), {connecting: 'connecting', live: model.status.reading ? 'reading' : model.status.stale ? 'old' : 'live', lost: 'not connected'}[connected]);
  $('live').dataset.state = model.status.stale ? 'lost' : model.status.reading ? 'connecting' : connected;
  document.title = model.status.cluster ? `Divvy · ${model.status.cluster}` : 'Divvy';
  const notes = [...(model.status.notes ?? []), model.status.stale,
    connected === 'lost' &&
      'kubectl divvy ui does not answer: it has ended, this page is open too often, or your session is another one.'].filter(Boolean);
  if ($('notes').dataset.text !== notes.join('\n')) {
    $('notes').dataset.text = notes.join('\n');
    $('notes').replaceChildren(...notes.map((t) => el('li', {}, t)));
  }
  $('legend-use').hidden = $('legend-over').hidden = !model.status.usage;
  for (const [id, names] of Object.entries(model.choices())) {
    const select = $(id);
    if (select.dataset.text === names.join('\n')) continue;
    select.dataset.text = names.join('\n');
    const value = select.value;
    const all = value && !names.includes(value) ? [value, ...names] : names; // a filter does not end by itself
    select.replaceChildren(el('option', {value: ''}, 'all'), ...all.map((n) => el('option', {value: n}, n)));
    select.value = value;
  }
}

function connect() {
  const stream = new EventSource('api/stream');
  const on = (name, take) => stream.addEventListener(name, (e) => {
    take(JSON.parse(e.data));
    refresh();
  });
  stream.onopen = () => model.begin();
  stream.onerror = () => {
    connected = 'lost';
    refresh();
    // The browser tries again by itself, unless the server has refused.
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 10000);
  };
  on('status', (s) => { model.status = s; connected = 'live'; });
  on('nodes', (nodes) => model.take(nodes));
  on('gone', (names) => model.gone(names));
  on('waiting', (w) => { model.waiting = w; });
  on('complete', () => { complete = true; model.complete(); });
}

for (const id of ['text', 'resource', 'namespace', 'state', 'group', 'sort', 'view']) {
  $(id).addEventListener('input', (e) => {
    if (id !== 'view') model.set(id, e.target.value);
    refresh();
  });
}
$('tools').addEventListener('submit', (e) => e.preventDefault());
$('clear').addEventListener('click', () => {
  for (const id of ['text', 'resource', 'namespace', 'state']) {
    $(id).value = '';
    model.set(id, '');
  }
  refresh();
  $('text').focus();
});

function follow() {
  const [kind, a, b] = side.go(location.hash);
  grid.select(...(kind === 'device' ? [a, b] : kind === 'node' ? [a] : []));
}
addEventListener('hashchange', follow);
new ResizeObserver(refresh).observe($('grid'));

// open follows a link at once, so that the next key finds the new panel.
function open(hash) {
  location.hash = hash;
  follow();
}

document.addEventListener('keydown', (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  const typing = ['INPUT', 'SELECT'].includes(e.target.tagName);
  const waiting = () => $('side').querySelector('a')?.focus();
  if (e.key === 'Escape') {
    const was = location.hash;
    if (typing) grid.focus();
    else if (was.length > 1) {
      open('');
      if (was.startsWith('#pod')) waiting();
      else grid.focus();
    }
  } else if (e.key === '/' && !typing) {
    $('text').focus();
    $('text').select();
  } else if (e.key === 'w' && !typing) {
    open('');
    waiting();
  } else return;
  e.preventDefault();
});

follow();
connect();
