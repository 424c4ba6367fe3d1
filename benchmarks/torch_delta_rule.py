"""The gated delta rule on the CPU beside transformers' chunked PyTorch code, in one run, alternating: a Markdown table.

Theirs is `torch_chunk_gated_delta_rule` (f32, forward and autograd); ours is `benchmarks/delta_rule.rs`. Same shapes, one
document, best of the rounds. `kernels` is our forward + backward without Candle's graph; `maps` is what a rank does
besides under context parallelism when a document passes through all of its slice.

    pip install torch==2.15.0 transformers==5.24.0
    cargo build --release -p candle-cp --example bench_delta_rule
    python benchmarks/torch_delta_rule.py --threads 2 --rounds 2
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# S, key heads, value heads, dk and dv
SHAPES = [(4096, 16, 16, 128), (4096, 16, 32, 128), (1024, 16, 48, 128)]


def torch_peer(threads, index):
    """One shape in PyTorch; prints one JSON line."""
    import time

    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    torch.set_num_threads(threads)
    torch.manual_seed(0)

    def best(f, n=2):
        f()
        times = []
        for _ in range(n):
            start = time.perf_counter()
            f()
            times.append(time.perf_counter() - start)
        return min(times)

    s, hk, hv, d = SHAPES[index]
    q, k, v, d_out = (torch.randn(1, s, h, d) for h in (hk, hk, hv, hv))
    g, beta = -0.5 * torch.rand(1, s, hv), torch.rand(1, s, hv)

    def forward():
        return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    with torch.no_grad():
        out = {"fwd": best(forward)}
    for t in (q, k, v, g, beta):
        t.requires_grad_(True)
    out["fwd_bwd"] = best(lambda: forward().backward(d_out))
    print(json.dumps(out))


def ours(threads, index):
    program = ROOT / "target/release/examples/bench_delta_rule"
    command = [program, "--threads", str(threads), "--only", str(index)]
    row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0])
    return {name: row[name] for name in ("fwd", "fwd_bwd", "kernels_fwd_bwd", "maps")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", type=int, choices=range(len(SHAPES)))
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer is not None:
        return torch_peer(args.threads, args.peer)
    print("| S | heads | D | torch fwd | torch fwd+bwd | our fwd | our fwd+bwd | kernels | maps "
          "| fwd ratio | fwd+bwd ratio | kernels ratio |")
    print("|" + " --- |" * 12)
    for index, (s, hk, hv, d) in enumerate(SHAPES):
        if args.only not in (None, index):
            continue
        best = {}
        for _ in range(args.rounds):
            command = [sys.executable, __file__, "--peer", str(index), "--threads", str(args.threads)]
            peer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            mine = {f"our_{name}": value for name, value in ours(args.threads, index).items()}
            for name, value in (json.loads(peer) | mine).items():
                best[name] = min(best.get(name, value), value)
        b = best
        print(f"| {s} | {hk}, {hv} | {d} | {b['fwd']:.3f} | {b['fwd_bwd']:.3f} | {b['our_fwd']:.3f} | {b['our_fwd_bwd']:.3f} "
              f"| {b['our_kernels_fwd_bwd']:.3f} | {b['our_maps']:.3f} | {b['fwd'] / b['our_fwd']:.2f} "
              f"| {b['fwd_bwd'] / b['our_fwd_bwd']:.2f} | {b['fwd_bwd'] / b['our_kernels_fwd_bwd']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
