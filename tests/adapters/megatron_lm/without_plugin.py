"""Runs a script of Megatron-LM without the plugin: the records for a CPU, and torch's own gloo."""

import runpy
import sys

from elaswave_plugin.adapters.megatron_lm.stand_in import without_triton


def patch() -> None:
    """What a machine without a GPU needs, and the wheel, which brings no Makefile."""
    without_triton()
    from elaswave_plugin.adapters.megatron_lm.cpu import lm_cpu_patches
    from elaswave_plugin.adapters.megatron_lm.hooks import Hooks
    from elaswave_plugin.adapters.megatron_lm.seams import lm_patches
    from elaswave_plugin.adapters.patching import PatchSet

    ours = lm_patches(Hooks(lambda config: None)).records
    built = [one for one in ours if one.target.endswith(":compile_helpers")]
    assert len(built) == 1
    PatchSet([*lm_cpu_patches().records, *built]).apply()


if __name__ == "__main__":
    script, *arguments = sys.argv[1:]
    patch()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
