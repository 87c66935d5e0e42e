"""The dataset holds the bytes of the text, read back with Megatron-Core's own reader."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")


def test_dataset_holds_every_byte_and_an_end_for_each_document(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    contents = {"a": b"hello", "b": bytes(range(256))}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    prefix = tmp_path / "data" / "text"
    write = [sys.executable, "-m", "elaswave_plugin.demo.text", str(prefix), str(folder)]
    subprocess.run(write, check=True, timeout=100)
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(prefix))
    assert data.index.dtype.__name__ == "uint16", data.index.dtype
    documents = [data[number].tolist() for number in range(len(data))]
    assert documents == [[*content, 256] for content in contents.values()]
