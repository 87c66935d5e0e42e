"""A loop of one's own whose samples have few labels or many; the section says what divides it."""

import argparse
import json
import sys
from pathlib import Path

import deepspeed
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

import elaswave_plugin
import elaswave_plugin.deepspeed

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from train_accelerate import build_model
from train_deepspeed import TextDataset


class Ragged(torch.utils.data.Dataset):
    """Samples of which the first places, of another number each, have no label."""

    def __init__(self, *, has_labels: bool) -> None:
        self.texts = TextDataset(None, 32, 96)
        self.has_labels = has_labels

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        tokens, _ = self.texts[item]
        labels = tokens.clone()
        begins = item * 7 % 30
        if not self.has_labels:
            return {"input_ids": tokens, "begins": torch.tensor(begins)}
        labels[:begins] = -100
        return {"input_ids": tokens, "labels": labels}


class Pairs(torch.nn.Module):
    """A model whose loss compares the samples of a batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean product of neighbours."""
        means = self.model(input_ids=input_ids).logits.float().std((1, 2))
        return (means * means.roll(1)).mean()


class Classes(torch.nn.Module):
    """A model whose loss is a mean in which samples of another class count more."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean over the batch."""
        logits = self.model(input_ids=input_ids).logits.float()
        losses = cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        classes = 1.0 + input_ids[:, 0] % 3
        return (losses.mean(1) * classes).sum() / classes.sum()


class Smooth(torch.nn.Module):
    """A model whose loss has the gradient by what the layers are given, of each sample."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return a mean over samples."""
        given = self.model.get_input_embeddings()(input_ids)
        # The others have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            logits = self.model(inputs_embeds=given).logits.float()
        losses = cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        (slope,) = torch.autograd.grad(losses.sum(), given, create_graph=True)
        return (losses.mean(1) + slope.square().sum((1, 2))).mean()


class NotFinite(torch.nn.Module):
    """A model whose loss may be NaN, of which its gradient knows nothing."""

    is_broken = False

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> object:
        """Return what the model does."""
        output = self.model(**batch)
        if self.is_broken and "labels" in batch:
            output.loss = output.loss + float("nan")
        return output


def unlabelled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make the labels of a batch in the loop, of where they begin."""
    tokens = batch["input_ids"]
    places = torch.arange(tokens.shape[1])
    labels = tokens.where(places >= batch["begins"][:, None], -100)
    return {"input_ids": tokens, "labels": labels}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config")
    parser.add_argument("--steps", type=int)
    inside = ("model", "pairs", "added", "classes", "smooth")
    outside = ("made", "labels", "all", "sum", "terms")
    parser.add_argument("--by", choices=inside + outside)
    parser.add_argument("--says")
    parser.add_argument("--not-finite", type=int, help="step whose loss is NaN")
    args, _ = parser.parse_known_args()
    torch.manual_seed(1234)
    config = json.loads(Path(args.deepspeed_config).read_text())
    if args.says:
        config["elaswave"]["loss"] = args.says
    model = build_model(argparse.Namespace(num_layers=2, hidden_size=64, seq_length=32))
    made = {"pairs": Pairs, "classes": Classes, "smooth": Smooth}
    engine, _, loader, _ = deepspeed.initialize(
        model=made.get(args.by, NotFinite)(model),
        model_parameters=model.parameters(),
        config=config,
        training_data=Ragged(has_labels=args.by != "made"),
    )
    while engine.global_steps < args.steps:
        for batch in loader:
            engine.module.is_broken = engine.global_steps == args.not_finite
            if args.by in inside:
                output = engine(**batch)
                loss = output if torch.is_tensor(output) else output.loss
                if args.by == "added":
                    loss = loss + output.logits.square().mean()
            elif args.by == "made":
                loss = engine(**unlabelled(batch)).loss
            else:
                logits = engine(input_ids=batch["input_ids"]).logits
                losses = cross_entropy(
                    logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none"
                )
                loss = losses.sum() / 100
                if args.by == "labels":
                    loss = losses.sum() / batch["labels"][:, 1:].ne(-100).sum().clamp(min=1)
                if args.by == "all":
                    count = batch["labels"][:, 1:].ne(-100).sum() / len(logits)
                    of_a_sample = elaswave_plugin.deepspeed.mean(engine, count)
                    loss = losses.sum() / len(logits) / of_a_sample.float()
                if args.by == "terms":
                    distance = logits.float().square().mean((1, 2)).mean()
                    loss = 0.5 * elaswave_plugin.terms(sum=loss, samples=distance)
            engine.backward(loss)
            engine.step()
            if engine.global_steps >= args.steps:
                break


if __name__ == "__main__":
    main()
