"""The groups that a TP x PP x DP job makes, as lists of slots (Megatron-Core's order of ranks)."""

from __future__ import annotations

from dataclasses import dataclass

from elaswave_plugin.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of tensor, pipeline and data parallelism; slot = t + tp * (d + dp * p)."""

    tp: int
    pp: int
    dp: int

    def __str__(self) -> str:
        return f"{self.tp}x{self.pp}x{self.dp}"

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.tp * self.pp * self.dp

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Every group of more than one member by name: tp, dp, pp, tp-pp, tp-dp, embedding."""
        tps, pps, dps = range(self.tp), range(self.pp), range(self.dp)

        def slot(t: int, d: int, p: int) -> int:
            return t + self.tp * (d + self.dp * p)

        found = {f"tp {d},{p}": tuple(slot(t, d, p) for t in tps) for d in dps for p in pps}
        found |= {f"dp {t},{p}": tuple(slot(t, d, p) for d in dps) for t in tps for p in pps}
        found |= {f"pp {t},{d}": tuple(slot(t, d, p) for p in pps) for t in tps for d in dps}
        found |= {f"tp-pp {d}": tuple(slot(t, d, p) for p in pps for t in tps) for d in dps}
        found |= {f"tp-dp {p}": tuple(slot(t, d, p) for d in dps for t in tps) for p in pps}
        if self.pp > 1:
            ends = (0, self.pp - 1)
            found |= {f"emb {t},{d}": tuple(slot(t, d, p) for p in ends) for t in tps for d in dps}
        return {name: members for name, members in found.items() if len(members) > 1}


def default_layout(world: int) -> Layout:
    """TP 2, and PP 2 below 32 workers, else 4. Raises ConfigurationError where that has no DP."""
    pp = 2 if world < 32 else 4
    if world % (2 * pp) or world < 2 * pp:
        raise ConfigurationError(
            f"--world has {world}, which is no multiple of TP 2 x PP {pp}: give --layout TP,PP,DP"
        )
    return Layout(tp=2, pp=pp, dp=world // (2 * pp))


def parse_layout(text: str, world: int) -> Layout:
    """Read "TP,PP,DP". Raises ConfigurationError when it is malformed or has another world size."""
    try:
        tp, pp, dp = map(int, text.split(","))
    except ValueError:
        raise ConfigurationError(f"--layout is {text!r}, wanted TP,PP,DP such as 2,2,4") from None
    layout = Layout(tp=tp, pp=pp, dp=dp)
    if min(tp, pp, dp) < 1 or layout.world != world:
        raise ConfigurationError(
            f"--layout {text} has {layout.world} workers, but --world has {world}: make them equal"
        )
    return layout
