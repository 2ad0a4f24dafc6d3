// What machines did: who had the devices, rank by rank, and the load of the experts over the steps.

const maps = []; // what draws them anew, in the colours of the theme

function devicesSection(run) {
  const devices = run.devices;
  if (!devices) return null;
  const { phases, lanes, seconds: whole, most_gb: most } = devices, at = (time) => `${Number(((100 * time) / whole).toFixed(3))}%`;
  const owners = { engine: 'engine', change: 'changes hands', trainer: 'trainer' };
  const paint = (index) => make('span', { class: 'dot', 'data-colour': index, style: `background:${colour(index)}` });
  const curve = (memory, kind) => (memory.length && most ? make('div', { class: `memory ${kind}`, 'aria-hidden': 'true' }, memory.map(([time, held], index) =>
    make('i', { style: `left:${at(time)};width:${at((memory[index + 1] || [whole])[0] - time)};height:${(100 * held) / most}%` }))) : '');
  const row = ({ rank, spans, seconds: spent, memory, engine_memory: engine }) => {
    const said = phases.map(({ name }, index) => `${printable(name)} ${seconds(spent[index])}`).join(', ');
    return make('div', { class: 'lane' }, make('p', { class: 'small soft' }, `rank ${rank}`),
      make('div', { class: 'spans', role: 'img', 'aria-label': `Rank ${rank}: ${said}` }, spans.map(([begin, end, index]) =>
        make('i', { 'data-colour': index, title: `${printable(phases[index].name)}, ${seconds(end - begin)}`, style: `left:${at(begin)};width:${at(end - begin)};background:${colour(index)}` }))),
      curve(memory, 'own'), curve(engine, 'of-engine'));
  };
  const engines = lanes.some(({ engine_memory: engine }) => engine.length);
  const highest = (memory) => (memory.length ? `${short(Math.max(...memory.map(([, held]) => held)))} GB` : '–');
  return section('devices', devices.shared ? 'Who had the devices' : 'What the ranks did', make('p', { class: 'soft' }, devices.shared
    ? 'Trainer and engines take turns: while the engines generate the trainer waits and, on GPUs that they share, has left.'
    : 'The engine generates with the trainer\'s own weights: no device changes hands.'),
    make('div', { class: 'card' }, make('ul', { class: 'legend' }, phases.map(({ name, owner }, index) => make('li', {}, paint(index), foreign(name), devices.shared ? make('span', { class: 'soft' }, ` (${owners[owner]})`) : ''))),
      make('div', { class: 'lanes' }, lanes.map(row),
        make('div', { class: 'steps small soft', 'aria-hidden': 'true' }, devices.steps.map(([step, begin]) => make('span', { style: `left:${at(begin)}` }, `step ${step}`)))),
      make('p', { class: 'small soft' }, `${devices.ranks > lanes.length ? `${lanes.length} of ${devices.ranks} ranks, evenly spread. ` : ''}${seconds(whole)} from left to right. Below each rank the memory of its process, ${engines ? `and below that the memory of its engine, measured whenever the device changes hands; at most ${short(most)} GB.` : `at most ${short(most)} GB; an engine's own is not in it.`}${devices.left_out ? ` ${plural(devices.left_out, 'phase')} too short to be seen ${devices.left_out === 1 ? 'is' : 'are'} left out.` : ''}`),
      table('Seconds of each rank', ['Rank', ...phases.map(({ name }) => foreign(name)), 'Memory', ...(engines ? ['Of its engine'] : [])], lanes.map((lane) => [`rank ${lane.rank}`, ...lane.seconds.map(seconds), highest(lane.memory), ...(engines ? [highest(lane.engine_memory)] : [])]))));
}

function expertsSection(run) {
  const found = run.experts;
  if (!found) return null;
  const { steps, layers, recorded, others, each, room } = found, last = steps.length - 1;
  const unlike = others ? ` ${plural(others, 'line')} of experts.jsonl ${others === 1 ? 'is' : 'are'} of another model, or damaged, and left out.` : '';
  if (!steps.length) return section('experts', 'The load of the experts', make('p', { class: 'note' }, each > room
    ? `A step has the loads of ${plural(each, 'expert')}, and this page room for ${plural(room, 'number')} of each of its runs: they are left out. The page of this run alone, or of fewer runs, has them; all are in experts.jsonl.${unlike}`
    : `No load can be read.${unlike}`));
  const busiest = (loads) => steps.map((_, at) => loads.reduce((most, own) => Math.max(most, own[at]), 0));
  const all = layers.map(({ layer, loads }) => ({ name: `layer ${layer}`, values: busiest(loads), of: 'its busiest expert' }));
  const rowsOf = (layer) => layers.find((one) => String(one.layer) === layer).loads.map((values, index) => ({ name: `expert ${index}`, values, of: '' }));
  const body = make('div');
  const show = (chosen) => body.replaceChildren(heatmap(chosen === 'all' ? all : rowsOf(chosen), steps, chosen === 'all' ? 'the busiest expert of each layer' : `each expert of layer ${chosen}`));
  maps.length = 0;
  show('all');
  const times = (percent) => `${short(percent / 100)}`;
  const ends = ({ loads }) => { const now = loads.map((own) => own[last]), most = Math.max(...now), least = Math.min(...now); return [`${times(most)} (expert ${now.indexOf(most)})`, `${times(least)} (expert ${now.indexOf(least)})`]; };
  return section('experts', 'The load of the experts', make('p', { class: 'soft' }, 'Tokens of an expert over those of the average expert of its layer, in the last update of a step: 1 is balanced, 0 an expert that nobody asks.',
    recorded > steps.length ? ` ${steps.length} of ${recorded} recorded steps are shown, evenly spread.` : '', unlike),
    make('div', { class: 'bar' }, choice('Layer', [['all', 'all: the busiest expert of each'], ...layers.map(({ layer, loads }) => [String(layer), `layer ${layer}: ${plural(loads.length, 'expert')}`])], 'all', show, true)),
    make('div', { class: 'card' }, body),
    make('details', {}, make('summary', {}, make('h3', {}, `Step ${steps[last]} in numbers`)),
      table('Busiest and idlest expert of each layer', ['Layer', 'Busiest', 'Idlest'], layers.map((one) => [`layer ${one.layer}`, ...ends(one)]))));
}

// A cell for each row and step; darker is more, white nothing. Arrow keys read single cells.
function heatmap(rows, steps, what) {
  const height = Math.max(3, Math.min(18, Math.floor(420 / rows.length))), most = Math.max(200, ...rows.map(({ values }) => Math.max(...values)));
  const canvas = make('canvas', { 'aria-hidden': 'true', style: `width:100%;height:${height * rows.length}px;display:block` });
  const read = make('p', { class: 'read small soft', 'aria-live': 'polite' });
  const plot = make('div', { class: 'map', tabindex: 0, role: 'img', 'aria-label': `Load of ${what}, from step ${steps[0]} to ${steps[steps.length - 1]}. Arrow keys read single cells.` }, canvas);
  let at = [rows.length ? 0 : -1, -1];
  const draw = () => {
    canvas.width = steps.length; canvas.height = rows.length;
    const context = canvas.getContext('2d'), tint = variable('--seq');
    context.clearRect(0, 0, steps.length, rows.length);
    rows.forEach(({ values }, y) => values.forEach((value, x) => { context.fillStyle = `rgba(${tint}, ${Math.min(1, value / most)})`; context.fillRect(x, y, 1, 1); }));
  };
  const tell = (y, x) => {
    at = [Math.max(0, Math.min(rows.length - 1, y)), Math.max(0, Math.min(steps.length - 1, x))];
    const { name, values, of } = rows[at[0]];
    read.textContent = `Step ${steps[at[1]]} · ${name} · ${of ? `${of} ` : ''}${short(values[at[1]] / 100)} times the average`;
  };
  plot.addEventListener('pointermove', (event) => { const box = canvas.getBoundingClientRect(); tell(Math.floor(((event.clientY - box.top) / box.height) * rows.length), Math.floor(((event.clientX - box.left) / box.width) * steps.length)); });
  plot.addEventListener('keydown', (event) => {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    tell(at[0] + (at[1] < 0 ? 0 : move[0]), at[1] < 0 ? steps.length - 1 : at[1] + move[1]);
  });
  draw();
  maps.push(draw);
  const ramp = make('span', { class: 'ramp', 'aria-hidden': 'true', style: 'background:linear-gradient(to right, transparent, rgb(var(--seq)))' });
  return make('div', {}, plot, make('div', { class: 'axis small soft' }, make('span', {}, `step ${steps[0]}`), make('span', {}, '0', ramp, `${short(most / 100)} times the average`), make('span', {}, `step ${steps[steps.length - 1]}`)), read);
}
