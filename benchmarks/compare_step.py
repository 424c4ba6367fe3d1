"""A training step on the CPU beside Hugging Face transformers, alternating: prints a Markdown table.

Both run forward + backward + AdamW of the same random text-only Gemma 4 in f32 (56 M parameters: 5 sliding layers to 1
global one, head sizes 256 and 512) on one packed row of two documents. Ours is `benchmarks/step.rs`, started from the
checkpoint that the peer writes. Neither scores a token against the first token of another document: the peer's labels
are -100 there. A step to warm up, then the best of `--steps`, then the best of `--rounds`.
First losses have to agree to 1e-4. Later ones need not: fresh weights of this model enlarge rounding errors from layer to
layer, and AdamW's first steps go by the signs of the gradients.

    pip install torch==2.15.0 transformers==5.24.0 safetensors
    cargo build --release -p candle-finetune --example bench_step
    python benchmarks/compare_step.py --threads 2 --seq 1024 2048 4096
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
VOCABULARY = 32768


def make_model():
    import torch
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(0)
    config = Gemma4TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=2048,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        num_hidden_layers=6,
        sliding_window=1024,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        num_global_key_value_heads=2,
        global_head_dim=512,
        attention_k_eq_v=True,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCABULARY,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    )
    return Gemma4ForCausalLM._from_config(config, attn_implementation="sdpa").train()


def make_row(seq):
    """Random tokens in two documents, cut at a third."""
    import torch

    ids = torch.randint(10, VOCABULARY, (1, seq), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(seq // 3), torch.arange(seq - seq // 3)])[None]
    return ids, positions


def save(seq, folder):
    """The checkpoint and the row, for ours."""
    from safetensors.torch import save_file

    make_model().save_pretrained(folder)
    ids, positions = make_row(seq)
    save_file({"input_ids": ids, "position_ids": positions}, pathlib.Path(folder) / "batch.safetensors")


def peer(seq, threads, steps):
    """The peer's steps; prints one JSON line."""
    import resource
    import time

    import torch

    torch.set_num_threads(threads)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids, positions = make_row(seq)
    labels = torch.where(positions == 0, -100, ids)
    losses, seconds = [], []
    for _ in range(1 + steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    print(json.dumps({
        "tokens_per_s": seq / min(seconds[1:]),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }))


def call(command):
    output = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def compare(seq, args):
    """The best of the rounds of both."""
    best = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--save", folder, "--seq", str(seq)], check=True,
                       stderr=subprocess.DEVNULL)
        common = ["--threads", args.threads, "--steps", args.steps]
        for _ in range(args.rounds):
            runs = {
                "peer": [sys.executable, __file__, "--peer", "--seq", seq, *common],
                "ours": [ROOT / "target/release/examples/bench_step", folder, *common, *args.ours.split()],
            }
            for who, command in runs.items():
                result = call(command)
                if who not in best or result["tokens_per_s"] > best[who]["tokens_per_s"]:
                    best[who] = result
    return best["peer"], best["ours"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ours", default="", help="more flags for ours, such as '--recompute'")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--save", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.save:
        return save(args.seq[0], args.save)
    if args.peer:
        return peer(args.seq[0], args.threads, args.steps)
    print("| S | torch tokens/s | ours tokens/s | ours ÷ torch | torch first loss | our first loss | torch last loss "
          "| our last loss | torch peak GiB | our peak GiB |")
    print("|" + " --- |" * 10)
    for seq in args.seq:
        theirs, ours = compare(seq, args)
        print(f"| {seq} | {theirs['tokens_per_s']:.0f} | {ours['tokens_per_s']:.0f} "
              f"| {ours['tokens_per_s'] / theirs['tokens_per_s']:.2f} "
              f"| {theirs['first_loss']:.5f} | {ours['first_loss']:.5f} "
              f"| {theirs['last_loss']:.5f} | {ours['last_loss']:.5f} "
              f"| {theirs['peak_rss_gib']:.2f} | {ours['peak_rss_gib']:.2f} |", flush=True)
        if not abs(theirs["first_loss"] - ours["first_loss"]) <= 1e-4:
            sys.exit(f"S = {seq}: the first losses differ, so the two do not compute the same")


if __name__ == "__main__":
    main()
