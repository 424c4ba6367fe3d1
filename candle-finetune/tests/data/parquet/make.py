"""Makes the files of this folder: the same samples as JSONL with pictures beside it, and as Parquet with pictures inside.

    pip install pyarrow pillow && python make.py

Columns have the types that the library `datasets` gives them: an Image feature is a struct of bytes and path, and every
struct has every field, null where a row has none.
"""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

HERE = Path(__file__).parent
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def picture(name, width, height, seed):
    """Writes a picture of many colours and returns its bytes."""
    image = Image.new("RGB", (width, height))
    image.putdata([((x * seed) % 256, (x * 7) % 256, (x * x) % 256) for x in range(width * height)])
    out = io.BytesIO()
    image.save(out, "PNG" if name.endswith("png") else "JPEG")
    (HERE / name).write_bytes(out.getvalue())
    return out.getvalue()


PICTURES = {name: picture(name, *rest) for name, *rest in
            [("a.png", 24, 12, 3), ("b.png", 12, 24, 5), ("c.jpg", 16, 16, 11)]}


def image(name, with_path=True):
    return {"bytes": PICTURES[name], "path": name if with_path else None}


def jsonl(name, rows):
    (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def parquet(name, rows, schema, **options):
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), HERE / name, **options)


# Chats: two turns, a picture in a later turn, two pictures in one turn, none, a system turn, null content.
CHATS = [
    [("user", [("image", "a.png"), ("text", "What is it?")]), ("assistant", [("text", "A cat.")])],
    [("system", [("text", "Be short.")]), ("user", [("text", "Hi")]), ("assistant", [("text", "Yes?")]),
     ("user", [("text", "See "), ("image", "b.png"), ("text", " and "), ("image", "c.jpg")]), ("assistant", [("text", "Two.")])],
    [("user", [("text", "No picture")]), ("assistant", [("text", "None.")])],
    [("user", [("image", "c.jpg"), ("image", "a.png"), ("text", "1?")]), ("assistant", [("text", "1")])],
    [("user", [("image", "b.png")]), ("assistant", [("text", "Tall.")]), ("user", None), ("assistant", [("text", "Still.")])],
]


def messages(chat, part):
    return [{"role": role, "content": None if content is None else [part(kind, value) for kind, value in content]}
            for role, content in chat]


def plain_part(kind, value):
    return {"type": kind, kind: value}


def bare_part(kind, value):
    return {"type": kind, "text": value} if kind == "text" else {"type": kind}


def pictures(chat):
    return [value for _, content in chat for kind, value in content or [] if kind == "image"]


jsonl("chat.jsonl", [{"messages": messages(chat, plain_part)} for chat in CHATS])

# Pictures inside the messages; two rows in a row group, one row in a page.
inside = pa.struct([("type", pa.string()), ("text", pa.string()), ("image", IMAGE)])
parquet("chat-inside.parquet",
        [{"id": n, "messages": messages(chat, lambda k, v: {"type": k, k: image(v, n % 2 == 0) if k == "image" else v})}
         for n, chat in enumerate(CHATS)],
        pa.schema([("id", pa.int64()), ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(inside))])))]),
        compression="snappy", row_group_size=2, data_page_size=1, write_batch_size=1, use_dictionary=False)

# Pictures in a column of their own; all rows in one group, one row in a page, with a page index.
beside = pa.struct([("type", pa.string()), ("text", pa.string())])
parquet("chat-beside.parquet",
        [{"images": [image(name) for name in pictures(chat)], "messages": messages(chat, bare_part)} for chat in CHATS],
        pa.schema([("images", pa.list_(IMAGE)),
                   ("messages", pa.list_(pa.struct([("content", pa.list_(beside)), ("role", pa.string())])))]),
        compression="zstd", data_page_size=1, write_batch_size=1, write_page_index=True, data_page_version="2.0")

