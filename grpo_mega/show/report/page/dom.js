// Small helpers. Text of a run only ever becomes a text node: nothing here reads HTML.

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, '');
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child != null && child !== ''));
  return element;
}

// Data from JSON. Its objects have no names but their own: `curves.constructor` is a metric of that name, or undefined.
const parsed = (text) => JSON.parse(text, (_, value) => (value && typeof value === 'object' && !Array.isArray(value) ? Object.assign(Object.create(null), value) : value));

// Text that a run gives, on its own: its direction does not change that of what is around it.
const foreign = (text) => make('bdi', { dir: 'auto' }, printable(text));

// The name of a metric, which breaks after its parts where there is no room.
const breakable = (name) => make('bdi', {}, printable(name).split(/(?<=[/_])/).flatMap((part) => [part, make('wbr')]));

// Control characters, and marks that turn the direction of text, as the symbols or code points that stand for them.
function printable(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (found) => {
    const code = found.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `[U+${code.toString(16).toUpperCase().padStart(4, '0')}]`;
  });
}

// Words of the table of metrics, in which `code` stands between backticks and links have the form of Markdown.
function coded(text) {
  return text.replace(/\[([^\]]+)\]\([^)]*\)/g, '$1').split('`').map((part, index) => (index % 2 ? make('code', {}, part) : part));
}

function short(value) {
  if (value == null || !Number.isFinite(value)) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-3) return value.toExponential(2).replace('e+', 'e');
  if (size >= 1000) return Math.round(value).toLocaleString('en');
  return String(Number(value.toPrecision(4)));
}

const signed = (value) => (value > 0 ? '+' : '') + short(value).replace('-', '−');
const plural = (count, word) => `${count.toLocaleString('en')} ${word}${count === 1 ? '' : 's'}`;
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function section(id, title, ...children) {
  return make('section', { id, 'aria-labelledby': `${id}-title` }, make('h2', { id: `${id}-title` }, title), ...children);
}

function choice(label, options, chosen, onchange, wide) {
  const select = make('select', { onchange: () => onchange(select.value) },
    options.map(([value, text]) => make('option', { value, selected: String(value) === String(chosen) }, printable(text))));
  return make('label', { class: wide ? 'wide' : '' }, label, select);
}

function table(caption, heads, rows) {
  return make('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption },
    make('table', {}, make('caption', {}, caption), make('thead', {}, make('tr', {}, heads.map((head) => make('th', { scope: 'col' }, head)))),
      make('tbody', {}, rows.map((row) => make('tr', {}, row.map((cell, column) =>
        column ? make('td', {}, cell) : make('th', { scope: 'row' }, cell)))))));
}
