// Forward pass of one chunk of keys: continues the running maximum, sum and output of every row it visits
// (Dao, FlashAttention-2, 2023, algorithm 1; the state lives in global memory between chunks).
//
// Shared memory: queries [R, D], keys [C, D], values [C, D], probabilities [R, C], row statistics [R, WN], bounds [R].
// The next keys are on their way while probabilities are multiplied by values, and values while scores are computed.
#pragma once
#include "shape.cuh"

template <typename T, typename S>
struct Forward {
    const Params& p;
    const RowTile& tile;
    u32 head;
    u8 *queries, *keys, *values, *pairs;
    float* statistics;   // [R, WN]
    Bounds* bounds;      // [R]
    float out[S::MT][S::ND][4];
    float max[S::MT][2], sum[S::MT][2];   // of rows lane / 4 and lane / 4 + 8; `sum` of this thread's columns only

    __device__ __forceinline__ Forward(const Params& p, const RowTile& tile) : p(p), tile(tile), head(blockIdx.y) {
        queries = shared;
        keys = queries + S::ROWS_BYTES;
        values = keys + S::COLUMNS_BYTES;
        pairs = values + S::COLUMNS_BYTES;
        statistics = (float*)(pairs + S::PAIRS_BYTES);
        bounds = (Bounds*)(statistics + S::R * S::WN);
    }

    __device__ __forceinline__ u64 first_row() const {
        return ((u64)tile.batch * p.key_heads + head) * p.queries * p.group + tile.start;
    }
    __device__ __forceinline__ void post(u8* to, const View& view, const Entry& entry) {
        load<T, S::C, S::D, S::THREADS>(to, Rows<T>::keys(view, tile.batch, head), entry.start, entry.count, p.head_dim,
                                        p.aligned);
        commit();
    }

    __device__ __forceinline__ void begin() {
        load<T, S::R, S::D, S::THREADS>(queries, Rows<T>::queries(p.query, tile.batch, head, p.group), tile.start,
                                        tile.count, p.head_dim, p.aligned);
        load_bounds<S::R, S::THREADS>(bounds, p, tile.batch, tile.start, tile.count);
        move_sums<S, false>(out, p.sum_out + first_row() * p.head_dim, tile.count, p.head_dim);
#pragma unroll
        for (int m = 0; m < S::MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 r = S::row(m, half * 2);
                float s = r < tile.count ? p.sum[first_row() + r] : 0.0f;
                max[m][half] = s == 0.0f ? -infinity() : p.max[first_row() + r];
                sum[m][half] = S::warp_column() == 0 && lane() % 4 == 0 ? s : 0.0f;
            }
    }

    // Scores in base 2, -inf where the mask is; the maximum of each row over this warp's columns goes to `statistics`.
    __device__ __forceinline__ void mask(float (&s)[S::MT][S::NT][4], const Entry& entry) {
        float scale = p.scale * LOG2_E;
#pragma unroll
        for (int m = 0; m < S::MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 r = S::row(m, half * 2);
                Bounds b = bounds[r];
                float top = -infinity();
#pragma unroll
                for (int n = 0; n < S::NT; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float& x = s[m][n][half * 2 + i];
                        bool seen = entry.full || sees(b, S::pair_column(n, i), entry.position, entry.count);
                        x = seen ? x * scale : -infinity();
                        top = fmaxf(top, x);
                    }
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                if (lane() % 4 == 0) statistics[r * S::WN + S::warp_column()] = top;
            }
    }

    // Probabilities to `pairs`; folds them into the sums and rescales what there is.
    __device__ __forceinline__ void fold(float (&s)[S::MT][S::NT][4]) {
#pragma unroll
        for (int m = 0; m < S::MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 r = S::row(m, half * 2);
                float top = max[m][half];
#pragma unroll
                for (int w = 0; w < S::WN; w++) top = fmaxf(top, statistics[r * S::WN + w]);
                // A row that has seen nothing stays at -inf. The maximum passes over NaN, but the sum does not: a NaN
                // score makes it NaN, and it stays so.
                float base = top == -infinity() ? 0.0f : top;
                float rescale = exp2_fast(max[m][half] - base), total = 0.0f;
                max[m][half] = top;
#pragma unroll
                for (int n = 0; n < S::NT; n++) {
                    float first = exp2_fast(s[m][n][half * 2] - base), second = exp2_fast(s[m][n][half * 2 + 1] - base);
                    total += first + second;
                    store_pair<T, S::C>(pairs, r, S::pair_column(n, 0), first, second, T());
                }
                sum[m][half] = sum[m][half] * rescale + total;
#pragma unroll
                for (int n = 0; n < S::ND; n++) {
                    out[m][n][half * 2] *= rescale;
                    out[m][n][half * 2 + 1] *= rescale;
                }
            }
    }

    __device__ __forceinline__ void visit(const Entry& entry, const Entry* next) {
        wait<0>();
        __syncthreads();   // keys are here; the last values were read
        post(values, p.value, entry);
        float s[S::MT][S::NT][4];
        scores<T, S::D, S::MT, S::NT>(s, queries, S::warp_row(), keys, S::warp_column() * (S::NT * 8), T());
        mask(s, entry);
        __syncthreads();   // statistics are here; keys were read
        if (next) post(keys, p.key, *next);
        fold(s);
        if (next) wait<1>();
        else wait<0>();
        __syncthreads();   // probabilities and values are here
        accumulate<T, S::C, S::D, S::MT, S::ND>(out, pairs, S::warp_row(), values, S::warp_column() * (S::ND * 8), T());
    }

    __device__ __forceinline__ void end() {
        __syncthreads();   // the last statistics were read
#pragma unroll
        for (int m = 0; m < S::MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float s = sum[m][half];
                s += __shfl_xor_sync(0xffffffffu, s, 1);
                s += __shfl_xor_sync(0xffffffffu, s, 2);
                if (lane() % 4 == 0) statistics[S::row(m, half * 2) * S::WN + S::warp_column()] = s;
            }
        __syncthreads();
#pragma unroll
        for (int m = 0; m < S::MT; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 r = S::row(m, half * 2);
                if (S::warp_column() == 0 && lane() % 4 == 0 && r < tile.count) {
                    float s = 0.0f;
                    for (int w = 0; w < S::WN; w++) s += statistics[r * S::WN + w];
                    p.sum[first_row() + r] = s;
                    p.max[first_row() + r] = max[m][half];
                }
            }
        move_sums<S, true>(out, p.sum_out + first_row() * p.head_dim, tile.count, p.head_dim);
    }
};

template <typename T, typename S>
__device__ __forceinline__ void forward(const Params& p) {
    RowTile tile = p.tiles[blockIdx.x];
    Forward<T, S> pass(p, tile);
    const Entry* entries = p.entries + tile.first_entry;
    pass.post(pass.keys, p.key, entries[0]);
    pass.begin();
    commit();
    for (u32 i = 0; i < tile.entries; i++) {
        bool last = i + 1 == tile.entries;
        pass.visit(entries[i], last ? nullptr : entries + i + 1);
    }
    pass.end();
}
