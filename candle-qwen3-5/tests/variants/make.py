"""Tiny text-only Qwen 3.5 models whose settings are unlike the released ones, written by transformers 5.24.0
(torch 2.15.0), and what they compute.

    python make.py

Rewrites the folders beside this file. `config.json` and `model.safetensors` are what `save_pretrained` writes: experts
one by one. Documents run alone and are put together in one row, as in `fixtures/`; positions differ along the three axes.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
L, F = "linear_attention", "full_attention"
DOCUMENTS = [11, 1, 20, 8]
PAD = 2

DENSE = dict(
    model_type="qwen3_5_text",
    vocab_size=96,
    hidden_size=24,
    intermediate_size=28,
    num_hidden_layers=5,
    layer_types=[F, L, L, F, L],
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=12,
    attention_bias=True,
    rms_norm_eps=2e-3,
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 300.0,
        "partial_rotary_factor": 0.84,
        "mrope_section": [3, 1, 1],
        "mrope_interleaved": True,
    },
    linear_num_key_heads=3,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=3,
    pad_token_id=PAD,
    eos_token_id=[7, 9],
    tie_word_embeddings=True,
)

MOE = dict(
    model_type="qwen3_5_moe_text",
    vocab_size=80,
    hidden_size=20,
    num_hidden_layers=3,
    layer_types=[L, F, L],
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=16,
    attention_bias=False,
    rms_norm_eps=1e-4,
    # Without sections and with the share beside: both have other defaults than elsewhere.
    rope_parameters={"rope_type": "default", "rope_theta": 2e4},
    partial_rotary_factor=0.5,
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=12,
    linear_value_head_dim=6,
    linear_conv_kernel_dim=6,
    num_experts=5,
    num_experts_per_tok=3,
    moe_intermediate_size=12,
    shared_expert_intermediate_size=28,
    tie_word_embeddings=False,
)


def fill(net, seed):
    """Numbers of a size that no setting hides behind."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(net.named_parameters()):
        normal = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):
            parameter.copy_(0.5 * normal)
        elif name.endswith(("dt_bias", "linear_attn.norm.weight")):
            parameter.copy_(1 + 0.3 * normal)
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * normal)
        else:
            parameter.copy_(normal * (0.4 if "embed" in name else parameter.shape[-1] ** -0.5))


def make(name, settings, seed):
    config = AutoConfig.for_model(**settings)
    net = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    net.set_experts_implementation("eager")
    with torch.no_grad():
        fill(net, seed)
    folder = HERE / name
    net.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    generator = torch.Generator().manual_seed(seed + 1)
    total, vocabulary = sum(DOCUMENTS), settings["vocab_size"]
    ids = torch.randint(3, vocabulary, (1, total), generator=generator)
    ids[0, 4] = PAD
    steps = torch.randint(0, 3, (3, 1, total), generator=generator)
    kept = torch.rand((1, total), generator=generator) < 0.9
    embeds = net.model.embed_tokens(ids)
    embeds.retain_grad()
    parts, positions, documents, labels = [], [], [], ids.clone()
    start = 0
    for index, length in enumerate(DOCUMENTS):
        rows = slice(start, start + length)
        of_document = steps[:, :, rows].cumsum(-1)
        parts.append(net(inputs_embeds=embeds[:, rows], position_ids=of_document, use_cache=False).logits)
        positions.append(of_document)
        documents += [index] * length
        kept[0, start] = False
        start += length
    labels[~kept] = -100
    logits = torch.cat(parts, 1)
    losses = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
    count = int((labels[0, 1:] != -100).sum())
    loss = losses / count
    loss.backward()
    case = {
        "input.input_ids": ids,
        "input.labels": labels,
        "input.doc_ids": torch.tensor([documents]),
        "input.position_ids": torch.cat(positions, -1),
        "mid.inputs_embeds": embeds,
        "out.logits": logits,
        "out.loss_mean": loss[None],
        "out.num_valid": torch.tensor([count]),
    }
    save_file({key: value.detach().contiguous() for key, value in case.items()}, folder / "case.safetensors")
    grads = {key: parameter.grad for key, parameter in net.named_parameters()}
    grads["inputs_embeds"] = embeds.grad
    save_file({key: value.contiguous() for key, value in grads.items()}, folder / "grads.safetensors")
    saved = json.loads((folder / "config.json").read_text())
    print(name, loss.item(), logits.std().item(), saved["rope_parameters"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    make("dense", DENSE, 21)
    make("moe", MOE, 32)
