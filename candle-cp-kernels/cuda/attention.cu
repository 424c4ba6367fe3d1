// The kernels of one element type and head size: compiled once for each pair, with TYPE and HEAD defined.
//
// An entry's name tells its tile: forward_r128_c64_w4x2 has 128 rows, 64 columns and 4 x 2 warps. Which of them a device
// runs is the table `tiles.rs`; the names there and here are compared by a test.
#include "forward.cuh"
#include "backward.cuh"
#include "rows.cuh"

#define ENTRY(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define TILING(r, c, m, n) Tiling<TYPE, HEAD, r, c, m, n>
#define FORWARD(r, c, m, n) \
    ENTRY(m * n * 32) forward_r##r##_c##c##_w##m##x##n(Params p) { forward<TYPE, TILING(r, c, m, n)>(p); }
#define BACKWARD_QUERIES(r, c, m, n) \
    ENTRY(m * n * 32) backward_queries_r##r##_c##c##_w##m##x##n(Params p) { backward<TYPE, TILING(r, c, m, n), false>(p); }
#define BACKWARD_KEYS(r, c, m, n) \
    ENTRY(m * n * 32) backward_keys_r##r##_c##c##_w##m##x##n(Params p) { backward<TYPE, TILING(r, c, m, n), true>(p); }

ENTRY(ROWS_THREADS) finish(Params p) { finish<TYPE>(p); }
ENTRY(ROWS_THREADS) output_dot(Params p) { output_dot<TYPE>(p); }

#if WIDE  // f32
#if HEAD <= 128
FORWARD(32, 32, 2, 4)
BACKWARD_QUERIES(32, 32, 2, 4)
BACKWARD_KEYS(32, 32, 2, 4)
#elif HEAD == 256
FORWARD(32, 16, 2, 2)
BACKWARD_QUERIES(16, 16, 1, 2)
BACKWARD_KEYS(16, 16, 1, 2)
#else
FORWARD(16, 16, 1, 2)
BACKWARD_QUERIES(16, 16, 1, 2)
BACKWARD_KEYS(16, 32, 1, 4)
#endif
#else
#if HEAD <= 128
FORWARD(128, 64, 4, 2)
BACKWARD_QUERIES(64, 64, 2, 4)
BACKWARD_KEYS(64, 64, 2, 4)
#elif HEAD == 256
FORWARD(128, 64, 4, 2)
FORWARD(64, 32, 2, 4)
BACKWARD_QUERIES(64, 64, 2, 4)
BACKWARD_QUERIES(32, 32, 1, 4)
BACKWARD_KEYS(64, 64, 2, 4)
BACKWARD_KEYS(32, 32, 1, 4)
#else
FORWARD(64, 64, 2, 4)
FORWARD(64, 32, 2, 4)
FORWARD(32, 32, 2, 4)
BACKWARD_QUERIES(64, 32, 2, 4)
BACKWARD_QUERIES(32, 32, 2, 4)
BACKWARD_QUERIES(16, 32, 1, 4)
BACKWARD_KEYS(32, 32, 2, 4)
BACKWARD_KEYS(16, 32, 1, 4)
#endif
#endif
