// Building of elements. Text from the cluster gets here as text alone: nothing is parsed as markup, and
// the policy of the server (trusted-types 'none') makes the browser refuse it as well.

// Characters that control the layout of text, such as those that reverse its direction, are shown as such.
const controls = /[\p{Cc}\p{Cf}\p{Co}\p{Zl}\p{Zp}]/gu;
export const clean = (text) => String(text).replace(controls, '\ufffd');

// el('a.quiet', {href: '#'}, 'text', child): children are strings or elements; empty ones are left out.
export function el(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split('.');
  const e = document.createElement(tag);
  if (classes.length) e.className = classes.join(' ');
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) e.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) e.setAttribute(name, value === true ? '' : clean(value));
  }
  e.append(...children.flat().filter((c) => c !== undefined && c !== null && c !== '' && c !== false)
    .map((c) => (c instanceof Node ? c : clean(c))));
  return e;
}

// set changes the text of an element only if it differs, so that nothing is laid out again for nothing.
export function set(e, text) {
  const now = clean(text);
  if (e.textContent !== now) e.textContent = now;
}

export const count = (n, noun) => `${n} ${noun}${n === 1 ? '' : 's'}`;

// age is how long ago something was: a text, or seconds since 1970.
export function age(since) {
  const s = Math.max(0, Date.now() / 1000 - (typeof since === 'number' ? since : Date.parse(since) / 1000));
  if (s < 60) return `${Math.floor(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`;
  return `${Math.floor(s / 86400)} d`;
}

export function bytes(n) {
  if (n === undefined || n === null) return 'unknown';
  return n < 2 ** 30 ? `${Math.ceil(n / 2 ** 20)} MiB` : `${(n / 2 ** 30).toFixed(1)} GiB`;
}
