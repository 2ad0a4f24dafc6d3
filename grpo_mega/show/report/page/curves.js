// Curves: one canvas each, drawn when it comes into sight. Several runs lie over each other; runs that differ in the seed
// alone are one line, their mean, in the band from the lowest to the highest.

const COLOURS = { light: ['#2f5bd0', '#c2410c', '#0f766e', '#9333ea', '#a16207', '#be185d'], dark: ['#8fb0ff', '#ff9d5c', '#4fd1c0', '#c99bff', '#e5c04b', '#ff8ac0'] };
const theme = () => document.documentElement.dataset.theme;
const colour = (index) => COLOURS[theme()][index % 6];
const charts = [];

// [{name, runs}]: runs whose settings are the same but for seed, name and folder are one.
function families(runs) {
  const found = new Map();
  for (const run of runs) {
    const key = Object.keys(run.alike).length > 3 ? JSON.stringify(run.alike) : run.name;
    if (!found.has(key)) found.set(key, { runs: [] });
    found.get(key).runs.push(run);
  }
  return [...found.values()].map((family) => ({ ...family,
    name: family.runs.length > 1 ? `${family.runs[0].name} and ${plural(family.runs.length - 1, `other ${memberOf(family)}`)}` : family.runs[0].name }));
}

// What the runs of a family are: seeds, unless two of them have the same.
const memberOf = ({ runs }) => (new Set(runs.map((run) => run.seed)).size === runs.length ? 'seed' : 'run');

// Steps, mean, lowest and highest of a family's curve of a metric; null without one.
function curveOf(family, name) {
  const own = family.runs.filter((run) => run.curves[name]);
  if (!own.length) return null;
  const steps = [...new Set(own.flatMap((run) => run.axes[run.curves[name].axis]))].sort((a, b) => a - b);
  const lines = own.map((run) => {
    const { axis, mean, low, high } = run.curves[name];
    const [middle, lowest, highest] = [mean, low.length ? low : mean, high.length ? high : mean].map((values) => valuesAt(steps, run.axes[axis], values));
    return { middle, lowest, highest };
  });
  const across = (part, fold) => steps.map((step, index) => fold(known(lines.map((line) => line[part][index]))));
  return { steps, mean: across('middle', meanOf), low: across('lowest', (values) => Math.min(...values)), high: across('highest', (values) => Math.max(...values)),
    band: own.length > 1 || own[0].curves[name].low.length > 0 };
}

// The values of a curve at all of these steps, in order: on the line between its points, null before the first and after
// the last. Runs of unequal length are thinned to unequal steps, and a mean needs all runs at each.
function valuesAt(steps, own, values) {
  let after = 0;
  return steps.map((step) => {
    while (after < own.length && own[after] < step) after += 1;
    if (own[after] === step) return values[after];
    if (after === 0 || after === own.length) return null;
    const share = (step - own[after - 1]) / (own[after] - own[after - 1]);
    return values[after - 1] * (1 - share) + values[after] * share;
  });
}

