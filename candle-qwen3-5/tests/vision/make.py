"""A vision tower with settings that no released model has, and what transformers 5.24.0 (torch 2.15.0) computes.

Rewrites `odd.safetensors` beside this file: the tower's tensors, its inputs and features, and the gradients (under
`grad.`) of the sum of features times `cotangent`. Computed in f64, but for positions and the rotary embedding, which
transformers computes in f32.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

# A picture, a clip of two frames, and a picture of one soft token: frames, rows and columns of patches.
GRIDS = [[1, 3, 9], [2, 6, 3], [1, 3, 3]]


def main():
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    config = Qwen3_5VisionConfig(
        depth=2,
        hidden_size=16,
        num_heads=2,
        intermediate_size=10,
        hidden_act="silu",
        patch_size=2,
        temporal_patch_size=3,
        spatial_merge_size=3,
        num_position_embeddings=27,
        out_hidden_size=7,
        in_channels=2,
        rope_parameters={"rope_type": "axial", "rope_theta": 50.0},
        attn_implementation="eager",
    )
    model = Qwen3_5VisionModel(config)
    for name, parameter in model.named_parameters():
        scale = 0.3 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
        center = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.data = center + scale * normal(*parameter.shape)
    model = model.double()

    grids = torch.tensor(GRIDS)
    patches = int(grids.prod(1).sum())
    pixels = normal(patches, 2 * 3 * 2 * 2)
    features = model(pixels.double(), grid_thw=grids).pooler_output
    cotangent = normal(*features.shape)
    (features * cotangent.double()).sum().backward()

    tensors = {"pixel_values": pixels, "image_grid_thw": grids, "features": features, "cotangent": cotangent}
    for name, parameter in model.named_parameters():
        tensors[f"model.visual.{name}"] = parameter
        tensors[f"grad.model.visual.{name}"] = parameter.grad
    short = lambda x: x.detach().float() if x.is_floating_point() else x
    tensors = {name: short(x).contiguous() for name, x in tensors.items()}
    save_file(tensors, Path(__file__).parent / "odd.safetensors")


if __name__ == "__main__":
    main()
