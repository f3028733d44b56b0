"""Models in GGUF files: converted once to an ordinary Hugging Face folder, weights dequantised to float32."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rtpo_ray.errors import ConfigError


def convert(file: Path, cache: Path, say: Callable[[str], None] = print) -> Path:
    """Folder of the model in `file`, made when it is not in `cache` yet: a minute and 4 bytes a parameter for a small one.

    Two processes that convert the same file at once do no harm: the first rename wins. Raises ConfigError when the file cannot be read or a package
    is missing.
    """
    stat = file.stat()
    digest = hashlib.sha256(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()
    folder = cache / f"{file.stem}-{digest[:12]}"
    if (folder / "config.json").is_file():
        return folder
    say(f"converting {file} to {folder}")
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _convert(file, temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another process was first
            if not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True))
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except ImportError as error:
        raise ConfigError(f"field model.path is {str(file)!r}: to read it, pip install rtpo-ray[gguf] ({error})") from error
    except Exception as error:  # a broken file may raise anything; the cause is chained
        raise ConfigError(f"field model.path is {str(file)!r}: no model could be read from it: {type(error).__name__}: {error}") from error
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
