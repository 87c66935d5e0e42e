"""Says that a worker which was started again has not come back in the time that others took."""

from threading import Thread

from elaswave_plugin.agent.common import Common
from elaswave_plugin.agent.trainer_session import TrainerSession
from elaswave_plugin.ipc.console import say
from elaswave_plugin.ipc.stack_line import where_is

# An import beside the training takes its time, and with a cold cache more than for the others.
TIMES, LEAST_S = 2.0, 60.0


def watch(common: Common, trainer: TrainerSession) -> None:
    """Look once whether the trainer may enter by then."""
    took_s = common.took_s
    after_s = max(LEAST_S, TIMES * took_s)

    def look() -> None:
        life = trainer.life
        if life.works and not life.has_come and common.exit_code is None:
            Thread(target=tell, name="late", daemon=True).start()  # to find the line takes long

    def tell() -> None:
        line = where_is(trainer.pid, trainer.page.stack_fd) or "a line that cannot be read"
        others = f"; others took {took_s:.0f} s" if took_s else ""
        say(
            f"worker {trainer.slot} was started again {after_s:.0f} s ago and has not come so far "
            f"as to enter{others}: it is in {line}; the job goes on without it"
        )
        common.reactor.post(lambda: note(line))

    def note(line: str) -> None:
        trainer.late_in = line
        incarnation = trainer.life.incarnation
        common.events.emit("late_return", slot=trainer.slot, incarnation=incarnation, line=line)

    common.reactor.after(after_s, look)
