"""Writes tests/data/qwen3_5.safetensors: what transformers makes of pictures, sizes and grids that no golden has.

Run by hand with Python 3, torch, Pillow 13 and transformers 5.24:

    python make_qwen3_5.py

`sizes`: rows of (height, width, factor, fewest pixels, most pixels, new height, new width), -1 where it refuses.
`<name>.picture`, `<name>.pixels`, `<name>.grid`: the image processor with the settings of SETTINGS.
`rows.*`: positions of rows with pictures, by the model itself.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

SETTINGS = {  # name: picture's height and width, settings
    "absent": (30, 61, {}),
    "merge3": (25, 40, dict(patch_size=2, merge_size=3, temporal_patch_size=3, min_pixels=36, max_pixels=900)),
    "levels": (16, 24, dict(patch_size=4, do_rescale=False, do_normalize=False,
                            size={"shortest_edge": 64, "longest_edge": 4096})),
    "mean": (9, 70, dict(patch_size=3, image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.25, 2.0], rescale_factor=0.01,
                         size={"shortest_edge": 36, "longest_edge": 500})),
}

def noise(count, seed):
    out, x = np.empty(count, np.uint8), seed
    for i in range(count):
        x = (x * 1664525 + 1013904223) % 2**32
        out[i] = x >> 24
    return out


def sizes():
    rng, rows = np.random.default_rng(7), []
    sides = [1, 2, 3, 15, 16, 17, 31, 48, 80, 112, 200, 201, 399, 400, 401, 1000]
    shapes = [(h, w) for h in sides for w in sides] + [tuple(rng.integers(1, 3000, 2)) for _ in range(200)]
    for h, w in shapes:
        factor, lo, hi = [(32, 65536, 16777216), (32, 4096, 8192), (8, 1024, 2560), (28, 3136, 1003520),
                          (32, 1, 1 << 40)][rng.integers(5)]
        try:
            new = smart_resize(int(h), int(w), factor, lo, hi)
        except ValueError:
            new = (-1, -1)
        rows.append([h, w, factor, lo, hi, *new])
    return np.array(rows, np.int64)


def rows(out):
    """Random rows of text and pictures; `segments` are lengths of text and numbers of pictures, in turn."""
    vision = dict(depth=1, hidden_size=8, num_heads=1, intermediate_size=8, out_hidden_size=8, patch_size=2,
                  spatial_merge_size=2, num_position_embeddings=4)
    text = dict(hidden_size=8, num_hidden_layers=1, layer_types=["full_attention"], num_attention_heads=1,
                num_key_value_heads=1, head_dim=8, intermediate_size=8, vocab_size=16)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(vision_config=vision, text_config=text)).model
    rng = np.random.default_rng(3)
    for n in range(12):
        types, grids = [], []
        for _ in range(rng.integers(0, 5)):
            types += [0] * int(rng.integers(1, 9))
            h, w = (int(2 * x) for x in rng.integers(1, 7, 2))
            grids.append([1, h, w])
            types += [1] * (h * w // 4)
        types += [0] * int(rng.integers(1, 9))
        kinds = torch.tensor([types])
        grid = torch.tensor(grids) if grids else None
        positions, _ = model.get_rope_index(torch.zeros_like(kinds), kinds, image_grid_thw=grid)
        out[f"rows.{n}.types"] = np.array(types, np.uint8)
        out[f"rows.{n}.grids"] = np.array(grids, np.int64).reshape(-1, 3)
        out[f"rows.{n}.positions"] = positions[:, 0].numpy()


out = {"sizes": sizes()}
for seed, (name, (height, width, settings)) in enumerate(SETTINGS.items()):
    picture = noise(height * width * 3, seed + 1).reshape(height, width, 3)
    got = Qwen2VLImageProcessorPil(**settings)(images=picture, return_tensors="np")
    out[f"{name}.picture"] = picture
    out[f"{name}.pixels"] = np.ascontiguousarray(got["pixel_values"], np.float32)
    out[f"{name}.grid"] = got["image_grid_thw"][0]
rows(out)
save_file(out, Path(__file__).parent / "data" / "qwen3_5.safetensors")
print({k: v.shape for k, v in out.items() if "rows" not in k})
