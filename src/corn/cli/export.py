"""``corn export``: write a trained model for torch, ONNX or any reader of JSON."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Literal

import typer

from corn import learn
from corn.cli.options import JsonOption
from corn.cli.output import print_json, print_line, print_note
from corn.files import write_file

EXAMPLE = "corn export out/run --to onnx --out model.onnx"

ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a run of corn train, launch or agent, or a file model.pt of it.",
    ),
]


def export(
    path: ModelArgument,
    to: Annotated[
        Literal["torch", "onnx", "json"],
        typer.Option(
            help="Format: torch, a file for torch.load; onnx (extra onnx), with the description as "
            "metadata; json, with weights as lists."
        ),
    ] = "torch",
    out: Annotated[
        Path | None, typer.Option(help="File to write. (Default: exported.pt, .onnx or .json.)")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a trained model for torch, ONNX or any reader of JSON.

    Weights have names and shapes. Preprocessing, classes and the promise are in the file.
    """
    model = learn.load_model(path)
    file = out or Path("exported").with_suffix({"torch": ".pt"}.get(to, f".{to}"))
    if to == "torch":
        model.save(file)
    else:
        text = json_module.dumps(model.to_json(), indent=1, ensure_ascii=False) + "\n"
        write_file(file, text if to == "json" else model.to_onnx())
    line = _show_use(model, to, file)
    if json:
        print_json({"file": file, "format": to, "use": line, **model.describe()})
    else:
        print_line(line)
    print_note(f"wrote {file}: {model.description}; {model.promise.describe()}")


def _show_use(model: learn.TrainedModel, to: str, file: Path) -> str:
    """Return the line that loads the file."""
    name = str(file)
    if to == "onnx":
        return f"onnxruntime.InferenceSession({name!r}).run(None, {{'inputs': inputs}})"
    if to == "json":
        return f"json.load(open({name!r}))['weights']"
    made = "YOUR_MODULE" if model.layers is None else repr(model.to_module())
    made = " ".join(made.replace("\n", " ").split())
    return f"model.load_state_dict(torch.load({name!r}, weights_only=True)['state_dict'])  # {made}"
