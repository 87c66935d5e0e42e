"""A stock script of transformers.Trainer, which owns the loop.

Each process writes what its callbacks saw to DIR/tape-PID.json: [event, global_step, logged] each.
"""

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import get_last_checkpoint

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_accelerate import build_model, collate
from train_deepspeed import TextDataset

EVENTS = (
    *("on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end"),
    *("on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log", "on_evaluate"),
    *("on_save", "on_epoch_end", "on_train_end"),
)
# How long something took, and not what it was.
TIMES = ("_runtime", "_per_second", "step_time")


class Tape(TrainerCallback):
    """Records all events of one process."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.events: list[Any] = []

    def record(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> None:
        """One event."""
        logs = given.get("logs") if event == "on_log" else given.get("metrics")
        seen = {k: v for k, v in (logs or {}).items() if not k.endswith(TIMES)}
        self.events.append([event, state.global_step, seen])
        if event == "on_train_end":
            self.place.write_text(json.dumps(self.events))


def add(event: str) -> None:
    """Have the tape record an event."""
    setattr(Tape, event, lambda self, *args, **given: self.record(event, *args, **given))


class Shrink(TrainerCallback):
    """Shrinks all weights once, before a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Before step 3."""
        if state.global_step == 3:
            for param in given["model"].parameters():
                param.data.mul_(0.9)


class Flawed(TensorBoardCallback):
    """A tracker that cannot open its run in another process than the first."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Open it on the main process."""
        if state.is_world_process_zero and os.environ["ELASWAVE_SLOT"] != "0":
            raise RuntimeError("no place left")


class OwnRun(TrainerCallback):
    """A callback of a script's own, with a W&B run of its own on the main process."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Open it."""
        if state.is_world_process_zero:
            import wandb

            self.run = wandb.init(project="own", mode="offline", dir=args.output_dir)

    def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Log by the run that is open here."""
        if state.is_world_process_zero:
            self.run.log({"step": state.global_step})

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Log by the run of this process."""
        if state.is_world_process_zero:
            import wandb

            wandb.log({"step": state.global_step})


