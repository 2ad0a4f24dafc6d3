// The arithmetic of a row and of a token, and which thread holds which columns: everything of grpo_rows.cu that does
// not need a GPU. Also compiled for the host, where a test runs it thread by thread.
#pragma once

#ifdef __CUDACC__
#define INLINE __device__ __forceinline__
#else
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstring>
#define INLINE inline
#endif

#ifndef CTAS
#error "CTAS: those of a cluster, which holds one row in their shared memory; cuda_rows.py chooses it"
#endif
constexpr int THREADS = 256;  // of a CTA

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float SATURATED = 30.0f;  // as in token_loss.py
// 2^FLOOR is 0: a shift that is clamped here keeps 0 * -inf, which is NaN, out of the sums.
constexpr float FLOOR = -300.0f;

#ifdef __CUDACC__
INLINE float infinity() { return __int_as_float(0x7f800000); }
// Accurate to 2 ulp; it flushes denormal numbers to 0, which saves the steps that exp2f takes for them.
INLINE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
INLINE float as_float(unsigned bits) { return __uint_as_float(bits); }
#else
INLINE float infinity() { return HUGE_VALF; }
INLINE float exp2_fast(float x) { return exp2f(x); }
INLINE float as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
#endif

// ------------------------------------------------------------------------------------------------ numbers in memory

struct BFloat16 {
  unsigned short bits;
};

INLINE float to_float(float x) { return x; }
INLINE float to_float(BFloat16 x) { return as_float(unsigned(x.bits) << 16); }

