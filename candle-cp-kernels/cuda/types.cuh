// Element types, the launch parameters, and names for what PTX gives.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float widen(f16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
    return out;
}

// Rounded to nearest even; `low` goes to the lower address.
__device__ __forceinline__ u32 pack(float low, float high, bf16) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
__device__ __forceinline__ u32 pack(float low, float high, f16) {
    u32 out;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

__device__ __forceinline__ void narrow(float x, float& out) { out = x; }
__device__ __forceinline__ void narrow(float x, bf16& out) { out.bits = (u16)pack(x, 0.0f, bf16()); }
__device__ __forceinline__ void narrow(float x, f16& out) { out.bits = (u16)pack(x, 0.0f, f16()); }

__device__ __forceinline__ float exp2_fast(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}
__device__ __forceinline__ float log2_fast(float x) {
    float out;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LN_2 = 0.69314718055994530942f;
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// A [B, H, S, D] view whose last dimension is contiguous; strides in elements.
struct View {
    u64 data;
    i64 batch, head, token;
};

// A block of consecutive rows that one thread block owns: stacked queries (query, query head of the group), or keys of
// the chunk. `position` is that of the first key.
struct RowTile {
    u32 batch, start, count, position, first_entry, entries;
};

// A block that a row tile meets: keys for queries, stacked queries for keys. `full`: every pair is allowed.
struct Entry {
    u32 start, count, position, full;
};

// Key positions that a query may see.
struct Bounds {
    u32 first, end;
};

// One struct for all kernels; a kernel reads what it needs. All fields of 64 bits come first.
struct Params {
    View query, key, value, out, d_out;
    // [B, Hkv, Sq, G] rows: running output [.., D], running maximum (base 2) and sum; log-sum-exp and delta.
    float *sum_out, *max, *sum, *lse, *delta;
    // f32, [B, Hkv, Sq, G, D] and [B, Hkv, Sk, D].
    float *d_query, *d_key, *d_value;
    const Bounds* bounds;   // [B, Sq]
    const RowTile* tiles;
    const Entry* entries;
    u64 rows;               // B * Hkv * Sq * G
    u32 batch, key_heads, group, queries, keys, head_dim;
    u32 aligned;            // rows start on 16 bytes and hold whole pieces of 16 bytes
    float scale;
};
