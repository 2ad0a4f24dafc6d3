// The other sections: the summary, where the time goes, problems followed over training, settings, and the comparison.

function tile(value, label) {
  return make('div', { class: 'card tile' }, make('div', { class: 'value' }, value), make('div', { class: 'small soft' }, label));
}

const percentage = (value) => (value == null ? '–' : `${Number((100 * value).toFixed(1))}%`);
const seconds = (value) => (value < 60 ? `${short(value)} s` : value < 3600 ? `${Math.round(value / 60)} min` : `${short(value / 3600)} h`);

function notes(run) {
  if (!run.missing.length && !run.damaged.length) return '';
  const lines = [...run.missing, ...run.damaged, run.damaged_more ? `${plural(run.damaged_more, 'more line')} cannot be read` : ''].filter(Boolean);
  return make('div', { class: 'note', role: 'note' }, make('p', {}, make('strong', {}, 'This run directory is not whole.'), ' What is there is shown.'),
    make('ul', {}, lines.map((line) => make('li', { class: 'small' }, foreign(line)))));
}

function alarmList(alarms) {
  const rose = alarms.filter((alarm) => !alarm.cleared);
  if (!rose.length) return '';
  const over = (alarm) => alarms.find((one) => one.cleared && one.name === alarm.name && one.step >= alarm.step);
  return make('div', { class: 'note', id: 'alarms' }, make('p', {}, make('strong', {}, plural(rose.length, 'alarm'))),
    make('ul', {}, rose.slice(0, 100).map((alarm) => make('li', {}, make('strong', {}, `Step ${alarm.step}: `, foreign(alarm.name)), ' ', foreign(alarm.message || ''), ' ',
      alarm.action ? make('em', {}, foreign(alarm.action)) : '', over(alarm) ? ` Over at step ${over(alarm).step}.` : '')),
    rose.length > 100 ? make('li', {}, `${plural(rose.length - 100, 'later one')} in alarms.jsonl.`) : ''));
}

function summarySection(run) {
  const results = run.results, tiles = [];
  const add = (name, label, words = short) => { if (results[name] != null) tiles.push(tile(words(results[name]), label)); };
  const written = run.score ? short : percentage, measured = `held-out ${run.score || 'accuracy'}`;
  if (results.held_out_accuracy_before != null) tiles.push(tile(`${written(results.held_out_accuracy_before)} → ${written(results.held_out_accuracy_after)}`, `${measured}, before → after`));
  else add('eval/heldout/accuracy', measured, written);
  add('reward/mean', 'reward of the last step');
  add('rollout/length_mean', 'tokens a completion, last step');
  if (results.seconds) tiles.push(tile(seconds(results.seconds), 'wall time'));
  add('machine/tokens_per_second', 'tokens a second, last step');
  return make('section', { id: 'summary', 'aria-labelledby': 'summary-title', style: 'padding-top:0' },
    make('p', { class: 'eyebrow' }, foreign(run.name)), make('h1', { id: 'summary-title' }, printable(run.headline)),
    run.sentences.map((sentence, index) => make('p', { class: index ? '' : 'lead' }, foreign(sentence))),
    make('div', { class: 'tiles' }, tiles), alarmList(run.alarms), notes(run));
}

// What bounds a step, from the traces of its ranks: a bar for each part, which begins where the one before ends.
function tracedSteps(traced) {
  if (!traced) return null;
  const whole = traced.parts.reduce((sum, { seconds }) => sum + seconds, 0) || 1;
  let before = 0;
  const rows = traced.parts.map(({ name, seconds: spent, share }, index) => {
    const bar = make('span', { 'aria-hidden': 'true', style: `display:block;height:.7rem;min-width:2px;background:${colour(index)};margin-left:${(100 * before) / whole}%;width:${(100 * spent) / whole}%` });
    before += spent;
    return [foreign(name), seconds(spent), percentage(share), make('span', { style: 'display:block;min-width:8rem' }, bar)];
  });
  return make('div', { class: 'card' }, make('p', {}, printable(traced.words)), table(traced.about, ['Part of a step', 'Time', 'Share', 'In a step'], rows));
}

// What the planner expected of some steps, beside what they took.
function plannedSteps(planned) {
  if (!planned) return null;
  const [expected, most] = planned.memory, gigabytes = (bytes) => `${short(bytes / 1e9)} GB`, told = (words) => (value) => (value == null ? '–' : words(value));
  const rows = planned.rows.map(([phase, ...times]) => [foreign(phase), ...times.map(told(seconds))]);
  return make('div', { class: 'card' }, table(planned.title, ['Phase', 'Planned', 'Measured'], most == null ? rows : [...rows, ['memory', ...[expected, most].map(told(gigabytes))]]));
}

