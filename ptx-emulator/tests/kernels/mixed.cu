// What compilers make of ordinary code: switches, loops of different lengths, local arrays, 64-bit division, sums over
// warps, votes, constants, structures as parameters.
typedef unsigned int u32;
typedef unsigned long long u64;

__constant__ u32 weights[4] = {3, 5, 7, 11};

struct Input {
    const u32* values;
    u64 divisor;
    int shift;
    unsigned char bytes[3];
};

__device__ u32 warp_sum(u32 value) {
    for (u32 offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

extern "C" __global__ void mixed(Input input, u32* out, u32* total) {
    __shared__ u32 sums[4];
    u32 local[8];
    u32 thread = threadIdx.x, value = input.values[thread];
    for (u32 i = 0; i < 8; i++) local[i] = value * weights[i % 4] + input.bytes[i % 3];
    u32 steps = 0;
    for (u64 x = value | 1; x != 1 && steps < 60; steps++) x = x % 2 ? 3 * x + 1 : x / 2;
    u32 picked = local[steps % 8];
    switch (value % 6) {
        case 0: picked += 1; break;
        case 1: picked ^= 0x55; break;
        case 2: picked *= 9; break;
        case 3: picked = picked << input.shift | picked >> (32 - input.shift); break;
        case 4: picked = (u32)((((u64)picked << 32) + steps) / input.divisor); break;
        default: picked = (u32)((int)picked / 3);
    }
    u32 odd = __popc(__ballot_sync(0xffffffffu, picked & 1));
    u32 sum = warp_sum(picked);
    if (thread % 32 == 0) sums[thread / 32] = sum;
    __syncthreads();
    u32 all = 0;
    for (u32 i = 0; i < 4; i++) all += sums[i];
    out[thread] = picked + odd + all;
    atomicAdd(total, steps);
}
