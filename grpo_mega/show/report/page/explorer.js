// The group explorer: the completions of one problem side by side, and what each of them gets for being better than the others.

function explorerSection(run) {
  const { steps, files, groups_left_out: leftOut } = run.samples;
  const usable = steps.filter((step) => step.groups.length);
  if (!usable.length) return section('completions', 'Completions', make('p', { class: 'soft' }, 'No completions of this run are recorded.'));
  const body = make('div'), controls = make('div', { class: 'bar' });
  const state = { step: usable.length - 1, group: 0, number: 'advantage' };
  state.group = mostTelling(usable[state.step].groups);

  function show(changes, focus) {
    Object.assign(state, changes);
    const { groups } = usable[state.step];
    state.group = Math.max(0, Math.min(groups.length - 1, state.group));
    const group = groups[state.group];
    const numbers = numbersOf(group, run.advantage);
    if (!numbers.some(({ name }) => name === state.number)) state.number = 'advantage';
    const walk = (label, by) => make('button', { type: 'button', 'data-walk': by, disabled: !usable[state.step + by],
      onclick: () => show({ step: state.step + by }, `[data-walk="${by}"]`) }, label);
    controls.replaceChildren(
      walk('← Earlier', -1),
      choice('Step', usable.map(({ step }, index) => [index, `Step ${step}`]), state.step, (index) => show({ step: Number(index) }, '.steps')),
      walk('Later →', 1),
      choice('Problem', groups.map((one, index) => [index, `${index + 1}. ${one.prompt.slice(0, 80)} (${groupWords(one)})`]), state.group, (index) => show({ group: Number(index) }), true),
      choice('Colour tokens by', numbers.map(({ name, words }) => [name, words]), state.number, (name) => show({ number: name }), true));
    body.replaceChildren(...groupView(group, run, numbers.find(({ name }) => name === state.number)));
    if (focus) (controls.querySelector(focus) || controls.querySelector('select')).focus();
  }
  show({});
  return section('completions', 'Completions, group by group',
    make('p', { class: 'soft' }, 'The model answers a problem several times; each completion is pushed up or down by how much better it is than the others. Move a slider to see what another reward would have changed.'),
    boundedNote(usable.length, files, leftOut, 'step'), controls, body);
}

// What of the completions is not in the page; nothing where all are.
function boundedNote(shown, files, leftOut, when) {
  const notes = [
    shown < files ? `Completions of ${shown} of ${plural(files, when)} are in this page, evenly spread, to keep it small; all are in samples/.` : '',
    leftOut ? `${plural(leftOut, 'group')} of these ${when}s ${leftOut === 1 ? 'is' : 'are'} left out, to keep the page small.` : ''].filter(Boolean);
  return notes.length ? make('p', { class: 'note' }, notes.join(' ')) : '';
}

const rewardsOf = (group) => group.samples.map((sample) => sample.reward);
const known = (values) => values.filter((value) => value != null);
// The group in which rewards differ most: there is something to see.
function mostTelling(groups) {
  const spread = (group) => (known(rewardsOf(group)).length > 1 ? deviationOf(known(rewardsOf(group)), 'population') : -1);
  return groups.reduce((best, group, index) => (spread(group) > spread(groups[best]) ? index : best), 0);
}

function groupWords(group) {
  const own = known(rewardsOf(group));
  return own.length ? `${plural(group.samples.length, 'completion')}, mean reward ${short(meanOf(own))}` : 'no rewards';
}

