"""Whole models in one file: they come back as they were, and a file is never half written."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("safetensors", reason="safetensors is not installed: pip install safetensors")

from safetensors.torch import save_file

from attn_ext.models import Saveable, TextClassifier, WeightsError, load, save


class Tied(Saveable):
    """Embedding and output share one weight; one buffer is a view of another."""

    def __init__(self, vocab_size: int, d_model: int = 4) -> None:
        super().__init__()
        self.config = {"vocab_size": vocab_size, "d_model": d_model}
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.arange(6))
        self.register_buffer("even", self.steps[::2])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


@pytest.fixture
def model() -> TextClassifier:
    return TextClassifier(20, 16, 4, 32, num_layers=1, num_classes=3, max_len=9, norm_first=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_a_model_comes_back_as_it_was(model: TextClassifier, path: Path) -> None:
    save(model, path)
    twin = load(path)
    assert type(twin) is TextClassifier and twin.config == model.config and not twin.training
    assert twin.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(twin.state_dict()[name], tensor), name
    tokens = torch.randint(0, 20, (2, 9))
    assert torch.equal(twin(tokens), model.eval()(tokens))


def test_a_model_comes_back_in_another_process(model: TextClassifier, path: Path) -> None:
    save(model, path)
    tokens = [[3, 1, 7, 2]]
    script = (
        "import sys, torch; from attn_ext.models import load; "
        f"print(load(sys.argv[1])(torch.tensor({tokens})).tolist())"
    )
    result = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr.decode()
    expected = model.eval()(torch.tensor(tokens)).detach()
    torch.testing.assert_close(torch.tensor(json.loads(result.stdout)), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_are_kept(model: TextClassifier, path: Path, dtype: torch.dtype) -> None:
    save(model.to(dtype), path)
    for name, tensor in load(path).state_dict().items():
        assert tensor.dtype == dtype and torch.equal(tensor, model.state_dict()[name]), name


def test_shared_weights_are_stored_once_and_stay_shared(path: Path) -> None:
    model = Tied(vocab_size=1000)
    save(model, path)
    assert path.stat().st_size < 1.5 * 1000 * 4 * 4
    twin = load(path)
    assert twin.head.weight is twin.embedding.weight and torch.equal(twin.head.weight, model.head.weight)
    assert twin.even.tolist() == [0, 2, 4]


def test_loading_leaves_the_random_state(model: TextClassifier, path: Path) -> None:
    save(model, path)
    before = torch.get_rng_state()
    load(path)
    assert torch.equal(torch.get_rng_state(), before)


class _DiskFull:
    """Stands for a file on a disk that is full after 1,000 bytes."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> _DiskFull:
        self.file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.file.__exit__(*error)

    def write(self, content: bytes) -> int:
        self.file.write(content[:1000])
        self.file.flush()
        raise OSError(28, "No space left on device")


def test_a_save_that_fails_half_way_leaves_the_old_file_whole(
    model: TextClassifier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model, path)
    old = path.read_bytes()
    other = TextClassifier(20, 16, 4, 32)
    opened = Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *mode: _DiskFull(opened(self, *mode)))
        with pytest.raises(WeightsError, match="cannot be written: No space left on device"):
            save(other, path)
    assert path.read_bytes() == old and os.listdir(path.parent) == [path.name]
    save(other, path)
    assert load(path).config == other.config


def test_a_save_that_is_killed_leaves_the_old_file_whole(model: TextClassifier, path: Path) -> None:
    save(model, path)
    old = path.read_bytes()
    script = (
        "import os, signal, sys; from attn_ext.models import load, save; model = load(sys.argv[1]); "
        "os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL); "  # all written, nothing renamed
        "model.classify.weight.data.zero_(); save(model, sys.argv[1])"
    )
    result = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, timeout=300)
    assert result.returncode == -9, result.stderr.decode()
    assert path.read_bytes() == old and load(path).config == model.config


def test_a_link_stays_a_link_and_the_file_is_as_readable_as_any(
    model: TextClassifier, path: Path, tmp_path: Path
) -> None:
    link = tmp_path / "latest.safetensors"
    link.symlink_to(path)
    save(model, link)
    assert link.is_symlink() and path.is_file()
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_only_saveable_models_are_saved(path: Path) -> None:
    with pytest.raises(TypeError, match="expected a Saveable .* got Linear"):
        save(nn.Linear(2, 2), path)  # type: ignore[arg-type]
    assert not path.exists()


def test_a_class_of_the_same_name_elsewhere_is_another_class(model: TextClassifier, path: Path) -> None:
    type("TextClassifier", (Saveable,), {"__module__": "elsewhere"})
    save(model, path)
    assert type(load(path)) is TextClassifier


def foreign(path: Path, **metadata: str) -> None:
    save_file({"weight": torch.zeros(2)}, path, metadata or None)


OURS = {"format": "attn_ext model 1", "shared": "{}", "config": '{"vocab_size": 5}'}


def test_a_file_that_is_no_model_is_one_sentence(model: TextClassifier, path: Path, tmp_path: Path) -> None:
    save(model, path)
    whole = path.read_bytes()

    def write(content: bytes) -> None:
        path.write_bytes(content)

    for make, words in (
        (lambda: path.unlink(), "does not exist"),
        (lambda: write(b""), "truncated, or no safetensors file"),
        (lambda: write(whole[:5]), "truncated, or no safetensors file"),
        (lambda: write(whole[:-1]), "truncated, or no safetensors file"),
        (lambda: write(b"\x89PNG\r\n" * 100), "truncated, or no safetensors file"),
        (lambda: foreign(path), "not written by attn_ext.models.save"),
        (lambda: foreign(path, format="pt"), "not written by attn_ext.models.save"),
        (lambda: foreign(path, **OURS, **{"class": "Nobody"}), "holds a Nobody, which is not defined here"),
        (
            lambda: foreign(path, **OURS, **{"class": "attn_ext.models.TextClassifier"}),
            "a config that builds no attn_ext.models.TextClassifier",
        ),
        (
            lambda: foreign(path, **{**OURS, "config": "{"}, **{"class": "attn_ext.models.TextClassifier"}),
            "a config that builds no attn_ext.models.TextClassifier",
        ),
        (
            lambda: foreign(path, **OURS, **{"class": f"{__name__}.Tied"}),
            "weights that do not fit its config",
        ),
    ):
        make()
        with pytest.raises(WeightsError, match=words) as caught:
            load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(WeightsError, match="is a folder"):
        load(tmp_path)


def test_a_path_that_cannot_be_written_is_one_sentence(model: TextClassifier, tmp_path: Path) -> None:
    for bad in (tmp_path / "absent" / "model.safetensors", tmp_path):
        with pytest.raises(WeightsError, match="cannot be written") as caught:
            save(model, bad)
        assert str(bad) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_safetensors_is_one_sentence(
    model: TextClassifier, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model, path)
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (lambda: save(model, path), lambda: load(path)):
        with pytest.raises(WeightsError, match="pip install safetensors"):
            call()
