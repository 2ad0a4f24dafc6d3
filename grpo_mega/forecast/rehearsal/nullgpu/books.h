// What the null GPU counts. device.py reads the fields by their order: change both.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  uint64_t launches, gemms, flops;                         // kernels; products by cuBLAS, and their operations
  uint64_t waits;                                          // calls that the host waits in
  uint64_t to_device, to_device_bytes, to_device_pageable; // copies, their bytes, and bytes from memory that is not pinned
  uint64_t to_host, to_host_bytes, to_host_pageable;
  uint64_t within, within_bytes;
  uint64_t mallocs, frees;                                 // of the driver, each of which a GPU waits for
  uint64_t pinned, pinned_peak;                            // bytes of host memory
  uint64_t used, peak;                                     // bytes of the device, what others hold included
} Books;

void nullgpu_books(Books* out);
void nullgpu_launched(void);
void nullgpu_multiplied(uint64_t m, uint64_t n, uint64_t k, uint64_t batch);

#ifdef __cplusplus
}
#endif
