// Backward pass of one chunk, twice: once by blocks of queries for dQ, once by blocks of keys for dK and dV. Scores are
// computed in both, nothing is added atomically, and so the result does not depend on the order of thread blocks
// (Dao, FlashAttention-2, 2023, algorithm 2).
//
// Both are one program. A block keeps two tiles of its own rows, X and X', and goes through the tiles Y and Y':
//   by queries:  X = Q, X' = dO, Y = K, Y' = V;   dQ += dS Y
//   by keys:     X = K, X' = V,  Y = Q, Y' = dO;  dK += dS Y, dV += P Y'      (P and dS are transposed here)
// with P = exp(scale X Y^T - lse) and dS = P * (X' Y'^T - delta) * scale.
//
// Shared memory: X, X' [R, D], Y, Y' [C, D], dS [R, C], by keys P [R, C], then lse, delta and bounds of the queries.
#pragma once
#include "shape.cuh"

template <typename T, typename S, bool BY_KEYS>
struct Backward {
    static constexpr int QUERIES = BY_KEYS ? S::C : S::R;
    const Params& p;
    const RowTile& tile;
    u32 head;
    u8 *x, *x_grad, *y, *y_grad, *pairs_grad, *pairs;
    float *lse, *delta;   // [QUERIES], lse in base 2
    Bounds* bounds;       // [QUERIES]
    float sums[S::MT][S::ND][4];
    float value_sums[BY_KEYS ? S::MT : 1][BY_KEYS ? S::ND : 1][4];

    __device__ __forceinline__ Backward(const Params& p, const RowTile& tile) : p(p), tile(tile), head(blockIdx.y) {
        x = shared;
        x_grad = x + S::ROWS_BYTES;
        y = x_grad + S::ROWS_BYTES;
        y_grad = y + S::COLUMNS_BYTES;
        pairs_grad = y_grad + S::COLUMNS_BYTES;
        pairs = pairs_grad + S::PAIRS_BYTES;
        lse = (float*)(pairs + (BY_KEYS ? S::PAIRS_BYTES : 0));
        delta = lse + QUERIES;
        bounds = (Bounds*)(delta + QUERIES);
    }

    __device__ __forceinline__ Rows<T> queries(const View& view) const {
        return Rows<T>::queries(view, tile.batch, head, p.group);
    }
    __device__ __forceinline__ Rows<T> keys(const View& view) const { return Rows<T>::keys(view, tile.batch, head); }

    // Rows of the block, or entries of its list.
    template <int ROWS>
    __device__ __forceinline__ void post(u8* to, const Rows<T>& rows, u32 start, u32 count) {
        load<T, ROWS, S::D, S::THREADS>(to, rows, start, count, p.head_dim, p.aligned);
    }
    __device__ __forceinline__ void post_y(const Entry& entry) {
        post<S::C>(y, BY_KEYS ? queries(p.query) : keys(p.key), entry.start, entry.count);
        commit();
    }
    __device__ __forceinline__ void post_y_grad(const Entry& entry) {
        post<S::C>(y_grad, BY_KEYS ? queries(p.d_out) : keys(p.value), entry.start, entry.count);
        commit();
    }

    // lse = inf makes the probabilities of a query 0: for those that do not exist, and those that see no key.
    __device__ __forceinline__ void load_statistics(u32 start, u32 count) {
        u64 first = ((u64)tile.batch * p.key_heads + head) * p.queries * p.group + start;
        for (u32 r = threadIdx.x; r < QUERIES; r += S::THREADS) {
            float l = r < count ? p.lse[first + r] : -infinity();
            lse[r] = l == -infinity() ? infinity() : l * LOG2_E;
            delta[r] = r < count ? p.delta[first + r] : 0.0f;
        }
        load_bounds<QUERIES, S::THREADS>(bounds, p, tile.batch, start, count);
    }

    __device__ __forceinline__ void begin() {
        post<S::R>(x, BY_KEYS ? keys(p.key) : queries(p.query), tile.start, tile.count);
        post<S::R>(x_grad, BY_KEYS ? keys(p.value) : queries(p.d_out), tile.start, tile.count);
        if (BY_KEYS) {
            clear(sums);
            clear(value_sums);
        } else {
            load_statistics(tile.start, tile.count);
            move_sums<S, false>(sums, d_rows(p.d_query), tile.count, p.head_dim);
        }
    }

