"""The short causal convolution with SiLU on the CPU beside PyTorch's conv1d, in one run, alternating: a Markdown table.

PyTorch runs conv1d with one group per channel on [1, C, S], the layout that it wants, without the transposes that a model
needs around it; ours is `benchmarks/conv.rs` on [1, S, C]. f32, S = 4096, C = 6144, 4 taps. Milliseconds, best of all rounds.

    pip install torch==2.15.0 numpy
    cargo build --release -p candle-cp --example bench_conv
    python benchmarks/compare_conv.py --threads 2 --rounds 3
"""

import argparse
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENS, CHANNELS, TAPS = 4096, 6144, 4


def torch_peer(threads):
    """Prints one JSON line."""
    import time

    import torch
    from torch.nn.functional import conv1d, silu

    torch.set_num_threads(threads)
    torch.manual_seed(0)

    def best(f, n=5):
        f()
        times = []
        for _ in range(n):
            start = time.perf_counter()
            f()
            times.append(time.perf_counter() - start)
        return min(times)

    x, gradient = torch.randn(1, CHANNELS, TOKENS), torch.randn(1, CHANNELS, TOKENS)
    weight = torch.randn(CHANNELS, 1, TAPS)

    def forward():
        return silu(conv1d(x, weight, padding=TAPS - 1, groups=CHANNELS)[..., :TOKENS])

    out = {"fwd": best(forward)}
    x.requires_grad_(True)
    weight.requires_grad_(True)

    def both():
        x.grad = weight.grad = None
        forward().backward(gradient)

    print(json.dumps(out | {"fwd_bwd": best(both)}))


def last_line(command):
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return torch_peer(args.threads)
    threads = ["--threads", str(args.threads)]
    best = {}
    for _ in range(args.rounds):
        peer = last_line([sys.executable, __file__, "--peer", *threads])
        ours = last_line([ROOT / "target/release/examples/bench_conv", *threads])
        for who, times in (("torch", peer), ("ours", ours)):
            for name, seconds in times.items():
                best[who, name] = min(best.get((who, name), seconds), seconds)
    print("| pass | torch, ms | ours, ms | times as fast |\n| --- | --- | --- | --- |")
    for name, peer in (("fwd", "fwd"), ("fwd_bwd", "fwd_bwd"), ("kernels_fwd_bwd", "fwd_bwd")):
        torch, ours = best["torch", peer], best["ours", name]
        print(f"| {name} | {torch * 1e3:.1f} | {ours * 1e3:.1f} | {torch / ours:.2f} |")


if __name__ == "__main__":
    main()
