"""Damaged files of documents are refused in one line that names the file, or read; none of them ends the process."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.draws import draws
from support.samples.malformed_documents import malformed_documents

from lightning_memo.data import DocumentsDataModule
from lightning_memo.data.document_files import DocumentFiles, DocumentReader, DocumentStream
from lightning_memo.data.tokenizer import load_tokenizer
from lightning_memo.utils.user_errors import user_message

DOCUMENT = b'{"text": "lorem ipsum dolor"}\n'
BAD = b'{"text": "lorem \xff ipsum"}\n'


def read_whole(path: Path) -> None:
    DocumentsDataModule(path=str(path), seq_len=8).load()


def read_stream(path: Path) -> None:
    reader = DocumentReader(stream_of(path))
    for _, record in reader:
        reader.encode(record)


def stream_of(path: Path) -> DocumentStream:
    return DocumentStream(DocumentFiles(str(path), None, seed=0), "text", load_tokenizer(None))


READS = pytest.mark.parametrize("read", [read_whole, read_stream])


def message_of(read: Callable[[Path], None], path: Path) -> str | None:
    """The line with which a file is refused; `None` if it is read."""
    try:
        read(path)
    except ValueError as error:
        line, text = user_message(error), str(error)
    else:
        return None
    assert line == text and line.isprintable(), f"{path}: {text}"  # of this package
    return line


@pytest.mark.slow
@READS
def test_mutated_documents(read: Callable[[Path], None], tmp_path: Path) -> None:
    read_files = refused = 0
    for path in malformed_documents(tmp_path, draws(300), seed=0):
        line = message_of(read, path)
        read_files, refused = read_files + (line is None), refused + (line is not None)
        if line is not None:
            assert str(path) in line
            assert any(word in line for word in ("correct the file", "give ")), line
        path.unlink()
    assert read_files and refused


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
@READS
def test_the_line_of_a_mistake_is_named_in_compressed_files(
    read: Callable[[Path], None], pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    ending = {bytes: "", gzip.compress: ".gz", bz2.compress: ".bz2", lzma.compress: ".xz"}[pack]
    path = tmp_path / f"documents.jsonl{ending}"
    path.write_bytes(pack(DOCUMENT * 3))
    assert message_of(read, path) is None
    path.write_bytes(pack(DOCUMENT * 3 + BAD + DOCUMENT))
    line = message_of(read, path)
    assert line is not None and line.startswith(f"path={path}, line 4: not readable as json")
    path.write_bytes(pack(DOCUMENT * 3)[:-8] if ending else DOCUMENT * 3 + DOCUMENT[:-8])
    line = message_of(read, path)
    assert line is not None and line.startswith(f"path={path}, line 4: not readable as json")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (DOCUMENT + b"null\n" + DOCUMENT, "line 2: not readable as json: it is no JSON object"),
        (DOCUMENT + b'{"text":' * 100_000 + b"1" + b"}" * 100_000, "line 2: not readable as json: it is nested more"),
        (DOCUMENT + b'{"text": ' + b"[" * 100_000, "line 2: not readable as json: it is nested more"),
        (b"[null,\n" + DOCUMENT.strip() + b"]", "entry 0 of the list is no JSON object"),
        (DOCUMENT + b"\x00" * 64 + b"\n", "line 2: not readable as json"),
        (DOCUMENT + b'{"text": "\\ud800"}\n', "line 2: not readable as json"),
        (b"", "no documents in it"),
    ],
)
@READS
def test_what_is_wrong_with_json(read: Callable[[Path], None], content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_bytes(content)
    line = message_of(read, path)
    assert line is not None and why in line


@READS
def test_json_that_is_unusual_is_read(read: Callable[[Path], None], tmp_path: Path) -> None:
    text = "lorem {[ " * 300  # brackets in texts are no levels
    nested: object = 1
    for _ in range(30):
        nested = {"a": nested}
    contents = {
        "brackets.jsonl": "".join(json.dumps({"text": text}) + "\n" for _ in range(3)).encode(),
        "nested.jsonl": (json.dumps({"text": "lorem", "more": nested}) + "\n").encode() * 3,
        "mark.jsonl": b"\xef\xbb\xbf" + DOCUMENT * 3,
        "blank.jsonl": b"\n" + DOCUMENT + b"\n\n" + DOCUMENT * 2,
        "list.json": b"[" + b",\n".join([DOCUMENT.strip()] * 3) + b"]",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert message_of(read, tmp_path / name) is None, name


def stream_of_four_files(folder: Path) -> DocumentStream:
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.jsonl").write_bytes(DOCUMENT * 2)
    return stream_of(folder)


def test_a_later_file_of_a_stream_is_named(tmp_path: Path) -> None:
    stream = stream_of_four_files(tmp_path / "documents")
    files = stream.source.files
    files[3].write_bytes(DOCUMENT + b"null\n")
    reader, read = DocumentReader(stream), []
    with pytest.raises(ValueError, match="it is no JSON object") as error:
        read.extend(reader)
    assert str(files[3]) in str(error.value)


def test_a_file_that_is_gone_after_the_stream_began_is_named(tmp_path: Path) -> None:
    stream = stream_of_four_files(tmp_path / "documents")
    reader = DocumentReader(stream)
    stream.source.files[2].unlink()
    with pytest.raises(ValueError, match="not readable as json") as error:
        list(reader)
    assert "\n" not in str(error.value) and str(tmp_path / "documents") in str(error.value)


@READS
def test_folders_with_the_ending_of_a_file_are_searched(read: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "documents.jsonl"
    (folder / "more.jsonl").mkdir(parents=True)
    (folder / "more.jsonl" / "a.jsonl").write_bytes(DOCUMENT * 3)
    assert message_of(read, folder) is None
    shutil.rmtree(folder / "more.jsonl")
    line = message_of(read, folder)
    assert line is not None and "no file there ends with" in line


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every file")
@READS
def test_a_file_that_may_not_be_read_is_named(read: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_bytes(DOCUMENT * 3)
    path.chmod(0)
    line = message_of(read, path)
    assert line is not None and line.startswith(f"path={path}")
