"""Adapters on tiny models, and what PEFT 0.21.2 with transformers 5.24.0 (torch 2.15.0) computes with them.

    pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 safetensors==0.8.0
    python make_lora.py

Rewrites the folders in `lora/` beside this file. Each holds adapters as PEFT saves them, random in both matrices from a
fixed seed, and `golden.safetensors`: by case, the mean loss, every third token's logits for every eighth id, and the
gradients of all adapters in the order of their names, as one vector (zeros where PEFT has no gradient).

    python make_lora.py check BASE ADAPTER MERGED

loads a folder of adapters with PEFT on the model in BASE, and compares with the model in MERGED; `-` leaves that out.
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

HERE = Path(__file__).parent
FIXTURES = HERE / "../../../fixtures"


def fixture(family, *cases):
    return FIXTURES / family / "checkpoint", {case: FIXTURES / family / "goldens" / f"{case}.safetensors" for case in cases}


def variant(name):
    return HERE / name, {"case": HERE / name / "case.safetensors"}


def text_linears(net):
    paths = (name for name, module in net.named_modules() if isinstance(module, torch.nn.Linear))
    return [path for path in paths if ".language_model." in path]


# Name: model and cases, targets, rank, alpha.
ADAPTERS = {
    "dense": (fixture("gemma4-dense", "case2_images"), text_linears, 2, 6),
    "effective": (fixture("gemma4-effective", "case2_images", "case5_audio"), "all-linear", 1, 2),
    "clipped": (variant("clipped"), r".*_tower\..*\.linear", 2, 3),
    "moe": (variant("moe"), "all-linear", 1, 1),
    "unified": (variant("unified"), ["q_proj", "patch_dense", "embedding_projection"], 2, 5),
}


def load(folder):
    kind = AutoModelForImageTextToText if hasattr(AutoConfig.from_pretrained(folder), "text_config") else AutoModelForCausalLM
    options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    return kind.from_pretrained(folder, **options).eval()


def inputs(path, config):
    """What the model gets, and the labels."""
    case = {name.removeprefix("input."): value for name, value in load_file(path).items() if name.startswith("input.")}
    ids = case["input_ids"]
    case["mm_token_type_ids"] = (ids == config.image_token_id).long() + 3 * (ids == config.audio_token_id).long()
    if "input_features_mask" in case:
        case["input_features_mask"] = case["input_features_mask"].bool()
    labels = case.pop("labels")
    for name in ["vision_group_ids", "position_ids"]:
        case.pop(name, None)
    return case, labels


def adapter_parameters(net):
    named = ((name.replace(".default.", "."), value) for name, value in net.named_parameters() if value.requires_grad)
    return dict(sorted(named))


def fill(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for name, value in parameters.items():
        noise = torch.randn(value.shape, generator=generator)
        value.copy_(noise * (value.shape[1] ** -0.5 if ".lora_A." in name else 0.2))


def run(net, path):
    given, labels = inputs(path, net.config)
    logits = net(**given, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return logits, loss


def make(seed, name):
    (folder, cases), targets, rank, alpha = ADAPTERS[name]
    net = load(folder)
    plain = {case: run(net, path)[1].item() for case, path in cases.items()}
    targets = targets(net) if callable(targets) else targets
    net = get_peft_model(net, LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets))
    parameters = adapter_parameters(net)
    with torch.no_grad():
        fill(parameters, seed)
    golden = {}
    for case, path in cases.items():
        net.zero_grad()
        logits, loss = run(net, path)
        loss.backward()
        assert abs(loss.item() - plain[case]) > 1e-3, (name, case)
        gradients = [torch.zeros_like(value) if value.grad is None else value.grad for value in parameters.values()]
        golden[f"{case}.loss"] = loss.detach()[None]
        golden[f"{case}.logits"] = logits.detach()[:, ::3, ::8].contiguous()
        golden[f"{case}.gradients"] = torch.cat([gradient.flatten() for gradient in gradients])
        print(name, case, len(parameters) // 2, "modules, loss", plain[case], loss.item())
    net.peft_config["default"].base_model_name_or_path = "tiny"
    out = HERE / "lora" / name
    net.save_pretrained(out)
    (out / "README.md").unlink()
    # PEFT keeps a set, whose order changes from run to run.
    config = json.loads((out / "adapter_config.json").read_text())
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (out / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(golden, out / "golden.safetensors", metadata={"format": "pt"})
    for file in out.iterdir():
        file.chmod(0o644)


def check(base, adapter, merged):
    ids = torch.arange(20, 60)[None]
    net = load(base)
    bare = net(input_ids=ids).logits
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = PeftModel.from_pretrained(net, adapter).eval()
    told = [str(warning.message) for warning in caught if "keys" in str(warning.message)]
    assert not told, told
    held = {name.replace(".default.", ".") for name, _ in net.named_parameters() if ".lora_" in name}
    filed = set(load_file(Path(adapter) / "adapter_model.safetensors"))
    assert held == filed, held ^ filed
    logits = net(input_ids=ids).logits
    print(type(net).__name__, len(held), "tensors, adapters change logits by", (logits - bare).abs().max().item())
    if merged != "-":
        print("merged logits differ by", (load(merged)(input_ids=ids).logits - logits).abs().max().item())


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["check"]:
        with torch.no_grad():
            check(*sys.argv[2:])
    else:
        for seed, name in enumerate(ADAPTERS):
            make(70 + seed, name)