function chart(metric, groups, runs) {
  const lines = groups.map((family, index) => ({ family, index, curve: curveOf(family, metric.name) })).filter((line) => line.curve);
  const unit = metric.unit ? ` ${metric.unit}` : '';
  const ends = lines.map(({ curve }) => curve.mean[curve.mean.length - 1]);
  const thinned = Math.max(...runs.filter((run) => run.curves[metric.name]).map((run) => run.curves[metric.name].per_point));
  const better = { up: 'Higher is better.', down: 'Lower is better.' }[metric.good] || '';
  const words = lines.map(({ family, curve }) => `${printable(family.name)}: ${short(curve.mean[0])} at step ${curve.steps[0]}, ${short(curve.mean[curve.mean.length - 1])} at step ${curve.steps[curve.steps.length - 1]}`).join('; ');
  const plot = make('div', { class: 'plot', tabindex: 0, role: 'img', 'aria-label': `${printable(metric.name)}. ${words}. Arrow keys read single steps.` });
  const read = make('p', { class: 'read small soft', 'aria-live': 'polite' });
  const card = make('article', { class: 'card chart', 'data-metric': metric.name },
    make('header', {}, make('h3', {}, breakable(metric.name)), make('span', { class: 'last' }, ends.length === 1 ? short(ends[0]) + unit : unit)),
    make('p', { class: 'small soft' }, coded([metric.meaning, better, metric.taken ? `(${metric.taken})` : ''].filter(Boolean).join(' '))), plot, read,
    thinned > 1 ? make('p', { class: 'small soft' }, `Each point is up to ${thinned} steps: line their mean, band from lowest to highest.`) : '');
  const entry = { card, plot, read, lines, unit, alarms: runs.filter((run) => run.curves[metric.name]?.last_stage).flatMap((run) => run.alarms), drawn: null };
  charts.push(entry);
  plot.addEventListener('keydown', (event) => readStep(entry, event));
  seen.observe(plot);
  return card;
}

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    const entry = charts.find((one) => one.plot === target);
    if (isIntersecting && entry && !entry.drawn) draw(entry);
  }
}, { rootMargin: '400px' });

const sized = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const entry = charts.find((one) => one.plot === target);
    if (entry?.drawn && target.clientWidth && Math.abs(entry.drawn.width - target.clientWidth) > 1) entry.drawn.setSize({ width: target.clientWidth, height: 190 });
  }
});

function draw(entry) {
  if (entry.drawn) entry.drawn.destroy();
  const data = uPlot.join(entry.lines.map(({ curve }) => [curve.steps, curve.mean, curve.low, curve.high]));
  const series = [{ label: 'step' }], bands = [];
  for (const { family, index, curve } of entry.lines) {
    const stroke = colour(index), at = series.length, few = curve.steps.length < 40;
    series.push({ label: printable(family.name), stroke, width: 2, spanGaps: true, points: { show: few, size: 5, fill: stroke } });
    for (const label of ['lowest', 'highest']) series.push({ label, show: curve.band, stroke: 'transparent', width: 0, spanGaps: true, points: { show: false } });
    if (curve.band) bands.push({ series: [at + 2, at + 1], fill: stroke + '33' });
  }
  const soft = variable('--soft'), line = variable('--line');
  const axis = { stroke: soft, font: '12px system-ui, sans-serif', grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1, size: 4 } };
  const all = entry.lines.flatMap(({ curve }) => [...curve.low, ...curve.high]);
  const low = Math.min(...all.slice(0, 1e5)), high = Math.max(...all.slice(0, 1e5));
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  entry.drawn = new uPlot({
    width: entry.plot.clientWidth || 300, height: 190, series, bands, legend: { show: false },
    scales: { x: { time: false }, y: { range: [low - room, high + room] } },
    axes: [{ ...axis, size: 26 }, { ...axis, size: 54, values: (u, ticks) => ticks.map((tick) => short(tick)) }],
    cursor: { y: false, drag: { setScale: false }, points: { size: 8 } },
    hooks: { setCursor: [(u) => tell(entry, u)], draw: [(u) => markAlarms(entry, u)] },
  }, data, entry.plot);
  sized.observe(entry.plot);
}

function markAlarms(entry, u) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = variable('--warn');
  ctx.setLineDash([4, 4]);
  for (const alarm of entry.alarms.filter((one) => !one.cleared)) {
    const x = u.valToPos(alarm.step, 'x', true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    ctx.beginPath(); ctx.moveTo(x - 5, bbox.top); ctx.lineTo(x + 5, bbox.top); ctx.lineTo(x, bbox.top + 8); ctx.fill();
  }
  ctx.restore();
}

