"""A tiny vocabulary and sentences for BERT and T5, which have no made-up data of their own."""

import random
from pathlib import Path

NUM_WORDS = 120


def write_sentences(folder: Path) -> None:
    """Write vocab.txt and sentences.bin, .idx: 200 documents of 12 short sentences."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    draw = random.Random(1)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(NUM_WORDS))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    builder = IndexedDatasetBuilder(str(folder / "sentences.bin"))
    for _ in range(200):
        lengths = [draw.randrange(4, 9) for _ in range(12)]
        ids = [draw.randrange(5, 5 + NUM_WORDS) for _ in range(sum(lengths))]
        builder.add_document(torch.tensor(ids), lengths)
    builder.finalize(str(folder / "sentences.idx"))
