"""The agreement of a hundred nodes: bytes that grow with the nodes, and a commit within its limit.

The whole (10,000 workers) is run by hand: `python -m benchmarks.agreement_size`.
"""

from typing import Any

import pytest

from benchmarks.agreement_size import measure

FEWER, MORE = 32, 128
MOST_COMMIT_BYTES = 512 << 10
OF_NODES = 1250


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [measure(nodes, 8) for nodes in (FEWER, MORE)]


@pytest.mark.parametrize("event", ["commit", "return", "node_lost", "join", "election"])
def test_what_a_leader_sends_and_hears_grows_with_the_nodes(
    rows: list[dict[str, Any]], event: str
) -> None:
    few, many = (row[event] for row in rows)
    assert many["received_bytes"] <= 1.1 * (MORE / FEWER) * few["received_bytes"]
    most = max(many["longest_message_bytes"].values())
    assert most / MORE <= MOST_COMMIT_BYTES / OF_NODES


def test_a_beat_to_each_node_is_as_long_whatever_their_number(rows: list[dict[str, Any]]) -> None:
    few, many = (row["beat"] for row in rows)
    assert many["sent_bytes"] <= (MORE / FEWER) * 1.1 * few["sent_bytes"]
    assert many["longest_message_bytes"] == few["longest_message_bytes"]
