// Tokens of a completion, coloured by a number of theirs: what there is to colour by depends on what the run recorded.

// The policy did not write these tokens, and learns nothing from them.
const isGiven = (sample, at) => (sample.given || []).some(([first, end]) => first <= at && at < end);
// A critic, rewards of steps and a teacher give every token an advantage of its own.
const advantageOf = (sample, at, ofCompletion) => (isGiven(sample, at) ? null : sample.advantages ? sample.advantages[at] : ofCompletion);
const difference = (first, second) => (sample, at) => (sample[first]?.[at] == null || sample[second]?.[at] == null ? null : sample[first][at] - sample[second][at]);

// name, what it is, whether 0 is its middle, and its value at a token of a sample with this advantage.
const NUMBERS = [
  ['advantage', 'Advantage of the completion, or of the token where each has its own', true, advantageOf],
  ['push', 'Push: slope of the objective at the token’s log-probability, ratio × advantage, 0 where it is clipped', true, pushOf],
  ['log ratio', 'log(new / old policy): new is the policy as the token’s last update began, before that update moved the weights; with one update a step it is the old one', true, difference('new_logprobs', 'old_logprobs')],
  ['mismatch', 'Trainer − engine, log-probability', true, difference('old_logprobs', 'engine_logprobs')],
  ['reference', 'Policy − reference, log-probability', true, difference('old_logprobs', 'ref_logprobs')],
  ['entropy', 'Entropy of the policy, nats', false, (sample, at) => sample.entropies?.[at]],
  ['surprise', 'Surprise of the engine: −log-probability, nats', false, (sample, at) => (sample.engine_logprobs?.[at] == null ? null : -sample.engine_logprobs[at])],
  ['age', 'Age: by how many updates the weights that sampled the token were older than those of the step', false, (sample, at) => sample.ages?.[at]],
].map(([name, words, diverging, value]) => ({ name, words, diverging, value }));

// d objective / d log-probability of PPO's clipped objective (ppo), before the token's weight.
function pushOf(sample, at, ofCompletion, estimator) {
  const advantage = advantageOf(sample, at, ofCompletion);
  if (estimator.objective !== 'ppo' || advantage == null || !sample.new_logprobs) return null;
  const log = difference('new_logprobs', 'old_logprobs')(sample, at);
  if (log == null) return null;
  const ratio = Math.exp(log);
  const bound = (value) => value ?? Infinity; // JSON has no infinity: null is no bound
  const clipped = advantage > 0 ? ratio > 1 + bound(estimator.clip_high) : ratio < 1 - bound(estimator.clip_low);
  const dual = advantage < 0 && ratio > bound(estimator.dual_clip);
  return clipped || dual ? 0 : ratio * advantage;
}

function numbersOf(group, estimator) {
  return NUMBERS.filter(({ value }) => group.samples.some((sample) =>
    (sample.token_texts || ['']).some((text, at) => value(sample, at, 1, estimator) != null)));
}

// The largest size that tokens of the group have of the number; colours are relative to it.
function scaleOf(group, number, advantages, estimator) {
  let largest = 0;
  group.samples.forEach((sample, index) => (sample.token_texts || ['']).forEach((text, at) => {
    largest = Math.max(largest, Math.abs(number.value(sample, at, advantages[index], estimator) || 0));
  }));
  return largest || 1;
}

function shade(number, value, scale) {
  if (value == null || !value) return '';
  const strength = 0.06 + 0.44 * Math.min(1, Math.abs(value) / scale);
  return `rgba(var(--${number.diverging ? (value > 0 ? 'up' : 'down') : 'seq'}), ${strength.toFixed(3)})`;
}

// The text of a completion: focus it, and arrow keys go from token to token, whose numbers are read below it.
function completionText(sample, label, estimator) {
  const texts = sample.token_texts || [sample.text];
  const spans = texts.map((text, at) => make('span', { 'data-at': at, class: isGiven(sample, at) ? 'given' : '' }, printable(text)));
  // Calls and replies are blocks among them.
  const pieces = [];
  let end = 0;
  for (const [first, past, what] of sample.turns || []) {
    pieces.push(...spans.slice(end, first), make('span', { class: `turn ${what}`, 'data-what': what }, spans.slice(first, past)));
    end = past;
  }
  pieces.push(...spans.slice(end));
  const read = make('p', { class: 'read small soft', 'aria-live': 'polite' });
  const box = make('div', { class: 'text code', dir: 'auto', tabindex: 0, role: 'textbox', 'aria-readonly': 'true', 'aria-multiline': 'true',
    'aria-label': `${label}: arrow keys read single tokens` }, pieces);
  let now = -1, advantage = null;
  const shown = (at) => {
    spans[now]?.classList.remove('now');
    now = at;
    spans[at]?.classList.add('now');
    if (at < 0 || !sample.token_texts) { read.textContent = ''; return; }
    const parts = NUMBERS.map(({ name, value }) => [name, value(sample, at, advantage, estimator)]).filter(([, value]) => value != null);
    const given = isGiven(sample, at) ? 'given, not learned ' : '';
    read.textContent = `“${printable(texts[at])}” ${given}${parts.map(([name, value]) => `${name} ${signed(value)}`).join(' · ')}`;
  };
  box.addEventListener('mouseover', (event) => { if (event.target.dataset.at) shown(Number(event.target.dataset.at)); });
  box.addEventListener('keydown', (event) => {
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    shown(Math.max(0, Math.min(spans.length - 1, next)));
    spans[now].scrollIntoView({ block: 'nearest' });
  });
  const paint = (number, given, scale) => {
    advantage = given;
    spans.forEach((span, at) => { span.style.background = shade(number, number.value(sample, at, given, estimator), scale); });
    if (now >= 0) shown(now);
  };
  return { nodes: [box, read, sample.tokens_left_out ? make('p', { class: 'small soft' }, `${plural(sample.tokens_left_out, 'more token')} in the file.`) : ''], paint };
}
