"""The checks of run.py under pytest."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_run", Path(__file__).with_name("run.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gradients_agree_with_the_cpu(script, tmp_path):
    script.check_gradients(tmp_path, "cuda")


def test_weight_channel_over_nccl(script, tmp_path):
    script.check_channel(tmp_path, "cuda")


def test_lora_merges(script, tmp_path):
    script.check_lora(tmp_path, "cuda")


def test_packed_gradients(script, tmp_path):
    script.check_packing(tmp_path, "cuda")


def test_training_speed(script, tmp_path):
    assert script.measure_training(tmp_path, "cuda") > 1000
