#!/usr/bin/env python3
"""Reads the event files of a run with TensorBoard's own reader and compares them with its metrics file. Run by hand:

    python scripts/check_tensorboard.py runs/finetune_gemma4/tensorboard runs/finetune_gemma4/metrics.jsonl
    python scripts/check_tensorboard.py --make-golden candle-finetune/tests/data/tensorboard/golden.tfevents

The second command writes, with TensorBoard's own writer, the file that a test compares with ours. Needs tensorboard.
Exit status: 0 if every number agrees, 1 if not.
"""

import argparse
import json
import struct
import sys

from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

GIB = 1 << 30
# Field of a line of the metrics file, tag, divisor.
SCALARS = [
    ("loss", "train/loss", 1),
    ("grad_norm", "train/grad_norm", 1),
    ("lr", "train/lr", 1),
    ("epoch", "train/epoch", 1),
    ("tokens", "train/tokens", 1),
    ("label_tokens", "train/label_tokens", 1),
    ("tokens_per_s", "train/tokens_per_s", 1),
    ("memory_bytes", "memory/now_gib", GIB),
    ("peak_memory_bytes", "memory/peak_gib", GIB),
    ("bytes_sent", "ranks/sent_gib", GIB),
    ("waited_s", "ranks/waited_s", 1),
    ("waited_max_s", "ranks/waited_max_s", 1),
    ("val_loss", "val/loss", 1),
]


def f32(number):
    return struct.unpack("<f", struct.pack("<f", number))[0]


def expected(metrics):
    """Steps and numbers by tag."""
    curves = {}
    with open(metrics, encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            validation = "val_loss" in line
            for field, tag, divisor in SCALARS:
                if field in line and tag.startswith("val/") == validation:
                    curves.setdefault(tag, []).append((line["step"], f32(line[field] / divisor)))
            for kind, used in line.get("operations", {}).items():
                for field, tag, divisor in SCALARS:
                    if field in used:
                        tag = tag.replace("ranks/", f"ranks/{kind}/")
                        curves.setdefault(tag, []).append((line["step"], f32(used[field] / divisor)))
    return curves


def read(folder):
    """What the scalars tab reads, through both of TensorBoard's readers."""
    everything = {"scalars": 0, "tensors": 0}
    old = event_accumulator.EventAccumulator(folder, size_guidance=everything).Reload()
    new = plugin_event_accumulator.EventAccumulator(folder, size_guidance=everything).Reload()
    old_curves = {tag: [(e.step, e.value) for e in old.Scalars(tag)] for tag in old.Tags()["scalars"]}
    new_curves = {}
    for tag in new.Tags()["tensors"]:
        plugin = new.SummaryMetadata(tag).plugin_data.plugin_name
        if plugin != "scalars":
            sys.exit(f"error: {tag} is for the plugin {plugin!r}, not for the scalars tab")
        values = [(e.step, tensor_util.make_ndarray(e.tensor_proto).item()) for e in new.Tensors(tag)]
        new_curves[tag] = values
    return {"event_accumulator": old_curves, "plugin_event_accumulator": new_curves}


def check(folder, metrics):
    wanted, wrong = expected(metrics), 0
    for reader, curves in read(folder).items():
        for tag in sorted(set(wanted) | set(curves)):
            same = wanted.get(tag) == curves.get(tag)
            wrong += not same
            last = curves[tag][-1] if tag in curves else "absent"
            print(f"{reader:24} {tag:20} {len(curves.get(tag, [])):6} numbers, last {last}: {'ok' if same else 'WRONG'}")
    return 1 if wrong else 0


def make_golden(path):
    begin = 1_700_000_000.25

    def value(tag, number):
        return summary_pb2.Summary.Value(tag=tag, simple_value=number)

    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    first = [value("train/loss", 2.5), value("train/lr", 1e-5), value("größe/π", -0.0)]
    odd = [value("nan", float("nan")), value("inf", float("-inf")), value("x" * 300, 16777217.0)]
    events = [
        event_pb2.Event(wall_time=begin, file_version="brain.Event:2"),
        event_pb2.Event(wall_time=begin, step=301, session_log=start),
        event_pb2.Event(wall_time=begin + 0.5, step=301, summary=summary_pb2.Summary(value=first)),
        event_pb2.Event(wall_time=begin + 86400, step=5_000_000_000, summary=summary_pb2.Summary(value=odd)),
        event_pb2.Event(summary=summary_pb2.Summary(value=[value("val/loss", 0.0)])),
    ]
    with open(path, "wb") as file:
        writer = RecordWriter(file)
        for event in events:
            writer.write(event.SerializeToString())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="folder of event files")
    parser.add_argument("metrics", nargs="?", help="metrics.jsonl of the same run")
    parser.add_argument("--make-golden", metavar="FILE", help="write the file that the test compares with")
    given = parser.parse_args()
    if given.make_golden:
        make_golden(given.make_golden)
        return 0
    if given.metrics is None:
        parser.error("give the folder of event files and the metrics file, or --make-golden")
    return check(given.folder, given.metrics)


if __name__ == "__main__":
    sys.exit(main())
