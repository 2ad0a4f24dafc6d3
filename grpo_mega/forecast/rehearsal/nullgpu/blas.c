// cuBLAS and cuBLASLt, which count products and compute none.
#include "books.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <stdlib.h>
#include <string.h>

static char handle_room[1024];

typedef struct {
  uint64_t rows, columns, batch;
} Layout;  // lies in the room of an opaque cublasLtMatrixLayout

cublasStatus_t cublasCreate_v2(cublasHandle_t* out) { return *out = (cublasHandle_t)handle_room, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasLtCreate(cublasLtHandle_t* out) {
  return *out = (cublasLtHandle_t)handle_room, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t* out) { return *out = 0, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t* out) {
  return *out = 0, CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetVersion_v2(cublasHandle_t h, int* out) { return *out = 130101, CUBLAS_STATUS_SUCCESS; }
size_t cublasLtGetVersion(void) { return 130101; }
size_t cublasLtGetCudartVersion(void) { return 13000; }
const char* cublasGetStatusString(cublasStatus_t s) { return "null GPU"; }
const char* cublasLtGetStatusString(cublasStatus_t s) { return "null GPU"; }

// Layouts and descriptors of cuBLASLt.
cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t out, size_t size, cudaDataType type,
                                                 uint64_t rows, uint64_t columns, int64_t ld) {
  *(Layout*)out = (Layout){rows, columns, 1};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
  *out = calloc(1, sizeof **out);
  return cublasLtMatrixLayoutInit_internal(*out, sizeof **out, type, rows, columns, ld);
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t what,
                                                const void* value, size_t size) {
  if (what == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) ((Layout*)layout)->batch = *(const int32_t*)value;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(const cublasLtMatrixLayout_t layout) {
  return free((void*)layout), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t compute, cudaDataType_t scale) {
  return *out = calloc(1, sizeof **out), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(const cublasLtMatmulDesc_t out) {
  return free((void*)out), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) {
  return *out = calloc(1, sizeof **out), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(const cublasLtMatmulPreference_t out) {
  return free((void*)out), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                              cublasLtMatrixLayout_t to, cublasLtMatmulPreference_t preference,
                                              int asked, cublasLtMatmulHeuristicResult_t out[], int* found) {
  memset(out, 0, sizeof *out);
  return *found = 1, CUBLAS_STATUS_SUCCESS;
}

// Products.
cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void* alpha, const void* A,
                              cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b, const void* beta,
                              const void* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t to,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t room, cudaStream_t stream) {
  const Layout *left = (const Layout*)a, *result = (const Layout*)to;
  uint64_t inner = left->rows * left->columns / (result->rows ? result->rows : 1);  // whether transposed or not
  nullgpu_multiplied(result->rows, result->columns, inner, result->batch);
  return CUBLAS_STATUS_SUCCESS;
}

#define OPERANDS cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb
#define COUNTED(m, n, k, batch) nullgpu_multiplied(m, n, k, batch); return CUBLAS_STATUS_SUCCESS

cublasStatus_t cublasSgemm_v2(OPERANDS, int m, int n, int k, const float* alpha, const float* A, int lda,
                              const float* B, int ldb, const float* beta, float* C, int ldc) {
  COUNTED(m, n, k, 1);
}
cublasStatus_t cublasDgemm_v2(OPERANDS, int m, int n, int k, const double* alpha, const double* A, int lda,
                              const double* B, int ldb, const double* beta, double* C, int ldc) {
  COUNTED(m, n, k, 1);
}
cublasStatus_t cublasGemmEx(OPERANDS, int m, int n, int k, const void* alpha, const void* A, cudaDataType at, int lda,
                            const void* B, cudaDataType bt, int ldb, const void* beta, void* C, cudaDataType ct,
                            int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  COUNTED(m, n, k, 1);
}
cublasStatus_t cublasSgemmStridedBatched(OPERANDS, int m, int n, int k, const float* alpha, const float* A, int lda,
                                         long long sa, const float* B, int ldb, long long sb, const float* beta,
                                         float* C, int ldc, long long sc, int batch) {
  COUNTED(m, n, k, batch);
}
cublasStatus_t cublasGemmStridedBatchedEx(OPERANDS, int m, int n, int k, const void* alpha, const void* A,
                                          cudaDataType at, int lda, long long sa, const void* B, cudaDataType bt,
                                          int ldb, long long sb, const void* beta, void* C, cudaDataType ct, int ldc,
                                          long long sc, int batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algorithm) {
  COUNTED(m, n, k, batch);
}
cublasStatus_t cublasSgemv_v2(cublasHandle_t h, cublasOperation_t t, int m, int n, const float* alpha, const float* A,
                              int lda, const float* x, int incx, const float* beta, float* y, int incy) {
  COUNTED(m, n, 1, 1);
}
