"""Files of documents that are damaged in reproducible ways."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

_WORDS = ("lorem ", "ipsum ", "dolor ", "süß ", "长文 ", "🙂 ")
_VALUES = (
    b"null", b"true", b"-1", b"1e999", b"1e400", b"9" * 30, b"9" * 5000, b"[]", b'["a"]', b'{"a": 1}', b'"\\ud800"',
    b"NaN", b"Infinity", b'"x', b"'x'", b"0x10", b'{"text": {"text": "a"}}', b"[[1], {}]", b"1.5",
)  # fmt: skip
_BYTES = (b"\xff", b"\x00", b"\xc3\x28", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xff\xfe", b"\r", b"\n", b"\n\n", b"\x1a")
Change = Callable[[bytearray, random.Random], None]


def _flip(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 4))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def _drop(data: bytearray, draw: random.Random) -> None:
    start = draw.randrange(len(data))
    del data[start : start + draw.randint(1, 40)]


def _insert(data: bytearray, draw: random.Random) -> None:
    start = draw.choice((0, draw.randrange(len(data)), len(data)))
    data[start:start] = draw.choice(_BYTES) * draw.choice((1, 1, 3))


def _replace_line(data: bytearray, draw: random.Random) -> None:
    lines = bytes(data).split(b"\n")
    value = draw.choice(_VALUES)
    lines[draw.randrange(len(lines))] = draw.choice((value, b'{"text": %s, "number": 1}' % value))
    data[:] = b"\n".join(lines)


def _nest(data: bytearray, draw: random.Random) -> None:
    lines = bytes(data).split(b"\n")
    start, end = draw.choice(((b"[", b"]"), (b'{"text":', b"}")))
    depth = draw.choice((100, 3000, 100_000))
    lines[draw.randrange(len(lines))] = start * depth + b"1" + end * draw.choice((depth, 0))
    data[:] = b"\n".join(lines)


def _empty(data: bytearray, draw: random.Random) -> None:
    data[:] = draw.choice((b"", b"\n", b" ", b"\x00" * 4096, b"\xef\xbb\xbf", b"[]", b"{}", b"{}\n{}\n"))


CHANGES: tuple[Change, ...] = (_flip, _flip, _cut, _drop, _insert, _insert, _replace_line, _replace_line, _nest, _empty)


def _lines(draw: random.Random) -> bytes:
    texts = ["".join(draw.choices(_WORDS, k=draw.randint(1, 30))) for _ in range(draw.randint(2, 8))]
    rows = (json.dumps({"text": text, "number": n}, ensure_ascii=draw.random() < 0.5) for n, text in enumerate(texts))
    return "".join(row + "\n" for row in rows).encode()


def _table(lines: bytes) -> bytes:
    rows = [json.loads(line) for line in lines.splitlines()]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": [row["text"] for row in rows]}), file)
    return file.getvalue()


# How the lines become a file of each kind.
KINDS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": gzip.compress,
    ".json": lambda lines: b"[" + b",\n".join(lines.splitlines()) + b"]",
    ".parquet": _table,
    ".txt": bytes,
}
# Contents that belong to another ending.
_OTHERS: tuple[Callable[[bytes], bytes], ...] = (bytes, gzip.compress, bz2.compress, lzma.compress, _table)


def malformed_documents(folder: Path, count: int, seed: int) -> Iterator[Path]:
    """Write files one after the other; each is damaged before or after it is compressed, or has another's ending."""
    draw = random.Random(seed)
    for number in range(count):
        kind = draw.choice(list(KINDS))
        data = bytearray(_lines(draw))
        pack = KINDS[kind]
        way = draw.choice(("before", "before", "after", "after", "ending")) if kind != ".parquet" else "after"
        if way == "before":
            draw.choice(CHANGES)(data, draw)
        content = bytearray(draw.choice(_OTHERS)(bytes(data)) if way == "ending" else pack(bytes(data)))
        if way == "after":
            draw.choice(CHANGES)(content, draw)
        path = folder / f"{number}{kind}"
        path.write_bytes(bytes(content))
        yield path
