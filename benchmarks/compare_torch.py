"""Attention on the CPU beside PyTorch, in one run, alternating: prints a Markdown table of GFLOP/s and ratios.

PyTorch runs flex_attention (compiled; it has no backward on the CPU) and scaled_dot_product_attention with the dense
mask; ours is `benchmarks/attention.rs`. Same shapes, masks and flop counts (live pairs only; forward + backward counts
3.5 times forward). Also the f32 matrix rate of both, measured in the same run. `kernels` is our forward + backward
without Candle's graph, which adds every gradient to a tensor of zeros (in bf16 that takes longer than attention).

    pip install torch==2.15.0 numpy
    cargo build --release -p candle-cp --example bench_attention
    python benchmarks/compare_torch.py --threads 2 --rounds 2 --dtypes f32 bf16
"""

import argparse
import itertools
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# S, D, query heads, key heads, window (0: none)
SHAPES = [(2048, 256, 8, 4, 1024), (2048, 512, 8, 2, 0), (4096, 256, 8, 4, 1024), (4096, 512, 8, 2, 0)]


def torch_peer(threads, index, dtype):
    """One shape in PyTorch; prints one JSON line."""
    import time

    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(threads)
    torch.manual_seed(0)

    def best(f, n=3):
        f()
        times = []
        for _ in range(n):
            start = time.perf_counter()
            f()
            times.append(time.perf_counter() - start)
        return min(times)

    s, d, hq, hkv, window = SHAPES[index]
    x = torch.randn(2048, 2048)
    out = {"matmul": 2 * 2048**3 / best(lambda: x @ x) / 1e9}
    dtype = torch.float32 if dtype == "f32" else torch.bfloat16
    q, k, v, g = (torch.randn(1, h, s, d).to(dtype) for h in (hq, hkv, hkv, hq))
    document = (torch.arange(s) >= s // 3).long()
    group = torch.full((s,), -1)
    group[64:320], group[s // 2 : s // 2 + 256] = 0, 1

    def allowed(b, h, i, j):
        ok = j <= i
        if window:
            ok = (ok | ((group[i] == group[j]) & (group[i] >= 0))) & (j > i - window)
        return ok & (document[i] == document[j])

    i = torch.arange(s)
    dense = allowed(0, 0, i[:, None], i[None, :])
    flops = 4 * int(dense.sum()) * d * hq / 1e9
    blocks = create_block_mask(allowed, 1, None, s, s, device="cpu")
    flex = torch.compile(flex_attention)
    out["flex_fwd"] = flops / best(lambda: flex(q, k, v, block_mask=blocks, scale=d**-0.5, enable_gqa=True))

    def sdpa():
        mask = dense[None, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=d**-0.5, enable_gqa=True)

    out["sdpa_fwd"] = flops / best(sdpa)
    for t in (q, k, v):
        t.requires_grad_(True)
    out["sdpa_fwd_bwd"] = 3.5 * flops / best(lambda: sdpa().backward(g))
    print(json.dumps(out))


def ours(threads, index, dtype):
    program = ROOT / "target/release/examples/bench_attention"
    command = [program, "--threads", str(threads), "--only", str(index), "--dtypes", dtype]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    row = json.loads(lines[1])
    return {
        "matmul": json.loads(lines[0])["matmul_f32_gflops"],
        "fwd": row["fwd"]["gflops"],
        "fwd_bwd": row["fwd_bwd"]["gflops"],
        "kernels": row["kernels_fwd_bwd"]["gflops"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", choices=["f32", "bf16"], default=["f32", "bf16"])
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer is not None:
        return torch_peer(args.threads, args.peer, args.dtypes[0])
    print("| type | S | D | window | torch matmul | flex fwd | SDPA fwd+bwd | our matmul | our fwd | our fwd+bwd | kernels "
          "| fwd ÷ flex | fwd+bwd ÷ SDPA | kernels ÷ SDPA | fwd ÷ matmul | kernels ÷ matmul |")
    print("|" + " --- |" * 16)
    for dtype, (index, (s, d, _, _, window)) in itertools.product(args.dtypes, enumerate(SHAPES)):
        best = {}
        for _ in range(args.rounds):
            command = [sys.executable, __file__, "--peer", str(index), "--threads", str(args.threads), "--dtypes", dtype]
            peer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            mine = {f"our_{name}": value for name, value in ours(args.threads, index, dtype).items()}
            for name, value in (json.loads(peer) | mine).items():
                best[name] = max(best.get(name, 0), value)
        b = best
        matmul = max(b["matmul"], b["our_matmul"])
        print(f"| {dtype} | {s} | {d} | {window or '-'} | {b['matmul']:.0f} | {b['flex_fwd']:.0f} | {b['sdpa_fwd_bwd']:.0f} "
              f"| {b['our_matmul']:.0f} | {b['our_fwd']:.0f} | {b['our_fwd_bwd']:.0f} | {b['our_kernels']:.0f} "
              f"| {b['our_fwd'] / b['flex_fwd']:.2f} | {b['our_fwd_bwd'] / b['sdpa_fwd_bwd']:.2f} "
              f"| {b['our_kernels'] / b['sdpa_fwd_bwd']:.2f} "
              f"| {b['our_fwd'] / matmul:.2f} | {b['our_kernels'] / matmul:.2f} |", flush=True)


if __name__ == "__main__":
    main()
