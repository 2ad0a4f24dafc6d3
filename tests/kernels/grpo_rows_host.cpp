// csrc/row_math.cuh on the host: the steps of grpo_rows.cu, with loops in place of CTAs and threads. Gradient in place.
#include "row_math.cuh"

#include <cassert>
#include <vector>

struct Vectors {
  const int64_t* ids;
  const float *old, *ref, *rollout, *advantage, *weight;
  float* outputs;
};

static Sums of_warp(const Sums* threads, float scale) {  // the tree of shuffles, as lane 0 sees it
  std::vector<Sums> lanes(threads, threads + 32);
  for (int apart = 16; apart; apart /= 2)
    for (int k = 0; k < apart; k++) lanes[k] = merge(lanes[k], lanes[k + apart], scale);
  return lanes[0];
}

template <typename T, typename Out>
static void run(const T* logits, Out* out, Vectors v, int64_t count, int64_t stride, int64_t out_stride, int columns,
                int width, Options options, bool gradient) {
  const float scale = options.inv_temperature * LOG2_E;
  const int each = columns_each(columns, LANE<T>);
  std::vector<Words<4>> memory(CTAS * each / LANE<T> + 1);
  std::vector<Sums> threads(THREADS);
  for (int64_t row = 0; row < count; row++) {
    const T* x = logits + row * stride;
    Out* g = out + row * out_stride;
    if (v.weight[row] == 0.0f) {
      for (int k = 0; k < CTAS * THREADS && gradient; k++) write_zeros(g, g + width, k);
      continue;
    }
    const int target = v.ids[row] >= 0 && v.ids[row] < columns ? int(v.ids[row]) : -LANE<T>;
    const Token token = {target < 0 ? -infinity() : to_float(x[target]), v.advantage[row], v.weight[row],
                         v.old ? v.old[row] : 0.0f, v.ref ? v.ref[row] : 0.0f, v.rollout ? v.rollout[row] : 0.0f,
                         v.old != nullptr, v.ref != nullptr, v.rollout != nullptr};
    Sums sums = no_sums();
    for (int rank = 0; rank < CTAS; rank++) {
      const Part<T> part(x, columns, rank);
      assert(part.lanes * LANE<T> <= each);
      T* slots = reinterpret_cast<T*>(memory.data()) + rank * each;
      for (int thread = 0; thread < THREADS; thread++) {
        load(part, slots, thread);
        threads[thread] = sums_of(part, slots, thread, scale);
      }
      Sums cta = of_warp(&threads[0], scale);
      for (int warp = 1; warp < THREADS / 32; warp++) cta = merge(cta, of_warp(&threads[32 * warp], scale), scale);
      sums = merge(sums, cta, scale);
    }
    const Outcome r = outcome_of(sums, token, options);
    store_outputs(v.outputs + row * OUTPUTS, r);
    if (!gradient) continue;
    for (int rank = 0; rank < CTAS; rank++)
      for (int thread = 0; thread < THREADS; thread++) {
        const T* slots = reinterpret_cast<T*>(memory.data()) + rank * each;
        write(Part<T>(x, columns, rank), slots, g, width, target, r, rank, thread, scale);
      }
  }
}

#define ENTRY(NAME, T, OUT)                                                                                          \
  extern "C" void NAME(const T* logits, OUT* out, const int64_t* ids, const float* old, const float* ref,            \
                       const float* rollout, const float* advantage, const float* weight, float* outputs,            \
                       int64_t count, int64_t stride, int64_t out_stride, int columns, int width,                    \
                       float inv_temperature, float log_low, float log_high, float log_dual, float tau_pos,          \
                       float tau_neg, float kl_coef, float entropy_coef, float correction_floor,                     \
                       float correction_cap, int kind, int kl, int kl_unbiased, int correction,                      \
                       float grad_scale, int gradient) {                                                             \
    run(logits, out, {ids, old, ref, rollout, advantage, weight, outputs}, count, stride, out_stride, columns,       \
        width,                                                                                                       \
        {inv_temperature, log_low, log_high, log_dual, tau_pos, tau_neg, kl_coef, entropy_coef, correction_floor,    \
         correction_cap, kind, kl, kl_unbiased, correction, grad_scale},                                             \
        gradient);                                                                                                   \
  }
ENTRY(float32_float32, float, float)
ENTRY(bfloat16_bfloat16, BFloat16, BFloat16)
ENTRY(float32_bfloat16, float, BFloat16)

extern "C" int part_bytes(int columns, int itemsize) { return columns_each(columns, 16 / itemsize) * itemsize; }
extern "C" int ctas() { return CTAS; }
extern "C" int threads() { return THREADS; }
