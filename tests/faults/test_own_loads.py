"""Scripts that load a checkpoint if there is one: a worker that comes back finds one of its job."""

from dataclasses import replace
from pathlib import Path

from tests.faults import own_scripts
from tests.faults.conftest import Launch, Reference
from tests.faults.harness import JobSpec, check_equal
from tests.faults.test_join import entered
from tests.proofs import Kind, Promise, proves

SPEC = JobSpec(nproc=3, steps=8, global_batch=6, dump="last", respawn=5)
BACK = {"kills": ("1@2:backward",), "changes": ("+1@5",)}
_LOOP = "    for iteration, report in job.train("
# Plainly, and not in job.run(load, phase="load").
LOADS = """    tracker = Path(args.save) / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        newest = Path(args.save) / f"iter_{int(tracker.read_text()):07d}"
        state = dist_checkpointing.load(state_to_save(model, optimizer, scheduler), str(newest))
        model[0].module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        print(f"loaded {newest.name}", flush=True)
"""


@proves(Kind.RETURN, Promise.EQUAL, victim="1", moment="2:backward")
def test_it_loads_alone_what_all_would_load_together(
    run: Launch, reference: Reference, tmp_path: Path
) -> None:
    script = own_scripts.write(tmp_path, (_LOOP, LOADS + _LOOP))
    spec = replace(SPEC, script=script)
    undisturbed = reference(replace(spec, options=(f"--save={tmp_path / 'empty'}",)))
    saves = (f"--save={tmp_path / 'saved'}", "--save-interval=2")
    survived = run(replace(spec, options=saves, **BACK))
    check_equal(survived, undisturbed)
    assert entered(survived) == [(1, 1)]
    assert survived.output.count("loaded iter_") == 1
    # The launch behind that one finds it too, and counts from 0, which its script has not said.
    again = run(replace(spec, options=saves[:1]))
    assert again.returncode == 0, again.output[-3000:]
    assert again.output.count("the optimizer has made 8 steps, as a checkpoint has it") == 1
    told = "the optimizer has made"
    assert told not in undisturbed.output and told not in survived.output