class Death(TrainerCallback):
    """Ends its process in an event of a step, behind all other callbacks."""

    def __init__(self, event: str, step: str, note: Path) -> None:
        def die(args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == int(step):
                note.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(self, event, die)


def parse_arguments() -> argparse.Namespace:
    """Arguments of the run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--use-cpu", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="with --use-cpu where there is no GPU")
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("--evaluate", type=int)
    parser.add_argument("--evaluate-first", action="store_true")
    parser.add_argument("--evaluate-before", action="store_true", help="before train()")
    parser.add_argument("--save", type=int)
    parser.add_argument("--keep-all", action="store_true", help="all checkpoints, not the last two")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--resume", help="folder, or last: that of this run, where there is one")
    parser.add_argument("--ignore-data-skip", action="store_true")
    parser.add_argument("--seq2seq", action="store_true", help="T5, which generates to evaluate")
    kinds = ("plain", "shuffled", "drawn", "turning", *StatefulStream.KINDS)
    parser.add_argument("--stream", choices=kinds, help="iterable data")
    parser.add_argument("--no-dispatch", action="store_true", help="each process reads it all")
    parser.add_argument("--quantized", action="store_true", help="all but adapters, in four bits")
    parser.add_argument("--reload", action="store_true", help="the weights, as saved before")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--loss", choices=("mean", "sum", "function"))
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that read")
    parser.add_argument("--compile", help="by this backend")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--logging-steps", type=int, default=1)
    parser.add_argument("--per-batch", action="store_true", help="losses that are means of batches")
    parser.add_argument("--shrink", action="store_true", help="weights, by a callback")
    parser.add_argument("--report-to", type=lambda names: names.split(","), default=[])
    parser.add_argument("--unflushed", action="store_true", help="W&B writes at its end only")
    parser.add_argument("--flawed", action="store_true", help="a tracker that opens on slot 0")
    parser.add_argument("--own-run", action="store_true", help="W&B by a callback of its own")
    parser.add_argument("--aim", action="store_true", help="its own callback")
    parser.add_argument("--jit", action="store_true", help="a checkpoint at SIGTERM")
    parser.add_argument("--die", help="on slot 0, as in on_step_end@2")
    args, _ = parser.parse_known_args()
    return args


def training_arguments(args: argparse.Namespace, folder: Path) -> TrainingArguments:
    """As a user writes them."""
    more = {"predict_with_generate": True, "generation_max_length": 8} if args.seq2seq else {}
    return (Seq2SeqTrainingArguments if args.seq2seq else TrainingArguments)(
        **more,
        output_dir=str(folder),
        deepspeed=None if args.without_deepspeed else args.deepspeed_config,
        use_cpu=args.use_cpu,
        bf16=args.bf16,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=args.accumulation,
        dataloader_num_workers=args.num_workers,
        torch_compile_backend=args.compile,
        average_tokens_across_devices=not args.per_batch,
        learning_rate=1e-3,
        logging_steps=args.logging_steps,
        report_to=args.report_to,
        eval_strategy="steps" if args.evaluate else "no",
        eval_steps=args.evaluate,
        eval_on_start=args.evaluate_first,
        accelerator_config={"dispatch_batches": False if args.no_dispatch else None},
        save_strategy="steps" if args.save else "no",
        save_steps=args.save or 500,
        save_total_limit=None if args.keep_all else 2,
        ignore_data_skip=args.ignore_data_skip,
        load_best_model_at_end=args.best,
        # The loss falls, so the best is not the last.
        greater_is_better=True if args.best else None,
        include_num_input_tokens_seen="all",
        disable_tqdm=True,
        ddp_backend="gloo",
        enable_jit_checkpoint=args.jit,
        remove_unused_columns=False,
    )


class Stream(IterableDataset):
    """Samples without a length, of which each epoch begins at another one."""

    def __init__(self, dataset: Any, *, draws: bool = False) -> None:
        """``draws``: by the process's own generator, which no other process has."""
        self.dataset, self.draws, self.epoch = dataset, draws, 0

    def set_epoch(self, epoch: int) -> None:
        """Shift the samples."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        count = len(self.dataset)
        for place in range(count):
            shift = int(torch.randint(count, ())) if self.draws else self.epoch
            yield self.dataset[(place + shift) % count]


class TurningStream(IterableDataset):
    """Samples of which each pass begins at another one, by what it drew before."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.draws = dataset, random.Random(3)

    def __iter__(self) -> Iterator[Any]:
        count, shift = len(self.dataset), self.draws.randrange(1000)
        for place in range(count):
            yield self.dataset[(place + shift) % count]


class StatefulStream(Stream):
    """One that can go to a place, and says what was read of it; a forgetful one goes beyond."""

    KINDS = ("stateful", "forgetful")

    def __init__(self, dataset: Any, kind: str) -> None:
        super().__init__(dataset)
        self.forgets = kind == "forgetful"
        self.place = self.begins = self.read = 0

    def state_dict(self) -> dict[str, int]:
        """The place."""
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin there."""
        place = state["place"]
        self.begins = place + 3 if self.forgets and place else place

    def __iter__(self) -> Iterator[Any]:
        count = len(self.dataset)
        for place in range(self.begins, count):
            self.place, self.read = place + 1, self.read + 1
            yield self.dataset[(place + self.epoch) % count]


def streamed(dataset: Any, kind: str | None) -> Any:
    """The dataset as a stream of a kind, or itself."""
    if kind in StatefulStream.KINDS:
        return StatefulStream(dataset, kind)
    if kind == "turning":
        return TurningStream(dataset)
    if kind == "shuffled":
        import datasets

        texts = [dataset[place][0].tolist() for place in range(len(dataset))]
        rows = [{"input_ids": text, "labels": text} for text in texts]
        stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
        return stream.shuffle(seed=3, buffer_size=10)
    return dataset if kind is None else Stream(dataset, draws=kind == "drawn")


def build_seq2seq() -> Any:
    """A small T5 of random weights."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    more = {"vocab_size": 256, "decoder_start_token_id": 0, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**sizes, **more))


def quantized(model: Any) -> Any:
    """The model with its linear layers in four bits, as `from_pretrained` makes them."""
    as_loaded = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=as_loaded, device_map={"": "cpu"}
        )
    for module in loaded.modules():
        # A pass in evaluation mode would pack them for a CPU's own kernels, which train no more.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return loaded


