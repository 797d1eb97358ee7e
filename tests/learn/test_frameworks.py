"""Private loops under Fabric, Accelerate and Trainer, with tiny random models.

``make frameworks`` installs the libraries in an environment of their own and runs these tests.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import corn
from corn.errors import CornError
from corn.learn.own_loop import PrivateTraining
from corn.learn.user_model import SampleGradients

# They warn of what they are to change.
pytestmark = pytest.mark.filterwarnings("ignore")

N, EPOCHS, BATCH = 2, 2, 12


class Tokens(Dataset[Any]):
    """Sequences of tokens, of which the first tells the class."""

    def __init__(self, count: int = 48) -> None:
        random = torch.Generator().manual_seed(0)
        self._ids = torch.randint(2, 20, (count, 7), generator=random)
        self._labels = torch.arange(count) % 2
        self._ids[:, 0] = self._labels

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": self._ids[row], "labels": self._labels[row]}


def make_private(module: nn.Module, dataset: Dataset[Any], **options: Any) -> PrivateTraining:
    trained = [p for p in module.parameters() if p.requires_grad]
    return corn.make_private(
        module=module,
        optimizer=torch.optim.AdamW(trained, lr=0.01),
        data_loader=DataLoader(dataset, batch_size=BATCH),
        target_epsilon=8,
        target_delta=1e-5,
        epochs=EPOCHS,
        max_grad_norm=1.0,
        network=f"ring:{N + 1}",
        **options,
    )


def make_classifier() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    inputs = torch.randn(48, 4)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), TensorDataset(
        inputs, (inputs[:, 0] > 0).long()
    )


def make_transformer(kind: str = "Bert", *, lora: bool = False) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    names = {"GPT2": ("n_embd", "n_layer", "n_head", "n_inner")}.get(
        kind,
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    )
    sizes = dict(zip(names, (16, 2, 2, 32), strict=True))
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=20, pad_token_id=1, bos_token_id=1, eos_token_id=1, num_labels=2, **sizes
    )
    model: nn.Module = getattr(transformers, f"{kind}ForSequenceClassification")(config)
    if lora:
        peft = pytest.importorskip("peft")
        options = peft.LoraConfig(
            r=2, target_modules=["query", "value"], modules_to_save=["classifier"], lora_dropout=0.1
        )
        return peft.get_peft_model(model, options)  # type: ignore[no-any-return]
    return model


@pytest.mark.parametrize("accumulation", [1, 2])
def test_fabric(accumulation: int) -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    private = make_private(*make_classifier(), accumulation=accumulation)
    model, optimizer = fabric.setup(private.module, private.optimizer)
    loader = fabric.setup_dataloaders(private.data_loader)
    before = [p.clone() for p in private.module.parameters()]
    for _ in range(EPOCHS):
        for number, (inputs, targets) in enumerate(loader):
            losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
            fabric.backward(optimizer.mean(losses) / accumulation)
            if (number + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
    assert len(loader) == accumulation * 4
    assert private.optimizer.position == 4 * EPOCHS
    assert private.optimizer.get_epsilon() == pytest.approx(8, rel=2e-3)
    assert not any(map(torch.equal, before, private.module.parameters()))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_accelerate(accumulation: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    private = make_private(*make_classifier(), accumulation=accumulation)
    model, optimizer, loader, scheduler = accelerator.prepare(*private, private.optimizer.scheduler)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
                accelerator.backward(private.optimizer.mean(losses))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert private.optimizer.position == 4 * EPOCHS
    assert private.optimizer.get_epsilon() == pytest.approx(8, rel=2e-3)


def make_trainer(private: PrivateTraining, folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")

    class Trainer(transformers.Trainer):  # type: ignore[misc,name-defined]
        def get_train_dataloader(self) -> Any:
            return private.data_loader

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return private.optimizer.mean(model(**inputs).loss)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=EPOCHS,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_steps=3,
        logging_steps=1,
        ignore_data_skip=True,
        **options,
    )
    return Trainer(
        model=private.module,
        args=arguments,
        optimizers=(private.optimizer, private.optimizer.scheduler),
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer(accumulation: int, tmp_path: Path) -> None:
    private = make_private(make_transformer(), Tokens(), accumulation=accumulation)
    trainer = make_trainer(private, tmp_path, gradient_accumulation_steps=accumulation)
    trainer.train()
    assert private.optimizer.position == trainer.state.global_step == 4 * EPOCHS
    assert private.optimizer.get_epsilon() == pytest.approx(8, rel=2e-3)


def test_trainer_resumes_without_spending_twice(tmp_path: Path) -> None:
    ledger = tmp_path / "run.ledger"
    first = make_private(make_transformer(), Tokens(), ledger=ledger)
    make_trainer(first, tmp_path / "out", max_steps=6).train()
    assert first.optimizer.position == 6
    spent = first.optimizer.get_epsilon()
    first.data_loader.close()
    # A checkpoint of step 3: the three steps after it are spent.
    again = make_private(make_transformer(), Tokens(), ledger=ledger)
    assert again.optimizer.get_epsilon() == pytest.approx(spent)
    trainer = make_trainer(again, tmp_path / "out")
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert again.optimizer.position == 3 + 2
    assert again.optimizer.get_epsilon() == pytest.approx(8, rel=2e-3)


def test_trainer_that_draws_batches_again_is_refused(tmp_path: Path) -> None:
    private = make_private(make_transformer(), Tokens(), seed=1)
    trainer = make_trainer(private, tmp_path)
    trainer.train()
    again = make_private(make_transformer(), Tokens(), seed=1)
    trainer = make_trainer(again, tmp_path)
    trainer.args.ignore_data_skip = False
    with pytest.raises(CornError, match="ignore_data_skip=True"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize(
    ("kind", "lora"), [("Bert", False), ("Bert", True), ("GPT2", False), ("Llama", False)]
)
def test_gradients_of_transformers_are_those_of_single_samples(kind: str, lora: bool) -> None:
    """Embeddings, positions that all samples share, attention and adapters."""
    model = make_transformer(kind, lora=lora).eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    data = Tokens(5)
    rows = [{name: value[None] for name, value in data[k].items()} for k in range(len(data))]
    expected = []
    for row in rows:
        slopes = torch.autograd.grad(model(**row).loss, trained, allow_unused=True)
        pairs = zip(slopes, trained, strict=True)
        expected.append(
            torch.cat([(torch.zeros_like(p) if s is None else s).flatten() for s, p in pairs])
        )
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    gradients = SampleGradients(model)
    with warnings.catch_warnings():
        # All are vectorised but GPT-2, which looks for the last token by ``.item()``.
        warnings.simplefilter("ignore" if kind == "GPT2" else "error", corn.CornWarning)
        shown = gradients.begin(batch, len(data))
        found = gradients.take(model(**shown).loss)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-6)
