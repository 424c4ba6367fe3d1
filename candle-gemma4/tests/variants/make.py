"""Tiny models whose settings are unlike the released ones, and what transformers 5.24.0 (torch 2.15.0) computes.

    pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy
    python make.py
    python make_text_only.py
    python make_towers.py
    python make_families.py
    python make_lora.py

Rewrites one folder per variant beside this file. Weights, pixels and tokens are random, from fixed seeds.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Gemma4ForConditionalGeneration

HERE = Path(__file__).parent
IMAGE, BEGIN, END, VIDEO, PAD = 9, 7, 8, 10, 3


def text(**over):
    config = {
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "enable_moe_block": False,
        "eos_token_id": [1, 5],
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 24,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": 40,
        "model_type": "gemma4_text",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_kv_shared_layers": 0,
        "pad_token_id": PAD,
        "vocab_size": 96,
        **over,
    }
    return {**config, "num_hidden_layers": len(config["layer_types"])}


def vision(**over):
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 20,
        "intermediate_size": 28,
        "model_type": "gemma4_vision",
        "num_hidden_layers": 2,
        "patch_size": 2,
        **over,
    }


def model(text_config, vision_config, **over):
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "audio_token_id": 11,
        "boi_token_id": BEGIN,
        "eoi_token_id": END,
        "image_token_id": IMAGE,
        "model_type": "gemma4",
        "text_config": text_config,
        "video_token_id": VIDEO,
        "vision_config": vision_config,
        **over,
    }


S, F = "sliding_attention", "full_attention"
VARIANTS = {
    # Untied head, biases, no soft cap, causal images, keys as values, other eps, thetas and factors everywhere.
    "untied": model(
        text(
            attention_bias=True,
            attention_k_eq_v=True,
            final_logit_softcapping=None,
            global_head_dim=12,
            head_dim=8,
            layer_types=[S, F, S, F],
            num_global_key_value_heads=2,
            rms_norm_eps=3e-3,
            rope_parameters={
                S: {"rope_type": "linear", "rope_theta": 400.0, "factor": 2.0},
                F: {"rope_type": "proportional", "rope_theta": 9e3, "partial_rotary_factor": 0.6, "factor": 3.0},
            },
            sliding_window=5,
            use_bidirectional_attention=None,
        ),
        vision(
            head_dim=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            pooling_kernel_size=2,
            position_embedding_size=16,
            rms_norm_eps=2e-2,
            rope_parameters={"rope_type": "default", "rope_theta": 30.0},
            standardize=False,
        ),
        tie_word_embeddings=False,
    ),
    # Tied head that only the top level speaks of, separate values, so the global key heads must not count.
    "separate_values": model(
        text(
            attention_bias=False,
            attention_k_eq_v=False,
            final_logit_softcapping=3.0,
            global_head_dim=10,
            head_dim=14,
            layer_types=[F, S, F],
            num_global_key_value_heads=1,
            rms_norm_eps=1e-4,
            rope_parameters={
                S: {"rope_type": "default", "rope_theta": 77.0},
                F: {"rope_type": "proportional", "rope_theta": 3e4, "partial_rotary_factor": 0.5},
            },
            sliding_window=7,
            tie_word_embeddings=False,
            use_bidirectional_attention="vision",
        ),
        vision(
            head_dim=12,
            num_attention_heads=2,
            num_key_value_heads=1,
            pooling_kernel_size=2,
            position_embedding_size=11,
            rms_norm_eps=1e-3,
            rope_parameters={"rope_type": "axial", "rope_theta": 250.0},
            standardize=True,
        ),
    ),
}


def fill(net, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(net.state_dict().items()):
        if tensor.dim() == 0:  # the bounds of a clipped projection
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.2 * noise
        elif name.endswith(("layer_scalar", "std_scale")):
            value = 0.6 + 0.5 * noise.sigmoid()
        elif name.endswith(("std_bias", "bias", "position_embedding_table", "embed_tokens.weight")):
            value = 0.4 * noise
        else:
            value = noise / tensor.shape[-1] ** 0.5
        if "q_norm" in name or "k_norm" in name:
            value = value * 0.6
        tensor.copy_(value)


def picture(width, height, total, patch_len, generator):
    pixels = torch.zeros(total, patch_len)
    positions = torch.full((total, 2), -1)
    pixels[: width * height] = torch.rand(width * height, patch_len, generator=generator)
    positions[: width * height] = torch.tensor([(x, y) for y in range(height) for x in range(width)])
    return pixels, positions


def batch(config):
    """Two rows of 29 and 23 tokens with a picture each; padding tokens stand inside the rows as well."""
    generator = torch.Generator().manual_seed(5)
    words = lambda n: torch.randint(12, 96, (n,), generator=generator).tolist()
    patch_len = 3 * config["vision_config"]["patch_size"] ** 2
    pictures = [picture(6, 4, 32, patch_len, generator), picture(4, 8, 32, patch_len, generator)]
    first = [2] + words(5) + [PAD] + words(2) + [BEGIN] + [IMAGE] * 6 + [END] + words(12)
    second = [2] + words(3) + [BEGIN] + [IMAGE] * 8 + [END] + words(2) + [PAD] + words(6)
    length = len(first)
    mask = [[1] * length, [1] * len(second) + [0] * (length - len(second))]
    ids = torch.tensor([first, second + [PAD] * (length - len(second))])
    labels = torch.where((ids > 11) & (torch.rand(ids.shape, generator=generator) < 0.9), ids, -100)
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": torch.tensor(mask),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.stack([p for p, _ in pictures]),
        "image_position_ids": torch.stack([p for _, p in pictures]),
    }


def groups(kinds):
    starts = (kinds == 1) & (torch.nn.functional.pad(kinds, (1, 0))[:, :-1] == 0)
    return torch.where(kinds == 1, starts.long().cumsum(1) - 1, -1)


def main():
    torch.set_num_threads(1)
    for seed, (name, config) in enumerate(VARIANTS.items()):
        folder = HERE / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        net = Gemma4ForConditionalGeneration._from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager"
        ).eval()
        with torch.no_grad():
            fill(net, 40 + seed)
        state = {key: value.clone() for key, value in net.state_dict().items()}
        if config.get("tie_word_embeddings", True):
            state.pop("lm_head.weight")
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

        inputs = batch(config)
        embeds = []
        hook = net.model.language_model.register_forward_pre_hook(
            lambda module, args, kwargs: embeds.append(kwargs["inputs_embeds"]), with_kwargs=True
        )
        features = net.model.get_image_features(
            inputs["pixel_values"], inputs["image_position_ids"], return_dict=True
        ).pooler_output
        given = {key: value for key, value in inputs.items() if key != "labels"}
        logits = net(**given, use_cache=False).logits
        hook.remove()
        embeds[0].retain_grad()
        targets = inputs["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()

        case = {f"input.{key}": value for key, value in inputs.items() if key != "mm_token_type_ids"}
        case["input.vision_group_ids"] = groups(inputs["mm_token_type_ids"])
        case["vision.features"] = torch.cat(list(features)).detach()
        case["mid.inputs_embeds"] = embeds[0].detach()
        case["out.logits"] = logits.detach()
        case["out.loss_mean"] = loss.detach()[None]
        case["out.num_valid"] = (targets != -100).sum()[None]
        save_file({key: value.contiguous() for key, value in case.items()}, folder / "case.safetensors")
        grads = {key: value.grad for key, value in net.named_parameters() if value.grad is not None}
        grads["inputs_embeds"] = embeds[0].grad
        save_file(grads, folder / "grads.safetensors")
        print(name, "loss", loss.item(), "logits std", logits.std().item(), len(grads))


if __name__ == "__main__":
    main()
