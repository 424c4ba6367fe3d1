// How a thread block and its warps share a tile of R rows by C columns, and the head of size D.
#pragma once
#include "product.cuh"

// WM x WN warps. In [R, C] a warp has R / WM rows and C / WN columns; in [R, D] the same rows and D / WN columns.
template <typename T, int D_, int R_, int C_, int WM_, int WN_>
struct Tiling {
    static constexpr int D = D_, R = R_, C = C_, WM = WM_, WN = WN_;
    static constexpr int THREADS = WM * WN * 32;
    static constexpr int MT = R / WM / 16;
    static constexpr int NT = C / WN / 8;
    static constexpr int ND = D / WN / 8;
    static constexpr u32 ROWS_BYTES = R * D * sizeof(T);
    static constexpr u32 COLUMNS_BYTES = C * D * sizeof(T);
    static constexpr u32 PAIRS_BYTES = R * C * sizeof(T);
    static_assert(MT * WM * 16 == R && NT * WN * 8 == C && ND * WN * 8 == D, "warps divide the tile");

    static __device__ __forceinline__ u32 warp_row() { return threadIdx.x / 32 / WN * (MT * 16); }
    static __device__ __forceinline__ u32 warp_column() { return threadIdx.x / 32 % WN; }
    // Row in the tile of element e (0..4) of row block m, and column in the tile of pairs or of the head.
    static __device__ __forceinline__ u32 row(int m, int e) { return warp_row() + m * 16 + lane() / 4 + e / 2 * 8; }
    static __device__ __forceinline__ u32 pair_column(int n, int e) {
        return warp_column() * (NT * 8) + n * 8 + lane() % 4 * 2 + e % 2;
    }
    static __device__ __forceinline__ u32 head_column(int n, int e) {
        return warp_column() * (ND * 8) + n * 8 + lane() % 4 * 2 + e % 2;
    }
};

extern __shared__ __align__(128) u8 shared[];

// Moves the sums of a tile of rows [R, D] to or from global memory: row r of `first` on, `width` numbers each. The
// branches are plain on purpose: with selected addresses instead, all of them are kept in registers, and some are spilled.
template <typename S, bool WRITE>
__device__ __forceinline__ void move_sums(float (&sums)[S::MT][S::ND][4], float* first, u32 count, u32 width) {
    if (!WRITE) clear(sums);
#pragma unroll
    for (int m = 0; m < S::MT; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = S::row(m, half * 2), column = S::head_column(0, 0);
            if (r >= count) continue;
            float* line = first + (u64)r * width + column;
#pragma unroll
            for (int n = 0; n < S::ND; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    if (column + n * 8 + i >= width) continue;
                    float &sum = sums[m][n][half * 2 + i], &at = line[n * 8 + i];
                    if (WRITE) at = sum;
                    else sum = at;
                }
        }
}

// Bounds of stacked rows start..start + count; nothing is visible from the others.
template <int ROWS, int THREADS>
__device__ __forceinline__ void load_bounds(Bounds* to, const Params& p, u32 batch, u32 start, u32 count) {
    for (u32 r = threadIdx.x; r < ROWS; r += THREADS) {
        Bounds none = {0, 0};
        to[r] = r < count ? p.bounds[(u64)batch * p.queries + (start + r) / p.group] : none;
    }
}

__device__ __forceinline__ bool sees(Bounds b, u32 key, u32 position, u32 count) {
    return key < count && b.first <= position + key && position + key < b.end;
}
