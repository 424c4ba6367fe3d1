"""Tiny models with an audio tower, and with clipped projections in both towers, and what transformers 5.24.0 (torch
2.15.0) computes.

Run it like make.py. Rewrites the folders `audio` and `clipped` beside this file.
"""

import json

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Gemma4ForConditionalGeneration
from transformers.models.gemma4.modeling_gemma4 import Gemma4ClippableLinear

from make import BEGIN, END, F, HERE, IMAGE, PAD, S, fill, groups, model, picture, text, vision

AUDIO, AUDIO_BEGIN, AUDIO_END = 11, 5, 6
FRAMES = [33, 26]
# No value may be so close to a bound that rounding decides whether it is cut.
MARGIN = 5e-5


def small_text(**over):
    return text(
        attention_bias=False,
        attention_k_eq_v=False,
        final_logit_softcapping=4.0,
        global_head_dim=8,
        head_dim=8,
        hidden_size=12,
        intermediate_size=14,
        layer_types=[S, F],
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-3,
        rope_parameters={
            S: {"rope_type": "default", "rope_theta": 200.0},
            F: {"rope_type": "default", "rope_theta": 7e3},
        },
        sliding_window=8,
        use_bidirectional_attention=None,
        **over,
    )


def audio(**over):
    return {"hidden_act": "silu", "model_type": "gemma4_audio", "num_hidden_layers": 2, **over}


VARIANTS = {
    # Three heads, keys of the future, two layers, no clipped projections; masked keys keep some weight.
    "audio": model(
        small_text(),
        None,
        audio_config=audio(
            attention_chunk_size=3,
            attention_context_left=7,
            attention_context_right=2,
            attention_invalid_logits_value=-5.0,
            attention_logit_cap=2.5,
            conv_kernel_size=4,
            gradient_clipping=2.1,
            hidden_size=12,
            num_attention_heads=3,
            output_proj_dims=14,
            residual_weight=0.7,
            rms_norm_eps=2e-2,
            subsampling_conv_channels=[12, 5],
            use_clipped_linears=False,
        ),
    ),
    # Bounds that cut in every projection of both towers, other sizes again, frequencies that do not divide by 4.
    "clipped": model(
        small_text(),
        vision(
            head_dim=8,
            intermediate_size=18,
            hidden_size=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            pooling_kernel_size=2,
            position_embedding_size=8,
            rms_norm_eps=4e-3,
            rope_parameters={"rope_type": "default", "rope_theta": 60.0},
            standardize=False,
            use_clipped_linears=True,
        ),
        audio_config=audio(
            attention_chunk_size=5,
            attention_context_left=4,
            attention_context_right=3,
            attention_invalid_logits_value=-1e9,
            attention_logit_cap=6.0,
            conv_kernel_size=2,
            gradient_clipping=1e10,
            hidden_size=10,
            num_attention_heads=2,
            output_proj_dims=10,
            residual_weight=0.3,
            rms_norm_eps=1e-3,
            subsampling_conv_channels=[9, 3],
            use_clipped_linears=True,
        ),
    ),
}
MELS = {"audio": 12, "clipped": 7}


def between(values, share):
    """The middle of the widest gap between values around a share of all that differ."""
    values = values.unique()  # sorted
    at = int(share * len(values))
    near = values[max(at - 20, 0) : at + 21]
    widest = near.diff().argmax()
    assert near.diff()[widest] > 2 * MARGIN
    return near[widest : widest + 2].mean()


def choose_bounds(number):
    """A hook that sets the bounds of a projection at its first call, from what it gets; one in three is infinite."""

    def hook(module, args):
        given = [("input_min", args[0], 0.1), ("input_max", args[0], 0.85)]
        for step, (name, values, share) in enumerate(given):
            if (number + step) % 3:
                getattr(module, name).copy_(between(values, share))
        out = module.linear(args[0].clamp(module.input_min, module.input_max))
        for step, (name, share) in enumerate([("output_min", 0.15), ("output_max", 0.9)]):
            if (number + step) % 3 != 1:
                getattr(module, name).copy_(between(out, share))

    return hook


def check_margins(net, limit):
    """Watches every clamp of the forward pass but those of the projections, which have their gaps."""
    clamp, closest, cut = torch.clamp, [float("inf")], [0, 0]

    def watched(x, low, high):
        if isinstance(high, float) and high == limit:
            closest[0] = min(closest[0], (x - low).abs().min().item(), (x - high).abs().min().item())
            cut[0] += (x < low).sum().item()
            cut[1] += (x > high).sum().item()
        return clamp(x, low, high)

    torch.clamp = watched
    net()
    torch.clamp = clamp
    assert closest[0] > MARGIN, closest
    return cut


