// Products of tiles in shared memory, with sums in registers.
//
// A warp owns MT blocks of 16 rows and NT blocks of 8 columns. Thread l holds of each block, as `mma.m16n8k16` gives
// them, the elements (l / 4, c), (l / 4, c + 1), (l / 4 + 8, c), (l / 4 + 8, c + 1) with c = 2 * (l % 4).
// For f32 the same elements are computed by plain fused multiply-adds, so the rest of a kernel is the same.
#pragma once
#include "tile.cuh"

__device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }

__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_two_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <int MT, int NT>
__device__ __forceinline__ void clear(float (&sums)[MT][NT][4]) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[m][n][e] = 0.0f;
}

// sums[r, c] = sum over D of x[row + r, :] * y[column + c, :]; x and y are tiles of width D.
template <typename T, int D, int MT, int NT>
__device__ __forceinline__ void scores(float (&sums)[MT][NT][4], const u8* x, u32 row, const u8* y, u32 column, T type) {
    u32 x_base = shared_address(x), y_base = shared_address(y), l = lane();
    clear(sums);
#pragma unroll 2
    for (u32 piece = 0; piece < D / 8; piece += 2) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            load_matrices(a[m], x_base + piece_offset<T, D>(row + m * 16 + l % 16, piece + l / 16));
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            u32 b[4];
            if (n + 1 < NT) {
                load_matrices(b, y_base + piece_offset<T, D>(column + n * 8 + l % 8 + l / 16 * 8, piece + l / 8 % 2));
            } else {
                load_two_matrices(b, y_base + piece_offset<T, D>(column + n * 8 + l % 8, piece + l / 8 % 2));
            }
#pragma unroll
            for (int m = 0; m < MT; m++) {
                multiply(sums[m][n], a[m], b[0], b[1], type);
                if (n + 1 < NT) multiply(sums[m][n + 1], a[m], b[2], b[3], type);
            }
        }
    }
}

// sums[r, c] += sum over k < K of p[row + r, k] * y[k, column + c]; p is a tile of width K, y one of K rows of width D.
template <typename T, int K, int D, int MT, int NT>
__device__ __forceinline__ void accumulate(float (&sums)[MT][NT][4], const u8* p, u32 row, const u8* y, u32 column, T type) {
    static_assert(NT % 2 == 0, "columns are loaded in pairs of blocks");
    u32 p_base = shared_address(p), y_base = shared_address(y), l = lane();
#pragma unroll 1
    for (u32 k = 0; k < K; k += 16) {
        u32 a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            load_matrices(a[m], p_base + piece_offset<T, K>(row + m * 16 + l % 16, k / 8 + l / 16));
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            u32 b[4];
            load_transposed(b, y_base + piece_offset<T, D>(k + l % 16, column / 8 + n + l / 16));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                multiply(sums[m][n], a[m], b[0], b[1], type);
                multiply(sums[m][n + 1], a[m], b[2], b[3], type);
            }
        }
    }
}

template <int WIDTH>
__device__ __forceinline__ float4 piece_of(const u8* tile, u32 row, u32 piece) {
    return *(const float4*)(tile + piece_offset<float, WIDTH>(row, piece));
}
__device__ __forceinline__ float dot(float sum, float4 a, float4 b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

template <typename T, int D, int MT, int NT>
__device__ __forceinline__ void scores(float (&sums)[MT][NT][4], const u8* x, u32 row, const u8* y, u32 column, float) {
    u32 r = row + lane() / 4, c = column + lane() % 4 * 2;
    clear(sums);
#pragma unroll 1
    for (u32 piece = 0; piece < D / 4; piece++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float4 first = piece_of<D>(y, c + n * 8, piece), second = piece_of<D>(y, c + n * 8 + 1, piece);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                float4 upper = piece_of<D>(x, r + m * 16, piece), lower = piece_of<D>(x, r + m * 16 + 8, piece);
                float(&s)[4] = sums[m][n];
                s[0] = dot(s[0], upper, first), s[1] = dot(s[1], upper, second);
                s[2] = dot(s[2], lower, first), s[3] = dot(s[3], lower, second);
            }
        }
    }
}

template <typename T, int K, int D, int MT, int NT>
__device__ __forceinline__ void accumulate(float (&sums)[MT][NT][4], const u8* p, u32 row, const u8* y, u32 column, float) {
    u32 r = row + lane() / 4, c = column + lane() % 4 * 2;
#pragma unroll 1
    for (u32 k = 0; k < K; k++) {
        float upper[MT], lower[MT];
#pragma unroll
        for (int m = 0; m < MT; m++) {
            upper[m] = *(const float*)(p + offset<float, K>(r + m * 16, k));
            lower[m] = *(const float*)(p + offset<float, K>(r + m * 16 + 8, k));
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float2 b = *(const float2*)(y + offset<float, D>(k, c + n * 8));
#pragma unroll
            for (int m = 0; m < MT; m++) {
                float(&s)[4] = sums[m][n];
                s[0] = fmaf(upper[m], b.x, s[0]), s[1] = fmaf(upper[m], b.y, s[1]);
                s[2] = fmaf(lower[m], b.x, s[2]), s[3] = fmaf(lower[m], b.y, s[3]);
            }
        }
    }
}

// Two neighbouring elements of a tile of width WIDTH.
template <typename T, int WIDTH>
__device__ __forceinline__ void store_pair(u8* tile, u32 row, u32 column, float first, float second, T type) {
    *(u32*)(tile + offset<T, WIDTH>(row, column)) = pack(first, second, type);
}
template <typename T, int WIDTH>
__device__ __forceinline__ void store_pair(u8* tile, u32 row, u32 column, float first, float second, float) {
    *(float2*)(tile + offset<float, WIDTH>(row, column)) = make_float2(first, second);
}
