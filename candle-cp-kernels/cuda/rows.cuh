// What is done once per row, a warp to each: the end of forward and the start of backward.
#pragma once
#include "types.cuh"

constexpr u32 ROWS_THREADS = 256;

// Row number in [B, Hkv, Sq, G], and where its vector is in a view [B, Hq, Sq, D].
struct Row {
    u64 index;
    bool exists;

    __device__ __forceinline__ explicit Row(const Params& p) {
        index = (u64)blockIdx.x * (ROWS_THREADS / 32) + threadIdx.x / 32;
        exists = index < p.rows;
    }
    template <typename T>
    __device__ __forceinline__ T* in(const View& view, const Params& p) const {
        u64 g = index % p.group, query = index / p.group % p.queries;
        u64 head = index / p.group / p.queries % p.key_heads, batch = index / p.group / p.queries / p.key_heads;
        return (T*)view.data + batch * view.batch + (head * p.group + g) * view.head + query * view.token;
    }
};

// out = running output / sum, lse = maximum + log(sum); 0 and -inf where nothing was seen.
template <typename T>
__device__ __forceinline__ void finish(const Params& p) {
    Row row(p);
    if (!row.exists) return;
    float sum = p.sum[row.index];
    float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    T* out = row.in<T>(p.out, p);
    for (u32 i = threadIdx.x % 32; i < p.head_dim; i += 32) narrow(p.sum_out[row.index * p.head_dim + i] * inverse, out[i]);
    if (threadIdx.x % 32 == 0)
        p.lse[row.index] = sum == 0.0f ? -infinity() : (p.max[row.index] + log2_fast(sum)) * LN_2;
}

// delta = sum of out * d_out over the head.
template <typename T>
__device__ __forceinline__ void output_dot(const Params& p) {
    Row row(p);
    if (!row.exists) return;
    const T *out = row.in<T>(p.out, p), *d_out = row.in<T>(p.d_out, p);
    float sum = 0.0f;
    for (u32 i = threadIdx.x % 32; i < p.head_dim; i += 32) sum = fmaf(widen(out[i]), widen(d_out[i]), sum);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) p.delta[row.index] = sum;
}
