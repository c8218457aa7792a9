"""Speed and memory of one greedy generation; the unswapped model's in a process of its own.

The memory of a process says nothing about a second model loaded into it, so `python -m ktinject.cli.measure` loads
the model with stock transformers, measures there, and answers in JSON.
"""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Measurement:
    """The second of two equal generations; the first one pays for everything that happens once.

    tokens          the new tokens
    seconds         wall time, prompt included
    resident_bytes  of the process at the end
    model_bytes     how much of that came with loading the model and generating
    gpu_bytes       that torch has allocated, on all GPUs
    """

    tokens: list[int]
    seconds: float
    resident_bytes: int
    model_bytes: int
    gpu_bytes: int


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def measure(
    model: PreTrainedModel,
    prompt: list[int],
    new_tokens: int,
    before_bytes: int,
    more: Mapping[str, Any] | None = None,
) -> Measurement:
    """Generate once more and measure it.

    before_bytes  resident before the model was loaded
    more          of pictures in the prompt, as `evaluate.greedy` takes it
    Raises        PlanError if the prompt does not fit the model
    """
    import torch

    from ktinject.tools import evaluate

    start = time.perf_counter()
    tokens = evaluate.greedy(
        model, torch.tensor(prompt, dtype=torch.int64, device="cpu"), new_tokens, more=more
    )
    seconds = time.perf_counter() - start
    resident = resident_bytes()
    gpus = range(torch.cuda.device_count())
    gpu_bytes = sum(torch.cuda.memory_allocated(gpu) for gpu in gpus)
    return Measurement(tokens, seconds, resident, resident - before_bytes, gpu_bytes)


def measure_unswapped(
    folder: Path,
    prompt: list[int],
    new_tokens: int,
    *,
    dtype: str,
    device_map: str | None,
    more: Mapping[str, Any] | None = None,
) -> Measurement | str:
    """The same for the model as transformers alone loads and runs it, in a fresh process; on the CPU the better of two.

    device_map  as transformers takes it; None is the CPU
    Returns     the measurement, or why there is none
    """
    from ktinject.cli import options

    if not (folder / "config.json").is_file():
        return "transformers alone loads a folder with config.json and safetensors"
    if options.is_packed(folder):
        return "transformers alone loads plain weights, and these are packed"
    request: dict[str, Any] = {
        "folder": str(folder),
        "prompt": prompt,
        "new_tokens": new_tokens,
        "dtype": dtype,
        "device_map": device_map,
    }
    if more:
        import torch

        pictures = io.BytesIO()
        torch.save(dict(more), pictures)
        request["more"] = base64.b64encode(pictures.getvalue()).decode()
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        last = process.stderr.strip().rpartition("\n")[2]
        return last or f"its process ended with code {process.returncode}"
    return Measurement(**json.loads(process.stdout))


def _answer() -> None:
    request = json.load(sys.stdin)
    import torch

    from ktinject.generation.cpu import openmp
    from ktinject.hf import models
    from ktinject.tools import evaluate

    before_bytes = resident_bytes()
    model = models.unswapped(
        request["folder"], dtype=request["dtype"], device_map=request["device_map"]
    ).eval()
    prompt, new_tokens = request["prompt"], request["new_tokens"]
    more = None
    if "more" in request:
        more = torch.load(io.BytesIO(base64.b64decode(request["more"])), weights_only=True)
    evaluate.greedy(model, torch.tensor(prompt, dtype=torch.int64, device="cpu"), new_tokens, more=more)
    found = measure(model, prompt, new_tokens, before_bytes, more)
    # Between operations torch's threads spin, which is faster on idle cores and several times slower on shared ones. A
    # swapped model lets them sleep; the unswapped one gets the better of both.
    if request["device_map"] is None and openmp.let_threads_sleep():
        again = measure(model, prompt, new_tokens, before_bytes, more)
        found = min(found, again, key=lambda each: each.seconds)
    json.dump(asdict(found), sys.stdout)


if __name__ == "__main__":
    _answer()