// Two floats, rounded to the nearest, in one word; the first in the lower half.
INLINE unsigned bfloat16_pair(float low, float high) {
#ifdef __CUDACC__
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  unsigned halves[2];
  const float values[2] = {low, high};
  for (int k = 0; k < 2; k++) {
    unsigned bits;
    memcpy(&bits, &values[k], 4);
    halves[k] = values[k] != values[k] ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
  return halves[0] | halves[1] << 16;
#endif
}

INLINE void store(float* place, float x) { *place = x; }
INLINE void store(BFloat16* place, float x) { place->bits = (unsigned short)bfloat16_pair(x, 0.0f); }

template <int N>
struct alignas(4 * N) Words {
  unsigned word[N];
};

// What one thread moves at a time: 16 bytes of logits.
template <typename T>
constexpr int LANE = 16 / int(sizeof(T));

INLINE void unpack(const Words<4>& from, float (&x)[4]) {
  for (int k = 0; k < 4; k++) x[k] = as_float(from.word[k]);
}
INLINE void unpack(const Words<4>& from, float (&x)[8]) {
  for (int k = 0; k < 4; k++) {
    x[2 * k] = as_float(from.word[k] << 16);
    x[2 * k + 1] = as_float(from.word[k] & 0xffff0000u);
  }
}

template <int N>
INLINE void store_whole(BFloat16* place, const float (&x)[N]) {
  Words<N / 2> packed;
  for (int k = 0; k < N / 2; k++) packed.word[k] = bfloat16_pair(x[2 * k], x[2 * k + 1]);
  *reinterpret_cast<Words<N / 2>*>(place) = packed;
}
INLINE void store_whole(float* place, const float (&x)[4]) {
  struct alignas(16) Floats {
    float x[4];
  };
  *reinterpret_cast<Floats*>(place) = {x[0], x[1], x[2], x[3]};
}

template <typename T>
INLINE bool aligned(const T* place, int bytes) {
  return reinterpret_cast<unsigned long long>(place) % bytes == 0;
}

// ------------------------------------------------------------------------------------------------ sums of a row

struct Sums {
  float m;  // largest logit
  float s;  // sum of 2^d, d = (x - m) * scale, with scale = log2(e) / temperature
  float w;  // sum of 2^d * d, where x = -inf counts 0
};

INLINE Sums no_sums() { return {-infinity(), 0.0f, 0.0f}; }

INLINE float shift_to(float from, float base, float scale) { return fmaxf((from - base) * scale, FLOOR); }

INLINE Sums merge(Sums a, Sums b, float scale) {
  const float m = fmaxf(a.m, b.m), base = m == -infinity() ? 0.0f : m;
  const float a_shift = shift_to(a.m, base, scale), b_shift = shift_to(b.m, base, scale);
  const float a_scale = exp2_fast(a_shift), b_scale = exp2_fast(b_shift);
  return {m, a.s * a_scale + b.s * b_scale, (a.w + a_shift * a.s) * a_scale + (b.w + b_shift * b.s) * b_scale};
}

template <int N>
INLINE void add(Sums& sums, const float (&x)[N], float scale) {
  float m = sums.m;
  for (int k = 0; k < N; k++) m = fmaxf(m, x[k]);
  const float base = m == -infinity() ? 0.0f : m, shift = shift_to(sums.m, base, scale), decay = exp2_fast(shift);
  float s = sums.s * decay, w = (sums.w + shift * sums.s) * decay;
  for (int k = 0; k < N; k++) {
    // Subtracted first, which is exact for logits that are close to each other.
    const float d = (x[k] - base) * scale, e = exp2_fast(d);
    s += e;
    if (e > 0.0f) w += d * e;
  }
  sums = {m, s, w};
}

// ------------------------------------------------------------------------------------------------ loss of a token

struct Options {
  float inv_temperature, log_low, log_high, log_dual, tau_pos, tau_neg, kl_coef, entropy_coef, correction_floor,
      correction_cap;
  int kind, kl, kl_unbiased, correction;  // kind: 0 ppo, 1 cispo, 2 sapo; kl: 1, 2 or 3; correction: 1 truncate, 2 mask
  float grad_scale;
};

struct Token {
  float target, advantage, weight, old, ref, rollout;  // target: its raw logit
  bool has_old, has_ref, has_rollout;                  // has_rollout: for a correction
};

struct Outcome {
  float loss, logprob, entropy, kl, clipped, weight, log_ratio;
  float m, log2_s;               // p = 2^((x - m) * scale - log2_s)
  float by_logprob, by_entropy;  // gradient of the loss, times grad_scale / temperature
};

constexpr int OUTPUTS = 7;  // of each row, the fields of RowLosses

INLINE void store_outputs(float* to, const Outcome& r) {
  const float values[OUTPUTS] = {r.loss, r.logprob, r.entropy, r.kl, r.clipped, r.weight, r.log_ratio};
  for (int k = 0; k < OUTPUTS; k++) to[k] = values[k];
}

// exp(x) - 1 - x, as x^2 (1/2 + x/6 + ...) where the terms would cancel
INLINE float exp_tail(float x) {
  if (fabsf(x) >= 0.5f) return expf(x) - 1.0f - x;
  // Terms up to x^10: for |x| = 0.5 the next one is 1e-10 of the result, far below float32's rounding.
  float series = 1.0f / 3628800.0f;
  const float factors[] = {1.f / 362880, 1.f / 40320, 1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f};
  for (float factor : factors) series = series * x + factor;
  return x * x * series;
}

// Advantage and weight after the correction; see token_loss.py. A NaN stays.
INLINE void correct(Token& t, float old, const Options& o) {
  const float c = expf(old - t.rollout);
  const bool above = c > o.correction_cap, beyond = above || c < o.correction_floor, masks = o.correction == 2;
  t.advantage *= beyond ? (masks ? 0.0f : above ? o.correction_cap : o.correction_floor) : c;
  if (beyond && masks) t.weight = 0.0f;
}

// 1 / (1 + exp(-x)), without an overflow on either side
INLINE float sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x > 0.0f ? 1.0f : e) / (1.0f + e);
}

// SAPO's loss and its derivative in the log-prob; see token_loss.py.
INLINE void soft_gate(float log_ratio, const Token& t, const Options& o, float& loss, float& grad) {
  const float tau = t.advantage > 0.0f ? o.tau_pos : o.tau_neg;
  const float ratio = expf(log_ratio > SATURATED ? SATURATED : log_ratio), gate = sigmoid(tau * (ratio - 1.0f));
  loss = -4.0f * t.advantage / tau * gate;
  grad = -4.0f * t.advantage * gate * sigmoid(tau * (1.0f - ratio)) * ratio;
}

