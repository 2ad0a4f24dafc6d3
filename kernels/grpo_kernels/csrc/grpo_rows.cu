// Loss and gradient of the rows of logits in one launch, for GPUs with thread block clusters (compute capability 9.0 on).
//
// A cluster holds a whole row in the shared memory of its CTAs: the logits are read once and their gradient is written
// once, whatever the caches do. Each row has its own cluster, and the GPU starts another wherever one has ended; how
// many run at a time depends on how its multiprocessors are grouped. There are no atomic additions: lanes, warps and
// CTAs are merged in a fixed order, so a row always gives the same bits.
#include "row_math.cuh"

static __device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

static __device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// The variable of the same name in another CTA of the cluster.
static __device__ __forceinline__ float there(const float* here, unsigned rank) {
  unsigned place;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(place)
               : "r"((unsigned)__cvta_generic_to_shared(here)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(place) : "memory");
  return value;
}

static __device__ __forceinline__ Sums of_warp(Sums mine, float scale) {
  for (int apart = 16; apart; apart /= 2) {
    const Sums other = {__shfl_down_sync(~0u, mine.m, apart), __shfl_down_sync(~0u, mine.s, apart),
                        __shfl_down_sync(~0u, mine.w, apart)};
    mine = merge(mine, other, scale);
  }
  return mine;
}

// Arguments as those of grpo_kernel in triton_rows.py; mode and index: see launch.Visit. `outputs` holds zeros before.
template <typename T, typename Out>
__global__ void __cluster_dims__(CTAS) __launch_bounds__(THREADS, 4)
    grpo_rows(const T* logits, Out* out, const long long* ids, const long long* index, const float* old, const float* ref,
              const float* rollout, const float* advantage, const float* weight, float* outputs, int stride, int out_stride,
              int columns, int width, double inv_temperature, double log_low, double log_high, double log_dual,
              double tau_pos, double tau_neg, double kl_coef, double entropy_coef, double correction_floor,
              double correction_cap, int kind, int kl, int kl_unbiased, int correction, double grad_scale, int mode, int has_old, int has_ref, int has_rollout, int gradient) {
  extern __shared__ __align__(16) unsigned char memory[];
  __shared__ Sums of_warps[THREADS / 32], of_cta;
  __shared__ Outcome shared_outcome;
  T* slots = reinterpret_cast<T*>(memory);
  const int thread = threadIdx.x, rank = cluster_rank(), step = blockIdx.x / CTAS;
  const long long row = mode == 1 ? index[step] : step, token = mode == 2 ? index[step] : step;
  const T* x = logits + row * stride;
  Out* g = out + row * out_stride;
  const float factor = token < 0 ? 0.0f : weight[token];
  // All CTAs of the cluster read the same weight, so all of them return here, and none waits for another at a barrier.
  if (factor == 0.0f) {
    if (gradient) write_zeros(g, g + width, rank * THREADS + thread);
    return;
  }
  const Part<T> part(x, columns, rank);
  load(part, slots, thread);
  const Options options = {float(inv_temperature), float(log_low),          float(log_high),       float(log_dual),
                           float(tau_pos),         float(tau_neg),          float(kl_coef),        float(entropy_coef),
                           float(correction_floor), float(correction_cap),  kind,                  kl,
                           kl_unbiased,            correction,              float(grad_scale)};
  const float scale = options.inv_temperature * LOG2_E;
  const long long id = ids[token];
  // A target that is not among these columns gets a column that no lane holds.
  const int target = id >= 0 && id < columns ? int(id) : -LANE<T>;
  Token known;
  // The target's logit is read before the barrier: after it, another CTA may overwrite the logit with its gradient.
  if (thread == 0)
    known = {target < 0 ? -infinity() : to_float(x[target]), advantage[token], factor, has_old ? old[token] : 0.0f,
             has_ref ? ref[token] : 0.0f, has_rollout ? rollout[token] : 0.0f, has_old != 0, has_ref != 0,
             has_rollout != 0};
  asm volatile("cp.async.wait_all;" ::: "memory");
  const Sums warp = of_warp(sums_of(part, slots, thread, scale), scale);
  if (thread % 32 == 0) of_warps[thread / 32] = warp;
  __syncthreads();
  if (thread == 0) {
    Sums cta = of_warps[0];
    for (int k = 1; k < THREADS / 32; k++) cta = merge(cta, of_warps[k], scale);
    of_cta = cta;
  }
  cluster_barrier();
  // Every CTA merges the sums of all in the same order, so all get the same bits without a broadcast.
  if (thread == 0) {
    Sums sums = no_sums();
    for (int k = 0; k < CTAS; k++)
      sums = merge(sums, {there(&of_cta.m, k), there(&of_cta.s, k), there(&of_cta.w, k)}, scale);
    const Outcome outcome = outcome_of(sums, known, options);
    if (rank == 0) store_outputs(outputs + token * OUTPUTS, outcome);
    shared_outcome = outcome;
  }
  __syncthreads();
  if (gradient) write(part, slots, g, width, target, shared_outcome, rank, thread, scale);
  // A CTA must not end, and give up its shared memory, while its peers still read from it.
  cluster_barrier();
}
