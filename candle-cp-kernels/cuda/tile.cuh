// Tiles of rows in shared memory, and how they get there.
//
// A tile [rows, WIDTH] is kept in pieces of 16 bytes. Within a row the piece number is combined with the row number, so
// that the eight rows that one `ldmatrix` reads lie in different banks.
#pragma once
#include "types.cuh"

template <typename T, int WIDTH>
__device__ __forceinline__ u32 piece_offset(u32 row, u32 piece) {
    constexpr u32 PIECES = WIDTH * sizeof(T) / 16;
    static_assert(PIECES >= 2 && (PIECES & (PIECES - 1)) == 0, "a row is a power of two of pieces");
    constexpr u32 SHIFT = PIECES >= 8 ? 0 : PIECES == 4 ? 1 : 2;
    constexpr u32 MASK = PIECES >= 8 ? 7 : PIECES - 1;
    return (row * PIECES + (piece ^ ((row >> SHIFT) & MASK))) * 16;
}

template <typename T, int WIDTH>
__device__ __forceinline__ u32 offset(u32 row, u32 column) {
    constexpr u32 EACH = 16 / sizeof(T);
    return piece_offset<T, WIDTH>(row, column / EACH) + (column % EACH) * sizeof(T);
}

__device__ __forceinline__ u32 shared_address(const void* p) {
    return (u32)__cvta_generic_to_shared(p);
}

// 16 bytes to shared memory; zeros where `valid` is false.
__device__ __forceinline__ void copy_piece(u32 to, const void* from, bool valid) {
    u32 bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Where rows of a tile are in global memory.
template <typename T>
struct Rows {
    const T* data;
    i64 token, head;
    u32 group;   // 0: one row per token

    // Stacked queries of key head `h`: row r is query r / group, query head h * group + r % group.
    __device__ __forceinline__ static Rows queries(const View& v, u32 b, u32 h, u32 group) {
        return {(const T*)v.data + b * v.batch + (i64)h * group * v.head, v.token, v.head, group};
    }
    __device__ __forceinline__ static Rows keys(const View& v, u32 b, u32 h) {
        return {(const T*)v.data + b * v.batch + h * v.head, v.token, 0, 0};
    }
    __device__ __forceinline__ const T* row(u32 r) const {
        if (group <= 1) return data + r * token;
        return data + (r / group) * token + (r % group) * head;
    }
};

// Posts the copy of `count` rows from `start` on; rows up to ROWS and columns from `head_dim` on become 0.
template <typename T, int ROWS, int WIDTH, int THREADS>
__device__ __forceinline__ void load(u8* tile, const Rows<T>& rows, u32 start, u32 count, u32 head_dim, bool aligned) {
    constexpr u32 EACH = 16 / sizeof(T);
    constexpr u32 PIECES = WIDTH / EACH;
    u32 base = shared_address(tile);
    if (aligned) {
#pragma unroll 4
        for (u32 i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
            u32 r = i / PIECES, piece = i % PIECES;
            bool valid = r < count && piece * EACH < head_dim;
            const T* from = valid ? rows.row(start + r) + piece * EACH : rows.data;
            copy_piece(base + piece_offset<T, WIDTH>(r, piece), from, valid);
        }
    } else {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < ROWS * WIDTH; i += THREADS) {
            u32 r = i / WIDTH, column = i % WIDTH;
            T x;
            narrow(0.0f, x);
            if (r < count && column < head_dim) x = rows.row(start + r)[column];
            *(T*)(tile + offset<T, WIDTH>(r, column)) = x;
        }
    }
}
