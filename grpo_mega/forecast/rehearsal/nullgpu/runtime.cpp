// CUDA's runtime (libcudart) as one H100 would answer it, computing nothing: the null GPU.
//
// Device memory is address space with a limit. Kernels are counted and not launched, so what they would write keeps
// what was there: zeros, or what the host copied. Copies between host and device are made up to COPIED bytes, because
// sizes and flags travel that way; larger ones are counted. Streams and events are numbers: everything has happened
// already. What is not defined here is defined by the build (build.py), and succeeds.
//
// NULLGPU_BYTES: memory of the device; NULLGPU_TAKEN: what others hold of it. Both are read once.
#include "books.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace {

constexpr size_t PAGE = 2u << 20;       // what cudaMalloc hands out is a multiple of it
constexpr size_t COPIED = 1u << 20;     // larger copies are counted only: they would fill the host
constexpr size_t COPIED_WITHIN = 4096;  // on the device itself: sizes and flags
constexpr size_t SET = 65536;
constexpr int DEVICES = 8;

size_t number_from(const char* name, size_t otherwise) {
  const char* text = getenv(name);
  return text ? strtoull(text, nullptr, 10) : otherwise;
}

const size_t TOTAL = number_from("NULLGPU_BYTES", 84987740160ull);  // an H100 of 80 GB shows 79.15 GiB

struct Ranges {  // start -> bytes
  std::map<uintptr_t, size_t> blocks;
  bool hold(const void* p) const {
    auto next = blocks.upper_bound(reinterpret_cast<uintptr_t>(p));
    return next != blocks.begin() && reinterpret_cast<uintptr_t>(p) < std::prev(next)->first + std::prev(next)->second;
  }
};

std::mutex guard;  // of all that follows
Ranges device, pinned;
Books books{};
void (*on_wait)(int) = nullptr;
thread_local int current = 0;
thread_local cudaError_t last = cudaSuccess;
std::atomic<uintptr_t> handles{0x1000};

void started() {
  static std::once_flag once;
  std::call_once(once, [] { books.used = books.peak = number_from("NULLGPU_TAKEN", 520u << 20); });
}

void* reserved(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

enum Wait { STREAM = 1, COPY = 2, DEVICE = 3, EVENT = 4 };

cudaError_t waited(Wait kind) {
  {
    std::lock_guard<std::mutex> held(guard);
    books.waits++;
  }
  if (on_wait) on_wait(kind);  // takes Python's lock: never with ours
  return cudaSuccess;
}

cudaError_t failed(cudaError_t error) { return last = error; }

template <class Handle>
cudaError_t named(Handle* out) {
  *out = reinterpret_cast<Handle>(handles += 16);
  return cudaSuccess;
}

cudaError_t copied(void* to, const void* from, size_t bytes, bool waits) {
  size_t limit = COPIED;
  {
    std::lock_guard<std::mutex> held(guard);
    bool to_device = device.hold(to), from_device = device.hold(from);
    if (to_device && from_device) {
      books.within++, books.within_bytes += bytes, limit = COPIED_WITHIN;
    } else if (to_device) {
      books.to_device++, books.to_device_bytes += bytes;
      if (!pinned.hold(from)) books.to_device_pageable += bytes;
    } else if (from_device) {
      books.to_host++, books.to_host_bytes += bytes;
      if (!pinned.hold(to)) books.to_host_pageable += bytes;
    }
  }
  if (bytes <= limit) memmove(to, from, bytes);
  return waits ? waited(COPY) : cudaSuccess;
}

cudaError_t pin(void** out, size_t bytes) {
  *out = reserved(bytes ? bytes : 1);
  if (!*out) return failed(cudaErrorMemoryAllocation);
  std::lock_guard<std::mutex> held(guard);
  pinned.blocks[reinterpret_cast<uintptr_t>(*out)] = bytes;
  books.pinned += bytes;
  if (books.pinned > books.pinned_peak) books.pinned_peak = books.pinned;
  return cudaSuccess;
}

void* of_driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  void* found = library ? dlsym(library, name) : nullptr;
  return found ? found : dlsym(library, "nullgpu_zero");
}

}  // namespace

