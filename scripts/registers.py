#!/usr/bin/env python3
"""What ptxas makes of the checked-in PTX: registers, spills and static shared memory of every kernel on every architecture.

usage: registers.py PTXAS_12 PTXAS_13 PTX_FOLDER

Prints the table that is kept as candle-cp-kernels/ptx/registers.txt; fails if any kernel spills.
"""
import pathlib
import re
import subprocess
import sys

# The oldest assembler that is supported, and one that knows the newer architectures.
ARCHITECTURES = {80: 0, 86: 0, 89: 0, 90: 0, 100: 1, 120: 1}


def assemble(ptxas, architecture, path):
    command = [ptxas, "-v", f"-arch=sm_{architecture}", path, "-o", "/dev/null"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def kernels(text):
    name = spills = None
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            name = found[1]
        if found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(found[1]) + int(found[2])
        if found := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            yield name, int(found[1]), spills, int(shared[1]) if shared else 0


def main(*arguments):
    assemblers, folder = arguments[:2], pathlib.Path(arguments[2])
    spilling = []
    print("module kernel sm registers spill_bytes static_shared_bytes")
    for path in sorted(folder.glob("*.ptx")):
        for architecture, assembler in ARCHITECTURES.items():
            for name, registers, spills, shared in sorted(kernels(assemble(assemblers[assembler], architecture, path))):
                print(path.stem, name, architecture, registers, spills, shared)
                if spills:
                    spilling.append(f"{path.stem} {name} on sm_{architecture}")
    if spilling:
        sys.exit("registers are spilled by " + ", ".join(spilling))


main(*sys.argv[1:])