// Loss, its derivative in the log-prob, and 0, 1, 2 or 3 for no clip, low, high, dual; see token_loss.py. Bounds are
// applied by comparisons, because fminf and fmaxf would replace a NaN by the bound, but it must reach the loss.
INLINE void policy_term(float logprob, float log_ratio, const Token& t, const Options& o, float& loss, float& grad,
                        float& clipped) {
  if (o.kind == 2) {
    soft_gate(log_ratio, t, o, loss, grad);
    clipped = 0.0f;
    return;
  }
  const bool falls = t.advantage < 0.0f, rises = t.advantage > 0.0f;
  const bool below = log_ratio < o.log_low, above = log_ratio > o.log_high, far = log_ratio > o.log_dual;
  if (o.kind == 1) {
    const float bounded = below ? o.log_low : above ? o.log_high : log_ratio;
    grad = -t.advantage * expf(bounded);
    loss = t.advantage == 0.0f && logprob == -infinity() ? 0.0f : grad * logprob;
    clipped = !(falls || rises) ? 0.0f : below ? 1.0f : above ? 2.0f : 0.0f;
    return;
  }
  clipped = falls ? (below ? 1.0f : far ? 3.0f : 0.0f) : rises && above ? 2.0f : 0.0f;
  const float falling = below ? o.log_low : far ? o.log_dual : log_ratio;
  loss = -t.advantage * expf(falls ? falling : above ? o.log_high : log_ratio);
  grad = clipped == 0.0f ? loss : 0.0f;
}

// Estimate of KL(policy || reference) and its derivative in the log-prob.
INLINE void kl_term(float logprob, float ref, int kind, float& estimate, float& grad) {
  const float d = logprob - ref;
  if (kind == 1) {
    estimate = d, grad = 1.0f;
  } else if (kind == 2) {
    estimate = 0.5f * d * d, grad = d;
  } else {
    estimate = exp_tail(-d);
    grad = fabsf(d) < 0.5f ? d - estimate : 1.0f - expf(-d);
  }
}

INLINE Outcome outcome_of(const Sums& sums, Token t, const Options& o) {
  Outcome r;
  const float log_s = logf(sums.s);
  r.logprob = (t.target - sums.m) * o.inv_temperature - log_s;
  r.entropy = log_s - sums.w * LN_2 / sums.s;
  r.log_ratio = t.has_old ? r.logprob - t.old : (r.logprob == r.logprob ? 0.0f : r.logprob);
  if (t.has_rollout) correct(t, t.has_old ? t.old : r.logprob, o);
  float grad;
  policy_term(r.logprob, r.log_ratio, t, o, r.loss, grad, r.clipped);
  r.kl = 0.0f;
  if (t.has_ref) {
    float kl_grad;
    kl_term(r.logprob, t.ref, o.kl, r.kl, kl_grad);
    const float ratio = o.kl_unbiased ? expf(r.log_ratio) : 1.0f;
    if (o.kl_unbiased) kl_grad = ratio * (r.kl + kl_grad);
    // Skipped for a coefficient of 0: 0 times an infinite estimate would be NaN.
    if (o.kl_coef != 0.0f) r.loss += o.kl_coef * ratio * r.kl, grad += o.kl_coef * kl_grad;
  }
  if (o.entropy_coef != 0.0f) r.loss -= o.entropy_coef * r.entropy;
  r.loss *= t.weight;
  r.weight = t.weight;
  // A token that the correction masks may have a NaN as its loss.
  if (t.weight == 0.0f) r.loss = r.clipped = 0.0f;
  r.m = sums.m;
  r.log2_s = log2f(sums.s);
  const float factor = t.weight * o.grad_scale * o.inv_temperature;
  r.by_logprob = grad * factor;
  r.by_entropy = -o.entropy_coef * factor;
  return r;
}

// Gradient of the logit x, but for the target's by_logprob.
INLINE float gradient_of(float x, const Outcome& r, float scale) {
  const float log2_p = (x - r.m) * scale - r.log2_s, p = exp2_fast(log2_p);
  float factor = r.by_logprob;
  if (r.by_entropy != 0.0f && p > 0.0f) factor += r.by_entropy * (log2_p * LN_2 + r.entropy);
  return -p * factor;
}

// ------------------------------------------------------------------------------------------------ a CTA's part of a row

// Columns per CTA: whole lanes, enough for a row that begins anywhere in a lane.
INLINE int columns_each(int columns, int lane) { return (columns + lane - 1 + CTAS * lane - 1) / (CTAS * lane) * lane; }

// The columns of one CTA in lanes of 16 bytes that are aligned in memory, whatever the row's own alignment. Slot k of
// the CTA's shared memory holds column first + k. Each thread works only on its own lanes, from loading to writing.
template <typename T>
struct Part {
  const T* row;
  int columns, first, lanes;