# Messages as a JSON text; pictures that repeat are in a dictionary; version 1 pages of few values, with a page index.
parquet("chat-json.parquet",
        [{"messages": json.dumps(messages(chat, bare_part)), "images": [image(name) for name in pictures(chat)] or None}
         for chat in CHATS],
        pa.schema([("messages", pa.string()), ("images", pa.list_(IMAGE))]), compression="gzip", data_page_size=1, write_batch_size=2, write_page_index=True)

# Prompt and completion with one picture, or with a path to one, or with none.
PAIRS = [("<|image|>What?", "A cat.", "a.png"), ("Hi", "Yes?", None), ("So <|image|>?", "So.", "b.png"),
         ("<|image|>", "Tall.", "b.png")]
jsonl("pairs.jsonl", [{"prompt": p, "completion": c, "images": [i] if i else []} for p, c, i in PAIRS])
parquet("pairs.parquet",
        [{"image": {"bytes": None, "path": i} if n == 2 else image(i) if i else None, "prompt": p, "completion": c}
         for n, (p, c, i) in enumerate(PAIRS)],
        pa.schema([("image", IMAGE), ("prompt", pa.string()), ("completion", pa.large_string())]),
        compression="none", data_page_size=1, write_batch_size=1)

# Pairs of user and assistant; pictures come before the first of them.
TEXTS = [(["a.png", "b.png"], [("Which is tall?", "The second."), ("And wide?", "The first.")]), (["c.jpg"], [("What?", "A square.")]),
         ([], [("Hi", "Yes?")])]
turns = [[{"user": u, "assistant": a, "source": "x"} for u, a in pairs] for _, pairs in TEXTS]
jsonl("texts.jsonl",
      [{"messages": [m for k, (u, a) in enumerate(pairs) for m in
                     ({"role": "user", "content": [{"type": "image", "image": i} for i in images if k == 0]
                       + [{"type": "text", "text": u}]}, {"role": "assistant", "content": a})]} for images, pairs in TEXTS])
parquet("texts.parquet",
        [{"images": [image(i, False) for i in images], "texts": t} for (images, _), t in zip(TEXTS, turns)],
        pa.schema([("images", pa.list_(IMAGE)),
                   ("texts", pa.list_(pa.struct([(k, pa.string()) for k in ["user", "assistant", "source"]])))]),
        compression="lz4")

# Plain texts, and rows that cannot be used: 2 (null), 3 (blank), 5 (a second kind).
PLAIN = ["1 2 3", None, "", "4 5", "6"]
parquet("faults.parquet", [{"text": t, "prompt": "p" if t == "6" else None, "label": 1.5} for t in PLAIN],
        pa.schema([("text", pa.string()), ("prompt", pa.string()), ("label", pa.float32())]), row_group_size=2)
parquet("plain.parquet", [{"text": t, "label": 1.5} for t in PLAIN if t],
        pa.schema([("text", pa.dictionary(pa.int32(), pa.string())), ("label", pa.float32())]), row_group_size=2)

# Columns that make no sample.
parquet("vqa.parquet", [{"image": image("a.png"), "question": "What?", "answers": ["A cat."]}],
        pa.schema([("image", IMAGE), ("question", pa.string()), ("answers", pa.list_(pa.string()))]))

# Rows that cannot be used, each for a reason that only Parquet has.
CHAT = json.dumps([{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])
odd = pa.schema([("messages", pa.string()), ("image", IMAGE), ("images", pa.list_(IMAGE)), ("text", pa.binary()),
                 ("tools", pa.struct([("numbers", pa.map_(pa.int32(), pa.string())), ("words", pa.map_(pa.string(), pa.string()))]))])
parquet("odd.parquet", [
    {"messages": "no JSON"},
    {"messages": '{"role": "user"}'},
    {"messages": '[{"role": "user", "role": "user"}]'},
    {"messages": CHAT, "image": image("a.png"), "images": [image("a.png")]},
    {"text": b"1 2"},
    {"messages": CHAT, "tools": {"numbers": [(1, "a")]}},
    {"messages": CHAT, "tools": {"words": [("k", "a"), ("k", "b")]}},
    {"messages": CHAT, "image": image("a.png")},
], odd)