    // Where the gradients of this block's rows are.
    __device__ __forceinline__ float* d_rows(float* all) const {
        u64 rows = BY_KEYS ? p.keys : (u64)p.queries * p.group;
        return all + (((u64)tile.batch * p.key_heads + head) * rows + tile.start) * p.head_dim;
    }

    // Probabilities and gradients of scores, from scores `s` and gradients of probabilities `d`, to shared memory.
    __device__ __forceinline__ void fold(float (&s)[S::MT][S::NT][4], float (&d)[S::MT][S::NT][4], const Entry& entry) {
        float scale = p.scale * LOG2_E;
        u32 position = BY_KEYS ? tile.position : entry.position, count = BY_KEYS ? tile.count : entry.count;
#pragma unroll
        for (int m = 0; m < S::MT; m++)
#pragma unroll
            for (int n = 0; n < S::NT; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    u32 r = S::row(m, e), c = S::pair_column(n, e);
                    u32 query = BY_KEYS ? c : r, key = BY_KEYS ? r : c;
                    bool seen = entry.full || sees(bounds[query], key, position, count);
                    float probability = seen ? exp2_fast(s[m][n][e] * scale - lse[query]) : 0.0f;
                    s[m][n][e] = probability;
                    d[m][n][e] = seen ? probability * (d[m][n][e] - delta[query]) * p.scale : 0.0f;
                }
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 r = S::row(m, half * 2), c = S::pair_column(n, 0);
                    int e = half * 2;
                    store_pair<T, S::C>(pairs_grad, r, c, d[m][n][e], d[m][n][e + 1], T());
                    if (BY_KEYS) store_pair<T, S::C>(pairs, r, c, s[m][n][e], s[m][n][e + 1], T());
                }
            }
    }

    __device__ __forceinline__ void visit(const Entry& entry, const Entry* next) {
        u32 row = S::warp_row(), column = S::warp_column() * (S::NT * 8), part = S::warp_column() * (S::ND * 8);
        wait<0>();
        __syncthreads();   // Y' is here; the last Y was read
        post_y(entry);
        if (BY_KEYS) load_statistics(entry.start, entry.count);
        float s[S::MT][S::NT][4], d[S::MT][S::NT][4];
        scores<T, S::D, S::MT, S::NT>(d, x_grad, row, y_grad, column, T());
        wait<0>();
        __syncthreads();   // Y and the statistics are here; by queries, Y' was read
        if (!BY_KEYS && next) post_y_grad(*next);
        scores<T, S::D, S::MT, S::NT>(s, x, row, y, column, T());
        fold(s, d, entry);
        __syncthreads();   // dS and P are here
        if constexpr (BY_KEYS) {
            accumulate<T, S::C, S::D, S::MT, S::ND>(value_sums, pairs, row, y_grad, part, T());
            __syncthreads();   // Y' was read
            if (next) post_y_grad(*next);
        }
        accumulate<T, S::C, S::D, S::MT, S::ND>(sums, pairs_grad, row, y, part, T());
    }

    __device__ __forceinline__ void end() {
        move_sums<S, true>(sums, d_rows(BY_KEYS ? p.d_key : p.d_query), tile.count, p.head_dim);
        if constexpr (BY_KEYS) move_sums<S, true>(value_sums, d_rows(p.d_value), tile.count, p.head_dim);
    }
};

template <typename T, typename S, bool BY_KEYS>
__device__ __forceinline__ void backward(const Params& p) {
    RowTile tile = p.tiles[blockIdx.x];
    Backward<T, S, BY_KEYS> pass(p, tile);
    const Entry* entries = p.entries + tile.first_entry;
    pass.begin();
    pass.post_y_grad(entries[0]);
    for (u32 i = 0; i < tile.entries; i++) {
        bool last = i + 1 == tile.entries;
        pass.visit(entries[i], last ? nullptr : entries + i + 1);
    }
    pass.end();
}
