#!/usr/bin/env python3
"""Compiles the CUDA kernels to PTX with NVRTC alone: no driver, no host compiler. Called by scripts/regenerate-ptx.

usage: compile_ptx.py LIBRARY_FOLDER SOURCE_FOLDER OUT_FOLDER
"""
import ctypes
import pathlib
import sys

TYPES = {"bf16": 0, "f16": 0, "f32": 1}
HEADS = [64, 128, 256, 512]


def load(folder):
    # The wheel's library does not know where its other half lies.
    for half in sorted(folder.glob("libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(half), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(next(folder.glob("libnvrtc.so.*"))))


def text(nvrtc, program, name):
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{name}")(program, buffer)
    return buffer.value.decode()


def strings(items):
    return (ctypes.c_char_p * len(items))(*(item.encode() for item in items))


def compile_one(nvrtc, sources, kind, head):
    headers = [name for name in sources if name.endswith(".cuh")]
    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), sources["attention.cu"].encode(), b"attention.cu",
        len(headers), strings([sources[name] for name in headers]), strings(headers))
    assert made == 0, made
    element = "float" if kind == "f32" else kind
    options = ["--gpu-architecture=compute_80", "--std=c++17", f"-DTYPE={element}", f"-DHEAD={head}", f"-DWIDE={TYPES[kind]}"]
    if nvrtc.nvrtcCompileProgram(program, len(options), strings(options)):
        sys.exit(text(nvrtc, program, "ProgramLog"))
    return text(nvrtc, program, "PTX")


def main(library, source, out):
    nvrtc = load(pathlib.Path(library))
    sources = {path.name: path.read_text() for path in sorted(pathlib.Path(source).glob("*.cu*"))}
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for kind in TYPES:
        for head in HEADS:
            (out / f"{kind}_{head}.ptx").write_text(compile_one(nvrtc, sources, kind, head))


main(*sys.argv[1:])