  INLINE Part(const T* row, int columns, int rank) : row(row), columns(columns) {
    const int misaligned = int(reinterpret_cast<unsigned long long>(row) / sizeof(T) % LANE<T>);
    const int each = columns_each(columns, LANE<T>);
    first = rank * each - misaligned;
    const int left = columns - first < each ? columns - first : each;
    lanes = left <= 0 ? 0 : (left + LANE<T> - 1) / LANE<T>;
  }
  INLINE int column(int lane) const { return first + lane * LANE<T>; }
  INLINE bool whole(int lane) const { return column(lane) >= 0 && column(lane) + LANE<T> <= columns; }
};

// Starts to copy a thread's lanes into its slots; columns that are not of this row become -inf.
template <typename T>
INLINE void load(const Part<T>& part, T* slots, int thread) {
  for (int lane = thread; lane < part.lanes; lane += THREADS) {
    const int column = part.column(lane);
    T* to = slots + lane * LANE<T>;
    if (part.whole(lane)) {
#ifdef __CUDACC__
      // Past the L1 cache (cg), because a row is read only once.
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)),
                   "l"(part.row + column)
                   : "memory");
#else
      assert(aligned(part.row + column, 16));
      memcpy(to, part.row + column, 16);
#endif
    } else {
      for (int k = 0; k < LANE<T>; k++) {
        const bool mine = column + k >= 0 && column + k < part.columns;
        store(to + k, mine ? to_float(part.row[column + k]) : -infinity());
      }
    }
  }
}

template <typename T>
INLINE Sums sums_of(const Part<T>& part, const T* slots, int thread, float scale) {
  Sums sums = no_sums();
  for (int lane = thread; lane < part.lanes; lane += THREADS) {
    float x[LANE<T>];
    unpack(*reinterpret_cast<const Words<4>*>(slots + lane * LANE<T>), x);
    add(sums, x, scale);
  }
  return sums;
}

// Zeros from `begin` to `end`; `thread` counts over the whole cluster.
template <typename Out>
INLINE void write_zeros(Out* begin, Out* end, int thread) {
  const long long count = end - begin;
  long long ahead = (16 - reinterpret_cast<unsigned long long>(begin) % 16) % 16 / sizeof(Out);
  ahead = ahead < count ? ahead : count;
  const long long lanes = (count - ahead) / LANE<Out>, behind = ahead + lanes * LANE<Out>;
  for (long long k = thread; k < ahead; k += CTAS * THREADS) store(begin + k, 0.0f);
  for (long long k = thread; k < lanes; k += CTAS * THREADS)
    *reinterpret_cast<Words<4>*>(begin + ahead + k * LANE<Out>) = {{0, 0, 0, 0}};
  for (long long k = behind + thread; k < count; k += CTAS * THREADS) store(begin + k, 0.0f);
}

// A thread's part of the row at `out`, `width` long, which may be the one the logits come from: the gradient of its
// lanes, and zeros after the columns. A row that the correction masks becomes 0, whatever it holds.
template <typename T, typename Out>
INLINE void write(const Part<T>& part, const T* slots, Out* out, int width, int target, const Outcome& r, int rank,
                  int thread, float scale) {
  const bool masked = r.weight == 0.0f;
  write_zeros(masked ? out : out + part.columns, out + width, rank * THREADS + thread);
  if (masked) return;
  for (int lane = thread; lane < part.lanes; lane += THREADS) {
    float x[LANE<T>];
    unpack(*reinterpret_cast<const Words<4>*>(slots + lane * LANE<T>), x);
    const int column = part.column(lane), hit = target - column;
    for (int k = 0; k < LANE<T>; k++) x[k] = gradient_of(x[k], r, scale);
    if (hit >= 0 && hit < LANE<T>)
      for (int k = 0; k < LANE<T>; k++) x[k] += k == hit ? r.by_logprob : 0.0f;
    if (part.whole(lane) && aligned(out + column, LANE<T> * int(sizeof(Out)))) {
      store_whole(out + column, x);
    } else {
      for (int k = 0; k < LANE<T>; k++)
        if (column + k >= 0 && column + k < part.columns) store(out + column + k, x[k]);
    }
  }
}
