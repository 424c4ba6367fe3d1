// A tiled product c[m][n] = a[m][k] * b[k][n] in bf16 with f32 sums: 64 x 64 tiles, 4 warps, two stages of cp.async.
// m, n and k are multiples of 64, 64 and 32. Both tiles have rows padded by 16 bytes.
typedef unsigned short u16;
typedef unsigned int u32;

constexpr u32 TILE_M = 64, TILE_N = 64, TILE_K = 32;
constexpr u32 A_ROW = TILE_K + 8, B_ROW = TILE_N + 8;

struct Stage {
    u16 a[TILE_M][A_ROW];
    u16 b[TILE_K][B_ROW];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

__device__ __forceinline__ void load_stage(Stage& stage, const u16* a, const u16* b, u32 k0, u32 k, u32 n) {
    for (u32 i = threadIdx.x; i < TILE_M * TILE_K / 8; i += 128) {
        u32 row = i / (TILE_K / 8), column = i % (TILE_K / 8) * 8;
        copy16(&stage.a[row][column], a + (unsigned long long)row * k + k0 + column);
    }
    for (u32 i = threadIdx.x; i < TILE_K * TILE_N / 8; i += 128) {
        u32 row = i / (TILE_N / 8), column = i % (TILE_N / 8) * 8;
        copy16(&stage.b[row][column], b + (unsigned long long)(k0 + row) * n + column);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(128) matmul(const u16* a, const u16* b, float* c, u32 n, u32 k) {
    extern __shared__ __align__(16) unsigned char bytes[];
    Stage* stages = reinterpret_cast<Stage*>(bytes);
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    a += (unsigned long long)blockIdx.y * TILE_M * k;
    b += blockIdx.x * TILE_N;
    float sum[TILE_N / 8][4] = {};
    load_stage(stages[0], a, b, 0, k, n);
    for (u32 k0 = 0, step = 0; k0 < k; k0 += TILE_K, step++) {
        if (k0 + TILE_K < k) {
            load_stage(stages[(step + 1) % 2], a, b, k0 + TILE_K, k, n);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncthreads();
        Stage& stage = stages[step % 2];
        for (u32 kk = 0; kk < TILE_K; kk += 16) {
            u32 fa[4];
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(fa[0]), "=r"(fa[1]), "=r"(fa[2]), "=r"(fa[3])
                         : "r"(shared_address(&stage.a[warp * 16 + lane % 16][kk + lane / 16 * 8]))
                         : "memory");
#pragma unroll
            for (u32 j = 0; j < TILE_N / 8; j++) {
                u32 fb[2];
                asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                             : "=r"(fb[0]), "=r"(fb[1])
                             : "r"(shared_address(&stage.b[kk + lane % 16][j * 8]))
                             : "memory");
                asm volatile(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                    "{%0,%1,%2,%3};"
                    : "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3])
                    : "r"(fa[0]), "r"(fa[1]), "r"(fa[2]), "r"(fa[3]), "r"(fb[0]), "r"(fb[1]));
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 j = 0; j < TILE_N / 8; j++) {
        u32 row = blockIdx.y * TILE_M + warp * 16 + lane / 4, column = blockIdx.x * TILE_N + j * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(c + (unsigned long long)row * n + column) = make_float2(sum[j][0], sum[j][1]);
        *reinterpret_cast<float2*>(c + (unsigned long long)(row + 8) * n + column) = make_float2(sum[j][2], sum[j][3]);
    }
}
