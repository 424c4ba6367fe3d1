"""Writes tests/data/pillow: pictures of every colour type, and what Pillow makes of them.

Run by hand with Python 3, numpy, safetensors and Pillow 13:

    python make_pictures.py

`expected.safetensors` holds, per picture, the RGB pixels [h, w, 3]: upright, transparency composited onto white with
Pillow's alpha_composite. `resize.safetensors` holds results of `Image.resize(..., BICUBIC)` on noise that the test makes
again with the same generator. Where Pillow is wrong (16-bit grey clips to white) the truth is computed here.
"""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin
from safetensors.numpy import save_file

OUT = Path(__file__).parent / "data" / "pillow"
OUT.mkdir(parents=True, exist_ok=True)
for old in OUT.iterdir():
    old.unlink()
expected = {}


def noise(count, seed):
    """Bytes of a linear congruential generator; the Rust tests have the same one."""
    out, x = np.empty(count, np.uint8), seed
    for i in range(count):
        x = (x * 1664525 + 1013904223) % 2**32
        out[i] = x >> 24
    return out


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(name, depth, color, rows, width, height, before=b"", interlace=0):
    """A PNG from packed rows, for the kinds that Pillow does not write."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    data = b"".join(b"\0" + bytes(row) for row in rows)
    body = chunk(b"IHDR", header) + before + chunk(b"IDAT", zlib.compress(data, 9)) + chunk(b"IEND", b"")
    (OUT / name).write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def packed(values, depth):
    bits = "".join(f"{v:0{depth}b}" for v in values)
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))


def truth(name, image=None):
    image = Image.open(OUT / name) if image is None else image
    image.load()  # tags may stand behind the pixels
    image = ImageOps.exif_transpose(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255,) * 4), image.convert("RGBA"))
    expected[name] = np.ascontiguousarray(np.array(image.convert("RGB")))


def on_white(rgb, alpha):
    rgba = np.concatenate([rgb, alpha[..., None]], -1).astype(np.uint8)
    white = Image.new("RGBA", rgba.shape[1::-1], (255,) * 4)
    return np.array(Image.alpha_composite(white, Image.fromarray(rgba, "RGBA")).convert("RGB"))


def save(name, image, **options):
    image.save(OUT / name, **options)
    truth(name)


w, h = 13, 9
rgb = noise(w * h * 3, 1).reshape(h, w, 3)
alpha = noise(w * h, 2).reshape(h, w)
alpha[0], alpha[1] = 0, 255
save("rgb.png", Image.fromarray(rgb))
save("rgba.png", Image.fromarray(np.concatenate([rgb, alpha[..., None]], -1)))
save("grey.png", Image.fromarray(rgb[..., 0]))
save("grey-alpha.png", Image.fromarray(np.stack([rgb[..., 0], alpha], -1), "LA"))
save("rgb-key.png", Image.fromarray(rgb), transparency=tuple(int(v) for v in rgb[2, 3]))
save("grey-key.png", Image.fromarray(rgb[..., 0]), transparency=int(rgb[2, 3, 0]))
save("one-bit.png", Image.fromarray(rgb[..., 0] > 127))
# Every grey under every opacity: the rounding of the composition.
every = np.stack(np.meshgrid(np.arange(256), np.arange(256)), -1).astype(np.uint8)
Image.fromarray(every, "LA").save(OUT / "every-alpha.png", optimize=True)
truth("every-alpha.png")
expected["every-alpha.png"] = np.ascontiguousarray(expected["every-alpha.png"][..., 0])

palette = noise(3 * 256, 3)
for depth in (1, 2, 4, 8):
    values = [[int(v) % 2**depth for v in row] for row in rgb[..., 1]]
    colors = palette[: 3 * 2**depth]
    rows = [packed(row, depth) for row in values]
    png(f"palette-{depth}.png", depth, 3, rows, w, h, chunk(b"PLTE", colors.tobytes()))
    truth(f"palette-{depth}.png")
    some = noise(max(1, 2**depth // 2), 4)  # the colours after these are opaque
    png(f"palette-alpha-{depth}.png", depth, 3, rows, w, h, chunk(b"PLTE", colors.tobytes()) + chunk(b"tRNS", some.tobytes()))
    full = np.concatenate([some, np.full(2**depth - len(some), 255, np.uint8)])
    index = np.array(values)
    expected[f"palette-alpha-{depth}.png"] = on_white(colors.reshape(-1, 3)[index], full[index])
    if depth < 8:
        png(f"grey-{depth}.png", depth, 0, rows, w, h)
        truth(f"grey-{depth}.png")

wide = noise(w * h * 4 * 2, 5).reshape(h, w, 4, 2)  # high byte, low byte
high = wide[..., 0]
png("grey-16.png", 16, 0, [row[:, :1].tobytes() for row in wide], w, h)
expected["grey-16.png"] = np.repeat(high[..., :1], 3, -1)
png("grey-alpha-16.png", 16, 4, [np.ascontiguousarray(row[:, 2:]).tobytes() for row in wide], w, h)
truth("grey-alpha-16.png")
png("rgb-16.png", 16, 2, [np.ascontiguousarray(row[:, :3]).tobytes() for row in wide], w, h)
truth("rgb-16.png")
png("rgba-16.png", 16, 6, [row.tobytes() for row in wide], w, h)
truth("rgba-16.png")

passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
rows = [np.ascontiguousarray(row).tobytes() for x, y, dx, dy in passes if x < w for row in rgb[y::dy, x::dx]]
png("interlaced.png", 8, 2, rows, w, h, interlace=1)
truth("interlaced.png")

for turn in range(1, 9):
    exif = Image.Exif()
    exif[0x0112] = turn
    save(f"turn-{turn}.png", Image.fromarray(rgb), exif=exif)
data = (OUT / "turn-6.png").read_bytes()
at = data.index(b"eXIf") - 4
block = data[at : at + 12 + struct.unpack(">I", data[at : at + 4])[0]]
end = data.index(b"IEND") - 4
(OUT / "turn-late.png").write_bytes(data[:at] + data[at + len(block) : end] + block + data[end:])
truth("turn-late.png")
xmp = PngImagePlugin.PngInfo()
xmp.add_itxt("XML:com.adobe.xmp", '<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>')
save("turn-xmp.png", Image.fromarray(rgb), pnginfo=xmp)

y, x = np.mgrid[0:40, 0:56]
smooth = np.stack([x * 4, y * 6, 128 + 100 * np.sin(x / 9 + y / 7)], -1).clip(0, 255).astype(np.uint8)
photo = Image.fromarray(smooth)
save("photo-444.jpg", photo, quality=92, subsampling=0)
save("photo-422.jpg", photo, quality=92, subsampling=1)
save("photo-420.jpg", photo, quality=92, subsampling=2)
save("photo-progressive.jpg", photo, quality=92, progressive=True, subsampling=0)
save("photo-restart.jpg", photo, quality=92, restart_marker_blocks=2, subsampling=0)
save("photo-grey.jpg", photo.convert("L"), quality=92)
save("photo-rgb.jpg", photo, quality=92, keep_rgb=True)
# Pillow takes inks for inverted with and without Adobe's mark. It always writes the mark, so it is cut out once.
ink = Image.merge("CMYK", [Image.fromarray(c) for c in (smooth[..., 0], smooth[..., 1], smooth[..., 2], smooth[..., 1] // 3)])
buffer = io.BytesIO()
ink.save(buffer, "JPEG", quality=92)
data = buffer.getvalue()
at = data.index(b"\xff\xee")
length = struct.unpack(">H", data[at + 2 : at + 4])[0]
(OUT / "inks-plain.jpg").write_bytes(data[:at] + data[at + 2 + length :])
truth("inks-plain.jpg")
(OUT / "inks-adobe.jpg").write_bytes(data)
truth("inks-adobe.jpg")

save_file(expected, OUT / "expected.safetensors")

resized = {}
for width, height, targets in [
    (37, 53, [(5, 7), (100, 20), (12, 53), (37, 10), (1, 1), (90, 120), (36, 54), (37, 54)]),
    # Columns go first where the height loses more than twice what the width loses.
    (37, 53, [(30, 39), (30, 38), (20, 19), (20, 18), (10, 60), (38, 52)]),
    (97, 371, [(32, 128)]),
    (1, 1, [(48, 96)]),
    (3, 200, [(48, 24), (2, 480)]),
    (640, 480, [(96, 72), (48, 432)]),
]:
    picture = Image.fromarray(noise(width * height * 3, width * 1000 + height).reshape(height, width, 3))
    for target in targets:
        result = np.array(picture.resize(target, Image.Resampling.BICUBIC))
        resized[f"{width}x{height} to {target[0]}x{target[1]}"] = np.ascontiguousarray(result)
save_file(resized, OUT / "resize.safetensors")
print(len(expected), "pictures,", len(resized), "sizes")
