"""Writes tests/data/unified.safetensors: what transformers makes of two pictures for the models without a tower.

Run by hand with Python 3, torch, torchvision and transformers 5.24:

    python make_unified.py

`exact`: the picture has the target size already, so nothing is resized. `wide`: a picture that is resized, by torchvision,
which rounds differently from Pillow. Pixels are stored as 8-bit levels, real patches only.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers.models.gemma4_unified.image_processing_gemma4_unified import Gemma4UnifiedImageProcessor


def noise(count, seed):
    out, x = np.empty(count, np.uint8), seed
    for i in range(count):
        x = (x * 1664525 + 1013904223) % 2**32
        out[i] = x >> 24
    return out


processor = Gemma4UnifiedImageProcessor(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
y, x = np.mgrid[0:50, 0:160]
pictures = {
    "exact": noise(56 * 80 * 3, 11).reshape(56, 80, 3),
    "wide": np.stack([x * 1.5, y * 5, 128 + 100 * np.sin(x / 9 + y / 7)], -1).clip(0, 255).astype(np.uint8),
}
out = {}
for name, picture in pictures.items():
    got = processor(images=torch.from_numpy(picture).permute(2, 0, 1), return_tensors="pt")
    n = int(got["num_soft_tokens_per_image"][0])
    level = (got["pixel_values"][0, :n] * 255).round()
    assert float((got["pixel_values"][0, :n] * 255 - level).abs().max()) < 1e-3
    assert float(got["pixel_values"][0, n:].abs().sum()) == 0
    out[f"{name}.picture"] = picture
    out[f"{name}.levels"] = level.to(torch.uint8).numpy()
    out[f"{name}.positions"] = got["image_position_ids"][0].numpy()
save_file(out, Path(__file__).parent / "data" / "unified.safetensors")
print({k: v.shape for k, v in out.items()})
