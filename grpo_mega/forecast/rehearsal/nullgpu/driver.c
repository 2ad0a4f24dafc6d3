// CUDA's driver (libcuda.so.1), for what asks it rather than the runtime: Triton, torch's autograd and allocator.
// What is not defined here is defined by the build, and succeeds.
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

static char room[4096];  // what handles point to

static void* of_runtime(const char* name) { return dlsym(RTLD_DEFAULT, name); }
static int launched(void) {
  static void (*count)(void);
  if (!count) count = (void (*)(void))of_runtime("nullgpu_launched");
  return count(), 0;
}

int nullgpu_zero(void) { return 0; }

int cuDriverGetVersion(int* out) { return *out = 13000, 0; }
int cuDeviceGetCount(int* out) { return ((int (*)(int*))of_runtime("cudaGetDeviceCount"))(out); }
int cuDeviceGet(int* out, int number) { return *out = number, 0; }
int cuCtxGetDevice(int* out) { return ((int (*)(int*))of_runtime("cudaGetDevice"))(out); }
int cuDeviceGetAttribute(int* out, int what, int number) {
  return ((int (*)(int*, int, int))of_runtime("cudaDeviceGetAttribute"))(out, what, number);
}
int cuDeviceTotalMem_v2(size_t* out, int number) {
  size_t unused;
  return ((int (*)(size_t*, size_t*))of_runtime("cudaMemGetInfo"))(&unused, out);
}
int cuDeviceGetName(char* out, int size, int number) { return strncpy(out, "null GPU", size), 0; }
int cuDeviceGetUuid(void* out, int number) { return memset(out, number + 1, 16), 0; }
int cuGetErrorString(int error, const char** out) { return *out = "null GPU", 0; }
int cuGetErrorName(int error, const char** out) { return *out = "null GPU", 0; }

// Tables of functions that are not public, which NVRTC asks for and goes without.
int cuGetExportTable(const void** out, const void* id) { return *out = NULL, 500 /* not found */; }

int cuCtxGetCurrent(void** out) { return *out = room, 0; }
int cuDevicePrimaryCtxGetState(int number, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }
int cuDevicePrimaryCtxRetain(void** out, int number) { return *out = room, 0; }
int cuPointerGetAttribute(void* out, int what, unsigned long p) { return *(unsigned long*)out = p, 0; }
int cuMemGetAllocationGranularity(size_t* out, const void* properties, int option) { return *out = 2 << 20, 0; }

int cuModuleLoadData(void** out, const void* image) { return *out = room, 0; }
int cuModuleLoadDataEx(void** out, const void* image, unsigned n, void* o, void** v) { return *out = room, 0; }
int cuModuleGetFunction(void** out, void* module, const char* name) { return *out = room, 0; }
int cuLibraryLoadData(void** out, const void* code, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
  return *out = room, 0;
}
int cuLibraryGetKernel(void** out, void* library, const char* name) { return *out = room, 0; }
int cuKernelGetFunction(void** out, void* kernel) { return *out = room, 0; }
int cuFuncGetAttribute(int* out, int what, void* function) {
  return *out = what == 0 ? 1024 /* threads of a block */ : what == 4 ? 64 /* registers */ : 0, 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, void* function, int threads, size_t shared) {
  return *out = 2, 0;
}
int cuOccupancyMaxActiveClusters(int* out, void* function, void* configuration) { return *out = 16, 0; }
int cuLaunchKernel(void* function) { return launched(); }
int cuLaunchKernelEx(void* configuration, void* function) { return launched(); }
int cuLaunchCooperativeKernel(void* function) { return launched(); }

int cuGetProcAddress_v2(const char* name, void** out, int version, unsigned long flags, int* result) {
  *out = of_runtime(name);
  if (!*out) *out = (void*)nullgpu_zero;
  if (result) *result = 0;
  return 0;
}
int cuGetProcAddress(const char* name, void** out, int version, unsigned long flags) {
  return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