function groupView(group, run, number) {
  const { advantage: estimator } = run, rewards = rewardsOf(group), recorded = [...rewards];
  const lengths = group.samples.map((sample) => sample.tokens ?? 0);
  const all = known(rewards), spread = Math.max(1, ...all) - Math.min(0, ...all);
  const [low, high] = [Math.min(0, ...all) - (estimator.std === 'mean' ? 0 : 0.5 * spread), Math.max(1, ...all) + 0.5 * spread];
  const statistics = make('p', { 'aria-live': 'polite', class: 'statistics' });
  const legend = make('p', { class: 'small soft legend' });
  const cards = group.samples.map((sample, index) => completionCard(sample, index, estimator, [low, high], (value) => { rewards[index] = value; update(); }));
  const reset = make('button', { type: 'button', class: 'reset', onclick: () => { recorded.forEach((value, index) => { rewards[index] = value; }); update(); } }, 'Rewards as recorded');

  function update() {
    const changed = rewards.some((value, index) => value !== recorded[index]);
    const why = whyNot(known(rewards), lengths, estimator);
    const advantages = why ? group.samples.map((sample) => (changed ? null : sample.advantage ?? null)) : groupAdvantages(rewards, lengths, estimator);
    const own = known(rewards);
    statistics.replaceChildren(...(own.length ? [make('strong', {}, `mean ${short(meanOf(own))}`), `, deviation ${own.length > 1 ? short(deviationOf(own, 'sample')) : '–'}. `] : ['No completion has a reward. ']),
      why ? `The sliders cannot say what advantages would be: ${why}.` : `${formula(estimator)}.`,
      !why && own.length > 1 && !hasSignal(own) ? ' All rewards are equal: nothing to learn from this group.' : '');
    const largest = Math.max(1e-9, ...advantages.map((value) => Math.abs(value || 0)));
    const scale = scaleOf(group, number, advantages, estimator);
    cards.forEach((card, index) => card.update(rewards[index], advantages[index], largest, number, scale));
    legend.replaceChildren(`Colour: ${number.words}.`, rampOf(number, scale));
    reset.disabled = !changed;
  }
  update();
  const part = run.group_size > group.samples.length ? `${group.samples.length} of the group's ${run.group_size} completions are recorded: the page computes as if these were all.` : '';
  return [
    make('div', { class: 'card' }, make('h3', {}, 'Problem'), make('p', { class: 'code text', dir: 'auto', tabindex: 0, role: 'textbox', 'aria-readonly': 'true', 'aria-label': 'Problem' }, printable(group.prompt)),
      make('p', { class: 'small soft' }, 'Right answer: ', foreign(group.answer || 'not recorded')), statistics, part ? make('p', { class: 'note small' }, part) : '', reset),
    legend, make('div', { class: 'grid completions' }, cards.map((card) => card.element))];
}

function rampOf(number, scale) {
  const steps = number.diverging ? [-1, -0.5, 0, 0.5, 1] : [0, 0.5, 1];
  const stops = steps.map((at) => shade(number, at * scale, scale) || 'transparent').join(', ');
  return make('span', {}, number.diverging ? signed(-scale) : '0', make('i', { class: 'ramp', style: `background: linear-gradient(90deg, ${stops})` }), number.diverging ? signed(scale) : short(scale));
}

function completionCard(sample, index, estimator, [low, high], changed) {
  const score = make('span', { class: 'score' }), words = make('output', { class: 'advantage' }), bar = make('i');
  const name = `Completion ${index + 1}`, text = completionText(sample, name, estimator);
  const slider = make('input', { type: 'range', min: low, max: high, step: 'any', 'aria-label': `Reward of completion ${index + 1}`, disabled: sample.reward == null || Boolean(estimator.why_not),
    oninput: () => changed(Number(slider.value)),
    onkeydown: (event) => { // a hundredth of the range a key
      const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key];
      if (!by) return;
      event.preventDefault();
      changed(Math.max(low, Math.min(high, Number(slider.value) + (by * (high - low)) / 100)));
    } });
  const details = [sample.tokens != null ? plural(sample.tokens, 'token') : '', sample.finish_reason ? `ended: ${sample.finish_reason}` : '', sample.policy_version != null ? `policy ${sample.policy_version}` : ''].filter(Boolean).join(' · ');
  const element = make('article', { class: 'card completion', 'aria-label': name },
    make('header', {}, make('h3', {}, name), score), slider,
    make('div', {}, make('div', { class: 'push', 'aria-hidden': 'true' }, bar), words),
    make('ul', { class: 'chips', 'aria-label': 'Terms of the reward' }, Object.entries(sample.terms).map(([term, value]) => make('li', {}, foreign(term), ` ${short(value)}`))),
    sample.reason ? make('p', { class: 'small' }, 'Reason: ', foreign(sample.reason)) : '',
    sample.unscorable ? make('p', { class: 'small note' }, 'Not scored: ', foreign(sample.unscorable)) : '',
    text.nodes, make('p', { class: 'small soft' }, printable(details)));
  const update = (reward, advantage, largest, number, scale) => {
    score.textContent = reward == null ? 'no reward' : `reward ${short(reward)}`;
    if (reward != null) { slider.value = reward; slider.setAttribute('aria-valuetext', short(reward)); }
    element.dataset.advantage = advantage ?? '';
    words.textContent = advantage == null ? 'advantage –' : `advantage ${signed(advantage)}`;
    const share = (50 * Math.abs(advantage || 0)) / largest;
    bar.className = advantage < 0 ? 'minus' : '';
    bar.style.width = `${share}%`;
    bar.style.left = `${advantage < 0 ? 50 - share : 50}%`;
    text.paint(number, advantage, scale);
  };
  return { element, update };
}