function timeSection(run) {
  const { phases, apart, bars, words, traced } = run.time, names = Object.keys(phases);
  if (!names.length) return null;
  const total = names.reduce((sum, name) => sum + phases[name], 0), highest = Math.max(...bars.map((bar) => bar.seconds.reduce((a, b) => a + b, 0)));
  const longest = Math.max(...bars.map((bar) => bar.steps));
  const paint = (index) => make('span', { class: 'dot', 'data-colour': index, style: `background:${colour(index)}` });
  const part = (index, style) => make('span', { 'data-colour': index, style: `display:block;background:${colour(index)};${style}` });
  const rows = [...names.map((name, index) => [make('span', {}, paint(index), foreign(name)), seconds(phases[name]), total ? percentage(phases[name] / total) : '–']),
    ...Object.entries(apart).map(([name, value]) => [make('span', {}, foreign(name), make('span', { class: 'soft small' }, ' (between steps)')), seconds(value), ''])];
  return section('time', 'Where the time goes', make('p', { class: 'soft' }, printable(words)),
    make('div', { class: 'card' },
      make('div', { class: 'stack', role: 'img', 'aria-label': `Shares of the steps' time: ${names.map((name) => `${printable(name)} ${percentage(phases[name] / (total || 1))}`).join(', ')}` }, names.map((name, index) => part(index, `flex:${phases[name] / (total || 1)} 1 0`))),
      table('Seconds of all steps, by phase', ['Phase', 'Time', 'Share'], rows),
      make('div', { class: 'bars', 'aria-hidden': 'true' }, bars.map((bar) => make('div', {}, bar.seconds.map((value, index) => part(index, `height:${(9 * value) / (highest || 1)}rem`))))),
      make('div', { class: 'axis small soft' }, make('span', {}, `step ${bars[0].first}`), make('span', {}, `seconds of a step by phase${longest > 1 ? `, means over ${longest} steps a bar` : ''}; the highest bar is ${short(highest)} s`), make('span', {}, `step ${bars[bars.length - 1].last}`))),
    plannedSteps(run.planned), tracedSteps(traced));
}

function followedSection(run) {
  const { steps, files, groups_left_out: leftOut } = run.followed;
  const problems = [...new Map(steps.flatMap(({ groups }) => groups.map((group) => [group.prompt_id, group.prompt]))).entries()];
  if (!problems.length) return null;
  const single = steps.every(({ groups }) => groups.every((group) => group.samples.length === 1)); // side by side
  const body = make('div', { class: single ? 'grid' : '' });
  const asked = make('p', { dir: 'auto' });
  const show = (id) => { asked.replaceChildren(printable(problems.find(([own]) => own === id)[1])); body.replaceChildren(...steps.map(({ step, groups }) => ({ step, group: groups.find((one) => one.prompt_id === id) })).filter(({ group }) => group).map(({ step, group }) =>
    make('article', { class: 'card', style: single ? '' : 'margin-bottom:1rem', 'aria-label': `Step ${step}` }, make('h3', {}, `Step ${step}`), make('p', { class: 'small soft' }, groupWords(group)),
      make('div', { class: 'grid completions', style: 'margin-bottom:0' }, group.samples.map((sample, index) => make('div', { class: 'completion' },
        make('div', {}, make('strong', {}, sample.reward == null ? 'no reward' : `reward ${short(sample.reward)}`), ' ', make('span', { class: 'small soft' }, Object.entries(sample.terms).map(([name, value]) => `${printable(name)} ${short(value)}`).join(' · '))),
        make('div', { class: 'text code', dir: 'auto', tabindex: 0, role: 'textbox', 'aria-readonly': 'true', 'aria-label': `Completion ${index + 1} at step ${step}` }, printable(sample.text)))))))); };
  show(problems[0][0]);
  return section('followed', 'The same problems over training', make('p', { class: 'soft' }, 'Validation problems that were answered again at every evaluation.'),
    boundedNote(steps.length, files, leftOut, 'evaluation'),
    make('div', { class: 'bar' }, choice('Problem', problems.map(([id, prompt]) => [id, prompt.slice(0, 120)]), problems[0][0], show, true)), asked, body);
}

function settingsSection(run) {
  return section('settings', 'What was run',
    make('dl', { class: 'facts' }, run.facts.flatMap(([name, value]) => [make('dt', {}, name), make('dd', {}, foreign(value))])),
    run.settings.length ? make('details', {}, make('summary', {}, make('h3', {}, `${plural(run.settings.length, 'setting')} with another value than the schema's default`)),
      table('Settings', ['Setting', 'Value', 'Default'], run.settings.map(([name, value, usual]) => [foreign(name), make('code', {}, foreign(value)), make('code', { class: 'soft' }, foreign(usual))]))) : '');
}

function comparisonSection(data) {
  const { runs } = data, groups = families(runs);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.results)))];
  const value = (family, name) => {
    const own = known(family.runs.map((run) => run.results[name]));
    if (!own.length) return '–';
    return Math.max(...own) > Math.min(...own) ? `${short(meanOf(own))} (${short(Math.min(...own))} to ${short(Math.max(...own))}, ${plural(own.length, memberOf(family))})` : short(own[0]);
  };
  return make('section', { id: 'comparison', 'aria-labelledby': 'comparison-title', style: 'padding-top:0' },
    make('p', { class: 'eyebrow' }, 'Comparison'), make('h1', { id: 'comparison-title' }, `${plural(runs.length, 'run')} side by side`),
    make('ul', {}, runs.map((run) => make('li', {}, make('strong', {}, foreign(run.name)), ': ', foreign(run.headline)))),
    groups.some((family) => family.runs.length > 1) ? make('p', { class: 'soft' }, 'Runs whose settings differ in nothing but the seed are one line: their mean, in the band from the lowest to the highest.') : '',
    table('Results', ['Result', ...groups.map((family) => foreign(family.name))], names.map((name) => [foreign(name), ...groups.map((family) => value(family, name))])),
    data.differing.length ? table('Settings in which the runs differ', ['Setting', ...runs.map((run) => foreign(run.name))], data.differing.map(([name, values]) => [foreign(name), ...values.map((one) => make('code', {}, foreign(one)))])) : make('p', {}, 'The runs have the same settings.'),
    runs.map((run) => (run.missing.length || run.damaged.length ? make('div', {}, make('h2', {}, foreign(run.name)), notes(run)) : '')));
}
