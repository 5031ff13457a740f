"""Real text as byte tokens, read through memory maps.

A corpus is an ordered list of files seen as one long run of bytes; nothing is copied and no index is written.
A batch is a function of (seed, step) alone, so every rank draws the same windows without being told.
"""

import hashlib
import mmap
import os
import random
import sysconfig
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

# A file with a zero byte near its start is no text: archives, pictures, caches.
PROBE = 4096
# Folders of the standard library that differ between installations of one Python version.
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}


class DataError(ValueError):
    """The text that was asked for cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Corpus:
    """Files as one run of bytes: `files[i]` is the bytes from `starts[i]` up to `starts[i + 1]`."""

    files: tuple[Path, ...]
    starts: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.starts[-1]

    @property
    def fingerprint(self) -> str:
        """The same on two machines whose files have the same names, order and sizes."""
        lines = (f"{path.name} {end}\n" for path, end in zip(self.files, self.starts[1:], strict=True))
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    def read(self, start: int, length: int) -> bytes:
        """The bytes [start, start + length), which may span files."""
        end = start + length
        assert start >= 0 and end <= self.size, (start, end, self.size)
        parts = []
        for number in range(bisect_right(self.starts, start) - 1, len(self.files)):
            first, last = self.starts[number], self.starts[number + 1]
            if first >= end:
                break
            parts.append(mapped(self.files[number])[max(start - first, 0) : min(end, last) - first])
        return b"".join(parts)


@lru_cache(maxsize=64)
def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def open_corpus(paths: Sequence[Path] = (), *, need: int = 1) -> Corpus:
    """The text in `paths` (the standard library's sources if there are none), at least `need` bytes of it.

    Raises DataError for a path that is missing or cannot be read, and for too little text.
    """
    try:
        chosen = text_files(paths) if paths else sorted(standard_library())
        sizes = {path: readable_size(path) for path in chosen}
    except OSError as error:
        raise DataError(f"--data {error.filename}: {error.strerror}") from error
    files = tuple(path for path, size in sizes.items() if size)
    starts = tuple(accumulate((sizes[path] for path in files), initial=0))
    if starts[-1] < need:
        where = ", ".join(map(str, paths)) or "the standard library"
        raise DataError(
            f"{where} has {starts[-1]} bytes of text in {len(files)} files, but a window is {need} bytes; "
            "give more text with --data or a smaller --seq-len"
        )
    return Corpus(files, starts)


def standard_library() -> Iterator[Path]:
    """The sources of the running Python: real text that is there on every machine."""
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def text_files(paths: Sequence[Path]) -> list[Path]:
    """Files as given; of a folder the text files below it that are not hidden, in path order."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(below for below in path.rglob("*") if is_shown(below, path) and is_text(below))
        elif path.exists():
            found.append(path)
        else:
            raise DataError(f"--data {path}: no such file or folder")
    return found


def is_shown(path: Path, root: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(root).parts)


def is_text(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(PROBE)


def readable_size(path: Path) -> int:
    """Size in bytes; opens the file, so that one that cannot be read is found now and not during the run."""
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def documents(*, seed: int, step: int, seq_len: int, mean: int) -> list[int]:
    """Borders, from 0 to `seq_len`, of the documents that every sequence of step `step` is packed of: random
    lengths of `mean` on average, from 1 to twice as many but one."""
    draw = random.Random(f"{seed} {step} documents")
    borders = [0]
    while borders[-1] < seq_len:
        borders.append(min(borders[-1] + draw.randrange(1, 2 * mean), seq_len))
    return borders


def batch(
    corpus: Corpus, *, seed: int, step: int, batch_size: int, seq_len: int, borders: Sequence[int] = ()
) -> Tensor:
    """The windows of step `step`, int64 [batch_size, seq_len]: the same on every rank, for any rank count.

    A sequence is one window, or where there are `borders` a window for each of the documents between them.
    """
    draw = random.Random(f"{seed} {step}")
    lengths = [end - start for start, end in pairwise(borders or (0, seq_len))]
    sequences = [
        bytearray().join(corpus.read(draw.randrange(corpus.size - length + 1), length) for length in lengths)
        for _ in range(batch_size)
    ]
    return torch.stack([torch.frombuffer(ids, dtype=torch.uint8) for ids in sequences]).to(torch.int64)