def batch(name, config):
    """Two rows with a clip each, and a picture each if there is a vision tower."""
    generator = torch.Generator().manual_seed(8)
    words = lambda n: torch.randint(12, 96, (n,), generator=generator).tolist()
    clip = lambda frames: [AUDIO_BEGIN] + [AUDIO] * -(-frames // 4) + [AUDIO_END]
    features = torch.randn(2, max(FRAMES), MELS[name], generator=generator)
    mask = torch.arange(max(FRAMES)) < torch.tensor(FRAMES)[:, None]
    inputs = {"input_features": features, "input_features_mask": mask}
    first = [2] + words(4) + clip(FRAMES[0]) + words(3)
    second = [2] + words(2) + clip(FRAMES[1]) + words(5) + [PAD] + words(2)
    if config["vision_config"]:
        patch_len = 3 * config["vision_config"]["patch_size"] ** 2
        pictures = [picture(4, 4, 20, patch_len, generator), picture(2, 6, 20, patch_len, generator)]
        inputs["pixel_values"] = torch.stack([p for p, _ in pictures])
        inputs["image_position_ids"] = torch.stack([p for _, p in pictures])
        first = [2] + words(3) + [BEGIN] + [IMAGE] * 4 + [END] + first[1:]
        second = second + [BEGIN] + [IMAGE] * 3 + [END] + words(3)
    length = max(len(first), len(second))
    rows = [row + [PAD] * (length - len(row)) for row in (first, second)]
    ids = torch.tensor(rows)
    labels = torch.where((ids > 11) & (torch.rand(ids.shape, generator=generator) < 0.9), ids, -100)
    attended = torch.arange(length) < torch.tensor([[len(first)], [len(second)]])
    kinds = (ids == IMAGE).long() + 3 * (ids == AUDIO).long()
    return {"input_ids": ids, "labels": labels, "attention_mask": attended.long(), "mm_token_type_ids": kinds, **inputs}


def write(seed, name, config):
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    net = Gemma4ForConditionalGeneration._from_config(
        AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    inputs = batch(name, config)
    given = {key: value for key, value in inputs.items() if key != "labels"}
    clipped = [module for module in net.modules() if isinstance(module, Gemma4ClippableLinear)]
    hooks = [module.register_forward_pre_hook(choose_bounds(number)) for number, module in enumerate(clipped)]
    with torch.no_grad():
        fill(net, seed)
        if config["audio_config"]["use_clipped_linears"]:
            net(**given, use_cache=False)
        for hook in hooks:
            hook.remove()
        cut = check_margins(lambda: net(**given, use_cache=False), config["audio_config"]["gradient_clipping"])
    state = {key: value.clone() for key, value in net.state_dict().items() if key != "lm_head.weight"}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    seen = {}

    def keep(key):
        def hook(module, args, output):
            seen[key] = output

        return hook

    def keep_embeds(module, args, kwargs):
        seen["mid.inputs_embeds"] = kwargs["inputs_embeds"]

    net.model.embed_audio.register_forward_hook(keep("audio.features"))
    net.model.language_model.register_forward_pre_hook(keep_embeds, with_kwargs=True)
    if config["vision_config"]:
        net.model.embed_vision.register_forward_hook(keep("vision.features"))
    logits = net(**given, use_cache=False).logits
    seen["mid.inputs_embeds"].retain_grad()
    targets = inputs["labels"][:, 1:]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()

    case = {f"input.{key}": value for key, value in inputs.items() if key != "mm_token_type_ids"}
    case["input.input_features_mask"] = inputs["input_features_mask"].to(torch.uint8)
    case["input.vision_group_ids"] = groups((inputs["mm_token_type_ids"] == 1).long())
    case.update({key: value.detach() for key, value in seen.items()})
    case["out.logits"] = logits.detach()
    case["out.loss_mean"] = loss.detach()[None]
    case["out.num_valid"] = (targets != -100).sum()[None]
    save_file({key: value.contiguous() for key, value in case.items()}, folder / "case.safetensors")
    grads = {key: value.grad for key, value in net.named_parameters() if value.grad is not None}
    grads["inputs_embeds"] = seen["mid.inputs_embeds"].grad
    save_file(grads, folder / "grads.safetensors")
    print(name, "loss", loss.item(), "logits std", logits.std().item(), len(grads), "cut below and above", cut)
    print({key: (tuple(value.shape), round(value.std().item(), 3)) for key, value in seen.items()})


def main():
    torch.set_num_threads(1)
    for seed, (name, config) in enumerate(VARIANTS.items()):
        write(60 + seed, name, config)


if __name__ == "__main__":
    main()
