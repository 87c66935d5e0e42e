"""Patch records: checked before anything changes, applied together, undone completely."""

import argparse
import importlib
import types
from pathlib import Path
from typing import Any

import pytest

from elaswave_plugin.adapters import megatron
from elaswave_plugin.adapters.patching import Hook, PatchRecord, PatchSet, installed_version
from elaswave_plugin.errors import PatchMismatchError
from elaswave_plugin.ipc.environment import AGENT


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that stands for an installed framework."""
    module = types.ModuleType("some_framework")

    class Base:
        def inherited(self) -> str:
            return "base"

    class Thing(Base):
        pass

    def function(first: int, second: int = 0) -> int:
        return first + second

    module.Thing, module.function = Thing, function  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "some_framework", module)
    return module


def record(path: str, **changes: Any) -> PatchRecord:
    fields: dict[str, Any] = {
        "target": f"some_framework:{path}",
        "reason": "a test",
        "distribution": "pytest",
        "valid": ">=1",
        "make": lambda original: lambda *args, **kwargs: "patched",
    }
    return PatchRecord(**{**fields, **changes})


def test_apply_and_undo_restore_functions_and_inherited_methods(target: Any) -> None:
    patches = PatchSet([record("function"), record("Thing.inherited")])
    original = target.function
    patches.apply()
    patches.apply()
    assert (target.function(1), target.Thing().inherited()) == ("patched", "patched")
    patches.undo()
    assert target.function is original
    assert target.Thing().inherited() == "base"
    assert "inherited" not in vars(target.Thing)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"valid": "<1"}, "was written for <1; install a version in that range"),
        ({"distribution": "no-such-thing"}, "no-such-thing is not installed"),
        ({"parameters": ("first", "third")}, r"takes \('first', 'second'\)"),
        ({"target": "some_framework:absent"}, "does not exist"),
    ],
)
def test_apply_changes_nothing_when_one_record_does_not_fit(
    target: Any, bad: dict[str, Any], sentence: str
) -> None:
    original = target.Thing.inherited
    patches = PatchSet([record("Thing.inherited"), record("function", **bad)])
    with pytest.raises(PatchMismatchError, match=sentence):
        patches.apply()
    assert target.Thing.inherited is original


def test_a_range_of_versions_may_have_a_fingerprint_of_its_own(target: Any) -> None:
    one = record(
        "function",
        parameters=("first",),
        elsewhere=((">=3,<4", ("first", "third")), (">=4", ("first", "second"))),
    )
    one.check("4.1")
    for version, wanted in (("2.0", r"\('first',\)"), ("3.9", r"\('first', 'third'\)")):
        with pytest.raises(PatchMismatchError, match=f"in pytest {version}, wanted {wanted}"):
            one.check(version)


def test_a_target_that_is_gone_is_left_out(target: Any) -> None:
    patches = PatchSet([record("absent", gone=">=1"), record("function", gone="<1")])
    patches.apply()
    assert target.function(1) == "patched" and not hasattr(target, "absent")
    patches.undo()
    with pytest.raises(PatchMismatchError, match="does not exist"):
        PatchSet([record("absent", gone="<1")]).apply()


def test_a_hook_that_the_source_has_is_set_and_nothing_is_replaced(target: Any) -> None:
    hook = Hook("some_framework:function_hook", lambda native: ("hook for", native))
    patches, original = PatchSet([record("function", hook=hook)]), target.function
    assert patches.places == ("some_framework:function",)
    target.function_hook = None
    assert patches.places == ("some_framework:function_hook",)
    patches.apply()
    assert target.function is original
    assert target.function_hook == ("hook for", original)
    with pytest.raises(PatchMismatchError, match=r"function_hook is set already, to \('hook for'"):
        PatchSet(patches.records).apply()
    patches.undo()
    assert target.function_hook is None


def test_cpu_records_are_reversible_and_carry_their_reasons() -> None:
    import torch

    from elaswave_plugin.adapters.megatron.compat.cpu_patches import cpu_patches

    if torch.cuda.device_count():
        pytest.skip("CPU records are for machines without a GPU")
    patches = cpu_patches()
    before = {}
    for one in patches.records:
        owner, name = one.locate()
        before[one.target] = vars(owner).get(name, "absent")
        assert one.reason
    patches.apply()
    try:
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).type() == "torch.FloatTensor"
    finally:
        patches.undo()
    for one in patches.records:
        owner, name = one.locate()
        assert vars(owner).get(name, "absent") is before[one.target]


def test_what_does_not_fit_is_refused_before_the_others_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def mismatch(patches: PatchSet) -> None:
        raise PatchMismatchError("megatron-core is 0.15, wanted 0.16.1")

    monkeypatch.setattr(PatchSet, "check", mismatch)
    monkeypatch.setattr(megatron, "ElasticJob", lambda *_, **__: pytest.fail("it has joined"))
    monkeypatch.delenv(AGENT, raising=False)
    parser = megatron.add_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--elaswave"])
    vars(args).update(global_batch_size=8, micro_batch_size=1, seed=1)
    with pytest.raises(SystemExit) as end:
        megatron.attach(args)
    assert end.value.code == 2 and "megatron-core is 0.15" in capsys.readouterr().err


def test_a_target_that_somebody_else_has_replaced_is_told_with_their_module(
    target: types.ModuleType,
) -> None:
    def stub(seed: int) -> None:
        """As of a stand-in for torch.cuda of a user's own."""

    stub.__module__ = "my_stubs"
    target.function = stub  # type: ignore[attr-defined]
    with pytest.raises(PatchMismatchError, match=r"of the module 'my_stubs', which replaced it"):
        record("function", parameters=("first", "second")).check("9")
    stub.__module__ = "some_framework.parts"
    with pytest.raises(PatchMismatchError, match="upstream change of this function"):
        record("function", parameters=("first", "second")).check("9")


def test_the_version_is_that_of_the_code_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout on the path comes before the wheel, whose metadata stays there."""
    (tmp_path / "metadata_only-1.0.dist-info").mkdir()
    (tmp_path / "metadata_only-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: metadata-only\nVersion: 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_version("metadata-only") == "1.0"
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "__init__.py").touch()
    (tmp_path / "metadata" / "only.py").write_text("__version__ = '2.5'\n")
    importlib.invalidate_caches()
    assert installed_version("metadata-only") == "2.5"
    assert installed_version("no-such-thing") is None
