"""Folders of checkpoints and exports: whole or not there, and nothing missing in them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rtpo_ray.errors import CheckpointError


def whole(path: str) -> dcp.HuggingFaceStorageReader:
    """The reader of a checkpoint of which no shard is missing: what lacks would keep its value, silently."""
    reader = dcp.HuggingFaceStorageReader(path)
    for name, tensor in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name} is no tensor; safetensors hold nothing else"
        found = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if found != tensor.size.numel():
            raise ValueError(f"{found:,} of {tensor.size.numel():,} numbers of {name} are there; a shard is missing")
    return reader


@contextmanager
def checkpoint_errors(what: str) -> Iterator[None]:
    """Whatever storage raises, as a CheckpointError; the cause is chained."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{what}: {type(error).__name__}: {str(error).strip()}") from error


def unfinished(path: str) -> str:
    """Where what will be `path` is written."""
    return f"{path.rstrip('/')}.writing"


def replace_folder(path: str, write: Callable[[str], None]) -> None:
    """`write` a folder beside `path` and move it there, so that `path` is whole or absent at any time."""
    temporary = unfinished(path)
    shutil.rmtree(temporary, ignore_errors=True)
    write(temporary)
    swap_in(temporary, path)


def swap_in(temporary: str, path: str) -> None:
    """Move `temporary` to `path`, which may exist."""
    old = f"{path.rstrip('/')}.old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.exists(path):
        os.rename(path, old)
    os.rename(temporary, path)
    shutil.rmtree(old, ignore_errors=True)