function tell(entry, u) {
  const { idx } = u.cursor;
  if (idx == null) { entry.read.textContent = ''; return; }
  const step = u.data[0][idx];
  const values = entry.lines.map(({ family }, index) => {
    const [mean, low, high] = [1, 2, 3].map((offset) => u.data[3 * index + offset][idx]);
    const band = low != null && high > low ? ` (${short(low)} to ${short(high)})` : '';
    return mean == null ? '' : `${entry.lines.length > 1 ? `${printable(family.name)} ` : ''}${short(mean)}${entry.unit}${band}`;
  }).filter(Boolean);
  const alarms = entry.alarms.filter((alarm) => alarm.step === step && !alarm.cleared).map((alarm) => `alarm: ${printable(alarm.name)}`);
  entry.read.textContent = [`Step ${step}`, ...values, ...alarms].join(' · ');
}

function readStep(entry, event) {
  if (!entry.drawn) draw(entry);
  const u = entry.drawn, last = u.data[0].length - 1, now = u.cursor.idx ?? -1;
  const next = { ArrowRight: now + 1, ArrowLeft: now < 0 ? last : now - 1, Home: 0, End: last }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  const index = Math.max(0, Math.min(last, next));
  u.setCursor({ left: u.valToPos(u.data[0][index], 'x'), top: 40 });
}

// Before all sections are made anew.
function forgetCharts() {
  seen.disconnect();
  sized.disconnect();
  for (const entry of charts) entry.drawn?.destroy();
  charts.length = 0;
}

function redrawCharts(all) {
  for (const entry of charts) if (entry.plot.isConnected && (all || entry.drawn)) draw(entry);
}

function curvesSection(data) {
  const runs = data.runs, groups = families(runs), rooms = data.metrics;
  const table = new Map(rooms.flatMap((room) => room.metrics.map((metric) => [metric.name, metric])));
  if (!table.size) return null;
  const first = data.first.filter((name) => table.has(name)).map((name) => table.get(name));
  const important = make('div', { class: 'grid' }, first.map((metric) => chart(metric, groups, runs)));
  const others = rooms.map((room) => ({ room, own: room.metrics.filter((metric) => !data.first.includes(metric.name)) })).filter(({ own }) => own.length)
    .map(({ room, own }) => {
      const grid = make('div', { class: 'grid' });
      const folded = make('details', { ontoggle: () => { if (!grid.childElementCount) grid.append(...own.map((metric) => chart(metric, groups, runs))); } },
        make('summary', {}, make('h3', {}, `${room.title} (${own.length})`)), make('p', { class: 'small soft' }, coded(room.about)), grid);
      return folded;
    });
  const found = make('div', { class: 'grid' }), count = make('p', { class: 'small soft', role: 'status' });
  const rest = make('div', {}, important, ...others);
  const box = make('input', { type: 'search', placeholder: 'name or meaning', oninput: () => search() });
  function search() {
    const wanted = box.value.trim().toLowerCase();
    rest.hidden = Boolean(wanted);
    const hits = wanted ? [...table.values()].filter((metric) => `${metric.name} ${metric.meaning}`.toLowerCase().includes(wanted)) : [];
    found.replaceChildren(...hits.slice(0, 60).map((metric) => chart(metric, groups, runs)));
    count.textContent = wanted ? `${plural(hits.length, 'curve')} found${hits.length > 60 ? ', the first 60 are shown' : ''}` : '';
  }
  const thinned = runs.flatMap((run) => Object.values(run.curves)).filter((curve) => curve.per_point > 1);
  return section('curves', 'Curves',
    make('p', { class: 'soft' }, 'The most telling ones first. Point at a curve, or focus it and use the arrow keys, to read single steps. Dashed lines are alarms, which only the last stage has.'),
    thinned.length ? make('p', { class: 'note' }, `${plural(thinned.length, 'curve')} of up to ${plural(Math.max(...thinned.map((curve) => curve.count)), 'step')} are drawn with fewer points. Each of them says how many steps a point stands for; the extremes are in the bands.`) : '',
    groups.length > 1 ? make('ul', { class: 'legend' }, groups.map((family, index) => make('li', {}, make('span', { class: 'dot', 'data-colour': index, style: `background:${colour(index)}` }), foreign(family.name)))) : '',
    make('div', { class: 'bar' }, make('label', { class: 'wide' }, 'Find a metric', box)), count, found, rest);
}
