"""A tiny text-only model (Gemma4ForCausalLM), written by transformers 5.24.0 (torch 2.15.0), and what it computes.

Run it like make.py. Rewrites the folder `text_only` beside this file: config.json and model.safetensors are what
`save_pretrained` writes.
"""

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Gemma4ForCausalLM

from make import F, HERE, PAD, S, fill, text

# The ids of images and videos in models with towers; text like any other here.
PLACEHOLDERS = {"image_token_id": 9, "video_token_id": 10, "audio_token_id": 11}
CONFIG = text(
    attention_bias=False,
    attention_k_eq_v=True,
    final_logit_softcapping=5.0,
    global_head_dim=12,
    head_dim=8,
    layer_types=[S, S, F, S, F],
    num_global_key_value_heads=2,
    rms_norm_eps=2e-3,
    rope_parameters={
        S: {"rope_type": "default", "rope_theta": 300.0},
        F: {"rope_type": "proportional", "rope_theta": 2e4, "partial_rotary_factor": 0.5},
    },
    sliding_window=6,
    tie_word_embeddings=True,
    use_bidirectional_attention=None,
    **PLACEHOLDERS,
)
DOCUMENTS = [11, 20, 9]


def batch():
    """One packed row of three documents; the first token of a document is no target."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(0, 96, (1, sum(DOCUMENTS)), generator=generator)
    ids[0, 4], ids[0, 14:17], ids[0, 25] = PAD, torch.tensor(list(PLACEHOLDERS.values())), PAD
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    documents = torch.cat([torch.full((length,), index) for index, length in enumerate(DOCUMENTS)])[None]
    kept = (positions > 0) & (torch.rand(ids.shape, generator=generator) < 0.9)
    return ids, positions, documents, torch.where(kept, ids, -100)


def main():
    torch.set_num_threads(1)
    folder = HERE / "text_only"
    config = AutoConfig.for_model(**CONFIG)
    net = Gemma4ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        fill(net, 50)
    net.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)

    ids, positions, documents, labels = batch()
    embeds = net.model.embed_tokens(ids)
    embeds.retain_grad()
    logits = net(inputs_embeds=embeds, position_ids=positions, use_cache=False).logits
    alone = [net(input_ids=part, use_cache=False).logits for part in ids.split(DOCUMENTS, 1)]
    torch.testing.assert_close(torch.cat(alone, 1), logits)  # documents do not see each other
    targets = labels[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()

    case = {
        "input.input_ids": ids,
        "input.labels": labels,
        "input.doc_ids": documents,
        "input.vision_group_ids": torch.full_like(ids, -1),
        "mid.inputs_embeds": embeds.detach(),
        "out.logits": logits.detach(),
        "out.loss_mean": loss.detach()[None],
        "out.num_valid": (targets != -100).sum()[None],
    }
    save_file({key: value.contiguous() for key, value in case.items()}, folder / "case.safetensors")
    grads = {key: value.grad for key, value in net.named_parameters() if value.grad is not None}
    grads["inputs_embeds"] = embeds.grad
    save_file(grads, folder / "grads.safetensors")
    print("loss", loss.item(), "logits std", logits.std().item(), len(grads))


if __name__ == "__main__":
    main()
