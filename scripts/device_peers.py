"""The shapes that device-check measured, in PyTorch on the same device: prints a Markdown table of rates and ratios.

Peers are the back ends of scaled_dot_product_attention, one by one, and flex_attention (compiled, with its block mask).
Flops are counted as by device-check: pairs that are seen, backward 2.5 times forward. A peer that cannot run a shape is
listed with its reason. Rows are printed as they are found, so that what is there survives a time limit.

    device-check --json times.json
    python3 scripts/device_peers.py times.json --seconds 200
"""

import argparse
import json
import statistics
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

SDPA = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION,
    "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# What flex_attention needs where its own tiles do not fit into shared memory.
SMALL_TILES = {
    "BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_M1": 32, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 32,
    "num_stages": 1, "num_warps": 4,
}  # fmt: skip


def milliseconds(run, device, seconds, most=10):
    """Median after two runs to warm up."""

    def once():
        if device == "cpu":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    begin = time.perf_counter()
    once(), once()
    times = [once()]
    while len(times) < most and time.perf_counter() - begin < seconds:
        times.append(once())
    return statistics.median(times)


def sdpa(backend, q, k, v, window):
    mask = None
    if window:
        i = torch.arange(q.shape[2], device=q.device)
        mask = (i[None] <= i[:, None]) & (i[None] > i[:, None] - window)

    def run():
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    return run


def flex(q, k, v, window, options):
    def seen(b, h, i, j):
        return (j <= i) & (j > i - window) if window else j <= i

    length = q.shape[2]
    block_mask = create_block_mask(seen, None, None, length, length, device=q.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=block_mask, kernel_options=options)


def measured(make, shape, device, seconds):
    """Milliseconds of forward and backward; one shape's tensors live no longer than this."""
    size = (1, shape["heads"], shape["tokens"], shape["head_dim"])
    q, k, v, d_out = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    run = make(q, k, v, shape["window"])
    forward = milliseconds(run, device, seconds)
    out = run()
    try:
        back = lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)  # noqa: E731
        return forward, milliseconds(back, device, seconds), None
    except Exception as error:  # forward alone is a result too
        return forward, None, error


def reason(error):
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:160].replace("|", "/")


def row(name, shape, found):
    forward, backward, error = found
    flops = shape["forward_flops"] / 1e9
    cells = [shape["head_dim"], shape["tokens"], shape["window"] or "-", name]
    for ms, factor, ours in ((forward, 1, shape["forward_ms"]), (backward, 2.5, shape["backward_ms"])):
        cells += [f"{ms:.3f}", f"{factor * flops / ms:.0f}", f"{ms / ours:.2f}"] if ms else ["-", "-", "-"]
    print("|", " | ".join(map(str, cells)), "|", flush=True)
    return [f"{name}, D {shape['head_dim']}, {shape['tokens']} tokens, backward: {reason(error)}"] if error else []


def flex_peer(shape, device, seconds):
    try:
        return measured(lambda *x: flex(*x, None), shape, device, seconds)
    except Exception:
        torch._dynamo.reset()
        return measured(lambda *x: flex(*x, SMALL_TILES), shape, device, seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", help="what device-check wrote with --json")
    parser.add_argument("--seconds", type=float, default=200, help="for everything together")
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself")
    args = parser.parse_args()
    begin = time.monotonic()
    with open(args.shapes) as file:
        shapes = json.load(file)
    print("\n## PyTorch in the same run\n")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} is here, but sees no CUDA device.")
        return
    print(f"torch {torch.__version__}, bf16, the same shapes. The ratio is PyTorch's time by ours: above 1, ours is faster.\n")
    print("| D | tokens | window | peer | forward ms | TFLOP/s | ratio | backward ms | TFLOP/s | ratio |")
    print("|" + " --- |" * 10, flush=True)
    notes = []
    # Short lengths first: where time runs out, every head size and mask has been seen.
    shapes.sort(key=lambda shape: shape["tokens"])
    jobs = [(name, shape) for shape in shapes for name in SDPA] + [("flex", shape) for shape in shapes]
    for number, (name, shape) in enumerate(jobs):
        left = args.seconds - (time.monotonic() - begin)
        what = f"{name}, D {shape['head_dim']}, {shape['tokens']} tokens, window {shape['window'] or '-'}"
        if left <= 0:
            notes.append(f"{what}: not run, out of time")
            continue
        share = left / (len(jobs) - number) / 4
        try:
            if name == "flex":
                found = flex_peer(shape, args.device, share)
            else:
                found = measured(lambda *x: sdpa(SDPA[name], *x), shape, args.device, share)
            notes += row(name, shape, found)
        except Exception as error:
            notes.append(f"{what}: {reason(error)}")
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print()
    for note in notes:
        print(f"- {note}")


if __name__ == "__main__":
    main()
