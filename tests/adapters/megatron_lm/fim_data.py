"""Runs pretrain_gpt.py --fim-data with documents and a tokenizer of letters made here.

Each id is one letter, and five are special.
"""

import random
import runpy
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

NUM_IDS, SPECIAL = 120, ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<eod>")
_FIRST_LETTER = 0x4E00


def write_documents(folder: Path) -> None:
    """Write documents.bin, .idx: 300 documents of 10 to 40 ids."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draw = random.Random(5)
    builder = IndexedDatasetBuilder(str(folder / "documents.bin"))
    for _ in range(300):
        ids = [draw.randrange(NUM_IDS) for _ in range(draw.randrange(10, 40))]
        builder.add_document(torch.tensor([*ids, NUM_IDS + 4]), [len(ids) + 1])
    builder.finalize(str(folder / "documents.idx"))


class Letters:
    """A tokenizer of which each id is one letter, and five are special."""

    vocab_size, eod, pad = NUM_IDS + len(SPECIAL), NUM_IDS + 4, NUM_IDS + 3
    unique_identifiers: Mapping[str, str] = {"class": "Letters"}

    @property
    def _tokenizer(self) -> "Letters":
        return self

    def tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        """Return the ids of special tokens."""
        return [NUM_IDS + SPECIAL.index(token) for token in tokens]

    def ids_to_text(self, ids: Iterable[int]) -> str:
        """Return one letter for each id."""
        return "".join(chr(_FIRST_LETTER + int(one)) for one in ids)

    def text_to_ids(self, text: str) -> list[int]:
        """Return the id of each letter."""
        return [ord(letter) - _FIRST_LETTER for letter in text]


def main() -> None:
    """Run the script beside this file; `--samples FILE` has each one written."""
    folder = Path(__file__).parent
    sys.path.insert(0, str(folder))
    from megatron.core.tokenizers.text.utils import build_tokenizer
    from megatron.training.datasets.fim_dataset import GPTFIMDataset

    place = sys.argv.index("--samples")
    _, samples = sys.argv[place : place + 2]
    del sys.argv[place : place + 2]
    query = GPTFIMDataset._query_document_sample_shuffle_indices

    def noted(dataset: GPTFIMDataset, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the native result, and write which sample had which ids."""
        text, documents = query(dataset, index)
        with Path(samples).open("a") as lines:
            lines.write(f"{index} {text.tolist()}\n")
        return text, documents

    GPTFIMDataset._query_document_sample_shuffle_indices = noted
    build_tokenizer.build_tokenizer = lambda args: Letters()
    runpy.run_path(str(folder / "pretrain_gpt.py"), run_name="__main__")


if __name__ == "__main__":
    main()