extern "C" {

void nullgpu_books(Books* out) {
  started();
  std::lock_guard<std::mutex> held(guard);
  *out = books;
}
void nullgpu_on_wait(void (*call)(int)) { on_wait = call; }
void nullgpu_launched(void) {
  std::lock_guard<std::mutex> held(guard);
  books.launches++;
}
void nullgpu_multiplied(uint64_t m, uint64_t n, uint64_t k, uint64_t batch) {
  std::lock_guard<std::mutex> held(guard);
  books.gemms++;
  books.flops += 2 * m * n * k * batch;
}

// Memory.
cudaError_t cudaMalloc(void** out, size_t bytes) {
  started();
  std::lock_guard<std::mutex> held(guard);
  size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  books.mallocs++;
  void* p = books.used + size > TOTAL ? nullptr : reserved(size);
  if (!p) return failed(cudaErrorMemoryAllocation);
  device.blocks[reinterpret_cast<uintptr_t>(p)] = size;
  books.used += size;
  if (books.used > books.peak) books.peak = books.used;
  *out = p;
  return cudaSuccess;
}
cudaError_t cudaFree(void* p) {
  std::lock_guard<std::mutex> held(guard);
  auto block = device.blocks.find(reinterpret_cast<uintptr_t>(p));
  if (block == device.blocks.end()) return cudaSuccess;
  books.frees++, books.used -= block->second;
  munmap(p, block->second);
  device.blocks.erase(block);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) { return cudaMalloc(out, bytes); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  started();
  std::lock_guard<std::mutex> held(guard);
  *total = TOTAL, *free = TOTAL - books.used;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) { return pin(out, bytes); }
cudaError_t cudaMallocHost(void** out, size_t bytes) { return pin(out, bytes); }
cudaError_t cudaFreeHost(void* p) {
  std::lock_guard<std::mutex> held(guard);
  auto block = pinned.blocks.find(reinterpret_cast<uintptr_t>(p));
  if (block == pinned.blocks.end()) return cudaSuccess;
  books.pinned -= block->second;
  munmap(p, block->second);
  pinned.blocks.erase(block);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  std::lock_guard<std::mutex> held(guard);
  memset(out, 0, sizeof *out);
  out->device = current;
  out->type = device.hold(p) ? cudaMemoryTypeDevice : pinned.hold(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  (out->type == cudaMemoryTypeDevice ? out->devicePointer : out->hostPointer) = const_cast<void*>(p);
  return cudaSuccess;
}

// Copies.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copied(to, from, bytes, true);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return copied(to, from, bytes, false);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  return copied(to, from, bytes, false);
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) {
  if (bytes <= SET) memset(p, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }

// Waits.
cudaError_t cudaStreamSynchronize(cudaStream_t) { return waited(STREAM); }
cudaError_t cudaDeviceSynchronize() { return waited(DEVICE); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return waited(EVENT); }

// Streams, events and graphs.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int) { return named(out); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned) { return named(out); }
cudaError_t cudaStreamCreate(cudaStream_t* out) { return named(out); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) { return named(out); }
cudaError_t cudaEventCreate(cudaEvent_t* out) { return named(out); }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t, unsigned long long) { return named(out); }
cudaError_t cudaEventElapsedTime(float* out, cudaEvent_t, cudaEvent_t) { return *out = 1.0f, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* out) {
  return *out = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* out, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
  if (out) *out = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (count) *count = 0;
  return cudaSuccess;
}

// Launches.
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return nullgpu_launched(), cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return nullgpu_launched(), cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return nullgpu_launched(), cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return nullgpu_launched(), cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = *block = dim3{1, 1, 1}, *shared = 0, *static_cast<void**>(stream) = nullptr;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(void** out, const void* function) {
  return *out = const_cast<void*>(function), cudaSuccess;
}
cudaError_t cudaGetSymbolAddress(void** out, const void*) {
  static char room[1 << 20];
  return *out = room, cudaSuccess;
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
  return *out = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t, unsigned) {
  return *out = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* out, const void*, const cudaLaunchConfig_t*) {
  return *out = 16, cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024, out->numRegs = 64, out->ptxVersion = out->binaryVersion = 90;
  out->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}

// The device: figures of an H100 SXM.
cudaError_t cudaGetDeviceCount(int* out) { return *out = DEVICES, cudaSuccess; }
cudaError_t cudaGetDevice(int* out) { return *out = current, cudaSuccess; }
cudaError_t cudaSetDevice(int number) { return current = number, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* out) { return *out = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* out) { return *out = 13000, cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) { return *out = 1, cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char* out, int room, int number) {
  return snprintf(out, room, "0000:%02x:00.0", 16 + number), cudaSuccess;
}
cudaError_t cudaGetLastError() {
  cudaError_t error = last;
  return last = cudaSuccess, error;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "null GPU";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "null GPU";
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int number) {
  memset(out, 0, sizeof *out);
  strcpy(out->name, "null GPU, as an NVIDIA H100");
  out->totalGlobalMem = TOTAL, out->sharedMemPerBlock = 49152, out->sharedMemPerBlockOptin = 232448;
  out->sharedMemPerMultiprocessor = 233472, out->reservedSharedMemPerBlock = 1024;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536, out->warpSize = 32, out->multiProcessorCount = 132;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024, out->maxThreadsDim[2] = 64;
  out->maxThreadsPerMultiProcessor = 2048, out->maxBlocksPerMultiProcessor = 32;
  out->maxGridSize[0] = 2147483647, out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->memPitch = 2147483647, out->totalConstMem = 65536, out->textureAlignment = 512;
  out->memoryBusWidth = 5120, out->l2CacheSize = 52428800, out->asyncEngineCount = 3;
  out->major = 9, out->minor = 0, out->unifiedAddressing = out->managedMemory = out->concurrentManagedAccess = 1;
  out->cooperativeLaunch = out->concurrentKernels = out->canMapHostMemory = out->memoryPoolsSupported = 1;
  out->clusterLaunch = 1, out->pciBusID = 16 + number, out->uuid.bytes[0] = static_cast<char>(1 + number);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr what, int) {
  switch (what) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
    case cudaDevAttrReservedSharedMemoryPerBlock: *out = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *out = 64; break;
    case cudaDevAttrMultiProcessorCount: *out = 132; break;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor: *out = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = 233472; break;
    case cudaDevAttrComputeCapabilityMajor: *out = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *out = 0; break;
    case cudaDevAttrMaxGridDimX: *out = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *out = 65535; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = 2048; break;
    case cudaDevAttrMaxRegistersPerBlock: *out = 65536; break;
    case cudaDevAttrL2CacheSize: *out = 52428800; break;
    default: *out = 1;
  }
  return cudaSuccess;
}

// The driver, for libraries that ask for its functions by name.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *out = of_driver(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(name, out, 0, flags, result);
}
}
