"""Byte tokens from real files: order, windows over file borders, the same draw everywhere, clear errors."""

import errno
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import data


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    write(tmp_path, "b.txt", b"second ")
    write(tmp_path, "a.txt", b"first ")
    write(tmp_path, "c/d.md", b"third")
    write(tmp_path, "c/empty.txt", b"")
    write(tmp_path, "picture.bin", b"\x00\x01\x02")
    write(tmp_path, ".git/config", b"hidden")
    return tmp_path


def test_a_folder_is_its_text_files_in_path_order(texts: Path) -> None:
    corpus = data.open_corpus([texts])
    assert corpus.read(0, corpus.size) == b"first second third"


def test_files_keep_the_order_they_are_given_in(texts: Path) -> None:
    corpus = data.open_corpus([texts / "b.txt", texts / "a.txt"])
    assert corpus.read(0, corpus.size) == b"second first "


def test_every_window_is_a_slice_of_the_whole(texts: Path) -> None:
    corpus = data.open_corpus([texts])
    whole = corpus.read(0, corpus.size)
    for start in range(corpus.size):
        for length in range(corpus.size - start + 1):
            assert corpus.read(start, length) == whole[start : start + length]


def test_the_default_is_the_standard_library() -> None:
    corpus = data.open_corpus()
    names = {path.name for path in corpus.files}
    assert {"argparse.py", "random.py"} <= names
    assert not any("site-packages" in path.parts for path in corpus.files)
    assert list(corpus.files) == sorted(corpus.files)


def test_a_batch_depends_on_seed_and_step_alone(texts: Path) -> None:
    def draw(seed: int, step: int) -> torch.Tensor:
        return data.batch(data.open_corpus([texts]), seed=seed, step=step, batch_size=3, seq_len=5)

    assert torch.equal(draw(1, 2), draw(1, 2))
    assert not torch.equal(draw(1, 2), draw(1, 3))
    assert not torch.equal(draw(1, 2), draw(2, 2))


def test_windows_reach_the_first_and_the_last_byte(texts: Path) -> None:
    corpus = data.open_corpus([texts])
    draws = [data.batch(corpus, seed=0, step=step, batch_size=1, seq_len=17)[0] for step in range(40)]
    assert {bytes(window.tolist()) for window in draws} == {b"first second thir", b"irst second third"}
    assert draws[0].dtype == torch.int64


def test_a_window_may_be_the_whole_text(texts: Path) -> None:
    corpus = data.open_corpus([texts], need=18)
    assert data.batch(corpus, seed=0, step=0, batch_size=2, seq_len=18).shape == (2, 18)


def test_too_little_text_names_both_sizes(texts: Path) -> None:
    with pytest.raises(data.DataError, match=r"18 bytes of text in 3 files, but a window is 19 bytes"):
        data.open_corpus([texts], need=19)


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"nowhere: no such file or folder"):
        data.open_corpus([tmp_path / "nowhere"])


def test_an_unreadable_file_is_named(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def refusing(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "b.txt":  # what a file mode does, but for root too
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing)
    with pytest.raises(data.DataError, match=r"b\.txt: Permission denied"):
        data.open_corpus([texts])


def test_the_fingerprint_sees_names_order_and_sizes(texts: Path) -> None:
    a, b = texts / "a.txt", texts / "b.txt"
    prints = {data.open_corpus(paths).fingerprint for paths in ([a], [b], [a, b], [b, a])}
    assert len(prints) == 4
    before = data.open_corpus([a]).fingerprint
    a.write_bytes(b"longer than it was")
    assert data.open_corpus([a]).fingerprint != before


def test_documents_are_the_same_everywhere_and_fill_the_sequence() -> None:
    for seq_len, mean in ((2, 2), (61, 7), (4000, 50)):
        borders = data.documents(seed=1, step=3, seq_len=seq_len, mean=mean)
        lengths = [end - start for start, end in pairwise(borders)]
        assert borders[0] == 0 and borders[-1] == seq_len and all(0 < x < 2 * mean for x in lengths)
        assert borders == data.documents(seed=1, step=3, seq_len=seq_len, mean=mean)
    assert abs(sum(lengths) / len(lengths) - 50) < 10
    assert borders != data.documents(seed=1, step=4, seq_len=4000, mean=50)


def test_a_packed_sequence_is_a_window_for_each_document(texts: Path) -> None:
    corpus = data.open_corpus([texts])
    whole = corpus.read(0, corpus.size)
    borders = [0, 4, 4, 5, 12, 30]
    ids = data.batch(corpus, seed=0, step=0, batch_size=2, seq_len=30, borders=borders)
    assert ids.shape == (2, 30)
    for sequence in ids:
        for start, end in pairwise(borders):
            assert bytes(sequence[start:end].tolist()) in whole