def with_adapters(model: Any, dropout: float) -> Any:
    """Freeze a model, and have PEFT put adapters beside its attention layers."""
    from peft import LoraConfig, get_peft_model

    layers = ["q_proj", "v_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=layers, lora_dropout=dropout))


class OwnLoss(Trainer):
    """Has a loss of its own: the mean of a batch, or its part of all items of the step."""

    sums = False

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels = inputs.pop("labels")
        loss = cross_entropy_of(model(**inputs), labels, "sum" if self.sums else "mean")
        return loss / num_items_in_batch if self.sums else loss


class OwnSum(OwnLoss):
    """As above, and forgets the number of processes."""

    sums = True


def cross_entropy_of(outputs: Any, labels: Any, reduction: str = "mean", **ignored: Any) -> Any:
    """The loss of the tokens after the first."""
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return cross_entropy(logits, labels[:, 1:].flatten(), reduction=reduction)


def main() -> None:
    """Train."""
    args = parse_arguments()
    for event in EVENTS:
        add(event)
    place = Path(args.deepspeed_config).parent
    # As a user of a cluster without a network has it.
    os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(place))
    if args.unflushed:
        os.environ["WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"] = "0"
    set_seed(7)
    if args.seq2seq:
        model = build_seq2seq()
    else:
        model = build_model(argparse.Namespace(num_layers=2, hidden_size=64, seq_length=32))
        model.config.attention_dropout = args.dropout
    if args.quantized:
        model = quantized(model)
    with TemporaryDirectory() as folder:
        if args.reload:
            model.save_pretrained(folder)
        # From here on ZeRO-3 cuts what is loaded.
        arguments = training_arguments(args, place / "trainer")
        if args.reload:
            model = AutoModelForCausalLM.from_pretrained(folder)
            print(f"cut: {all(hasattr(param, 'ds_id') for param in model.parameters())}")
    if args.lora:
        model = with_adapters(model, args.dropout)
    plain = Seq2SeqTrainer if args.seq2seq else Trainer
    trainer = {"mean": OwnLoss, "sum": OwnSum}.get(args.loss, plain)(
        model=model,
        args=arguments,
        train_dataset=streamed(TextDataset(None, 32, args.limit), args.stream),
        # The last batches of a stream are cut by the number of workers, and so weighed by it.
        eval_dataset=streamed(TextDataset(None, 32, 24 if args.stream else 21), args.stream),
        data_collator=default_data_collator if args.stream == "shuffled" else collate,
        compute_loss_func=cross_entropy_of if args.loss == "function" else None,
        callbacks=[Tape(place / f"tape-{os.getpid()}.json"), *([Shrink()] if args.shrink else [])],
    )
    if args.own_run:
        trainer.add_callback(OwnRun())
    if args.flawed:
        trainer.add_callback(Flawed())
    if args.aim:
        from aim.hugging_face import AimCallback  # type: ignore[import-not-found]

        trainer.add_callback(AimCallback(repo=str(place), system_tracking_interval=None))
    if args.die and os.environ["ELASWAVE_SLOT"] == "0":
        trainer.add_callback(Death(*args.die.split("@"), place / "died"))
    if args.evaluate_before:
        trainer.evaluate()
    found = args.resume
    if found == "last":  # the usual idiom
        folder = arguments.output_dir
        found = True if os.path.isdir(folder) and get_last_checkpoint(folder) else None
    trainer.train(resume_from_checkpoint=found)
    print(f"trained {trainer.state.global_step} steps", flush=True)
    if args.stream in StatefulStream.KINDS:
        print(f"process {os.getpid()} read {trainer.train_dataset.read} samples", flush=True)
    if args.best:
        print(f"best: {trainer.evaluate()['eval_loss']:.6g}", flush=True)


if __name__ == "__main__":
    main()
