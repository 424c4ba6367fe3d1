#!/usr/bin/env python3
"""Compares the logits of a saved model folder in transformers with those computed here. Run by hand:

    python scripts/compare_transformers.py FOLDER --make-case case.safetensors --tokens 64
    cargo run --release --example parity -- FOLDER case.safetensors --dump results.safetensors
    python scripts/compare_transformers.py FOLDER --results results.safetensors

The first command writes random token ids (or those of --ids); any case file with `input.*` tensors does as well,
with images too. Needs torch, transformers and safetensors. Exit status: 0 within the tolerance, 1 past it,
2 if the comparison could not be made.
"""

import argparse
import inspect
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="model folder: config.json and safetensors")
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--results", metavar="FILE", help="what `parity --dump` wrote: input.* and out.logits")
    task.add_argument("--make-case", metavar="FILE", help="write a case with token ids only")
    parser.add_argument("--ids", help="token ids of the case, separated by commas")
    parser.add_argument("--tokens", type=int, default=64, help="number of random ids (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random ids (default: %(default)s)")
    parser.add_argument("--dtype", default="float32",
                        help="type to run in; `auto` is what config.json says (default: %(default)s, as parity does)")
    parser.add_argument("--tolerance", type=float, default=5e-4,
                        help="largest absolute difference of a logit that passes (default: %(default)s)")
    return parser.parse_args()


def stop(reason):
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


def make_case(args, config):
    """Ids that are plain text: no placeholder of the configuration, and not the padding token."""
    if args.ids:
        ids = [int(token) for token in args.ids.split(",")]
    else:
        text = getattr(config, "text_config", None) or config
        values = [value for part in (config, text) for key, value in vars(part).items() if key.endswith("token_id")]
        special = {token for value in values for token in (value if isinstance(value, list) else [value])}
        plain = torch.tensor([token for token in range(text.vocab_size) if token not in special])
        chosen = torch.randint(len(plain), (args.tokens,), generator=torch.Generator().manual_seed(args.seed))
        ids = plain[chosen].tolist()
    save_file({"input.input_ids": torch.tensor([ids])}, args.make_case, metadata={"format": "pt"})
    print(f"{args.make_case}: {len(ids)} token ids")


def load_model(folder, config, dtype):
    kind = AutoModelForImageTextToText if getattr(config, "text_config", None) is not None else AutoModelForCausalLM
    model, info = kind.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    print(f"{type(model).__name__}, {model.dtype}")
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            stop(f"{problem}: {sorted(map(str, info[problem]))[:5]} ({len(info[problem])} in all)")
    return model.eval()


def transformers_logits(model, case, config):
    accepted = set(inspect.signature(model.forward).parameters) - {"labels", "position_ids"}
    inputs = {name: case[f"input.{name}"] for name in accepted if f"input.{name}" in case}
    inputs = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    ids = inputs["input_ids"] = inputs["input_ids"].long()
    if getattr(config, "text_config", None) is not None:
        types = torch.zeros_like(ids)
        for kind, field in ((1, "image_token_id"), (2, "video_token_id"), (3, "audio_token_id")):
            if getattr(config, field, None) is not None:
                types[ids == getattr(config, field)] = kind
        inputs["mm_token_type_ids"] = types
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits


def compare(args, config):
    case = load_file(args.results)
    for name in ("input.input_ids", "out.logits"):
        if name not in case:
            stop(f"{args.results} has no {name}; write it with `parity ... --dump {args.results}`")
    if "input.doc_ids" in case:
        stop(f"{args.results} packs several documents into a row, which transformers does not mask by document")
    expected = transformers_logits(load_model(args.folder, config, args.dtype), case, config).double()
    found = case["out.logits"].double()
    if expected.shape != found.shape:
        stop(f"logits are {list(expected.shape)} in transformers and {list(found.shape)} in {args.results}")
    difference = (expected - found).abs()
    if "input.attention_mask" in case:
        difference[case["input.attention_mask"] == 0] = 0
    largest = difference.max().item()
    # Written so that a NaN fails.
    passed = largest <= args.tolerance
    print(f"{found.shape[0]} x {found.shape[1]} tokens, logits up to {expected.abs().max().item():.3f}: "
          f"largest difference {largest:.3e}, tolerance {args.tolerance:.1e}: {'ok' if passed else 'FAIL'}")
    return 0 if passed else 1


def main():
    args = arguments()
    config = AutoConfig.from_pretrained(args.folder)
    if args.make_case:
        make_case(args, config)
        return 0
    return compare(args, config)


if __name__ == "__main__":
    sys.exit(main())
