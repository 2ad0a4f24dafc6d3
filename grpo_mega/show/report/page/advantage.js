// Group-relative advantages, as grpo_mega/algorithm/advantage.py computes them; a test compares the two.

const ROUNDING = 1e-6;

// Whether two of the rewards, float64, differ by more than rounding.
function hasSignal(rewards) {
  if (rewards.length < 2) return false;
  const low = Math.min(...rewards), high = Math.max(...rewards);
  return high - low > ROUNDING * Math.max(Math.abs(low), Math.abs(high));
}

const meanOf = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function deviationOf(values, kind) {
  const centre = meanOf(values), squares = values.reduce((sum, value) => sum + (value - centre) ** 2, 0);
  return Math.sqrt(squares / (kind === 'population' ? values.length : values.length - 1));
}

function baselines(rewards, kind, lengths) {
  const sum = rewards.reduce((total, value) => total + value, 0);
  if (kind === 'leave_one_out') return rewards.map((reward) => (sum - reward) / (rewards.length - 1));
  if (kind === 'optimal') {
    const weight = lengths.reduce((total, length) => total + length, 0);
    const weighted = rewards.reduce((total, reward, index) => total + lengths[index] * reward, 0) / weight;
    return rewards.map(() => weighted);
  }
  return rewards.map(() => sum / rewards.length);
}

// The advantage of each sample of a group; null for one without a reward, which is no part of its group.
function groupAdvantages(rewards, lengths, estimator) {
  const scored = rewards.map((reward, index) => index).filter((index) => rewards[index] != null);
  const own = scored.map((index) => rewards[index]);
  const found = rewards.map((reward) => (reward == null ? null : 0));
  if (!hasSignal(own)) return found;
  const size = Math.max(...own.map(Math.abs)), scaled = own.map((reward) => reward / size);
  const base = baselines(scaled, estimator.baseline, scored.map((index) => lengths[index]));
  const scale = { none: () => 1 / size, mean: () => meanOf(scaled) }[estimator.std] || (() => deviationOf(scaled, estimator.std));
  const divisor = scale();
  scored.forEach((index, place) => { found[index] = Math.fround((scaled[place] - base[place]) / divisor); });
  return found;
}

// Why these rewards have no advantages; '' when they have.
function whyNot(rewards, lengths, estimator) {
  if (estimator.why_not) return estimator.why_not;
  if (estimator.std === 'mean' && rewards.some((reward) => reward < 0)) return 'a reward is negative, and they are divided by the mean';
  if (estimator.baseline === 'optimal' && !(lengths.every((length) => length >= 0) && lengths.some((length) => length > 0))) return 'the lengths of the completions are not recorded';
  return '';
}

function formula(estimator) {
  const base = { mean: 'mean(r)', leave_one_out: 'mean of the other r', optimal: 'mean of r weighted by length' }[estimator.baseline];
  const scale = { sample: ' / std(r)', population: ' / std(r) over G', mean: ' / mean(r)', none: '' }[estimator.std];
  return `A = ${scale ? '(' : ''}r − ${base}${scale ? ')' : ''}${scale}`;
}
