"""Adapters for the tiny checkpoints in `fixtures/`, written by peft 0.21.2 (transformers 5.24.0, torch 2.15.0), and what
the adapted models compute on case 1.

    python make.py

Rewrites the folders beside this file. Every projection of the text model but the head is adapted.
"""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

HERE = Path(__file__).parent
FIXTURES = HERE.parents[2] / "fixtures"


def make(family):
    net = AutoModelForImageTextToText.from_pretrained(
        FIXTURES / family / "checkpoint", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    net.set_experts_implementation("eager")
    linear = [n for n, m in net.named_modules() if isinstance(m, torch.nn.Linear) and ".language_model." in n]
    net = get_peft_model(net, LoraConfig(r=2, lora_alpha=6, target_modules=linear, init_lora_weights=False))
    generator = torch.Generator().manual_seed(9)
    adapters = {n: p for n, p in net.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for _, parameter in sorted(adapters.items()):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    folder = HERE / family
    net.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    settings = folder / "adapter_config.json"
    values = json.loads(settings.read_text())
    values["base_model_name_or_path"] = None
    settings.write_text(json.dumps(values, indent=1) + "\n")

    case = load_file(FIXTURES / family / "goldens" / "case1_text.safetensors")
    logits = net(input_ids=case["input.input_ids"], use_cache=False).logits
    labels = case["input.labels"][0, 1:]
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels, ignore_index=-100)
    loss.backward()
    golden = {f"grad.{n.replace('.default', '')}": p.grad for n, p in adapters.items()}
    golden["logits"] = logits.detach()[:, ::3, ::8]
    golden["loss"] = loss.detach()[None]
    save_file({n: x.contiguous() for n, x in golden.items()}, folder / "golden.safetensors")
    print(family, len(linear), loss.item())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in ["qwen3_5-dense", "qwen3_5-moe"]:
        make(family)
