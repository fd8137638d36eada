"""How many tokens and sentences a second do two real models give in transformers, with attn_ext, sdpa and eager?

SmolLM2-135M (prefill, and decode one token at a time behind a filled cache) and the sentence embedder MiniLM, both
fp32. Every row is first compared with sdpa (logits within 1e-3, embeddings within 1e-5); a row that is wrong is not
timed, and makes the exit code 1. Then the implementations take turns in blocks, after pauses. `make real-models`
installs the models.

In decode rows attn_ext runs with its own cache, which appends in place, and beside it with the library's.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_ext.embed import python_topics
from bench import real_models
from bench.attention import microseconds
from bench.common import (
    SCHEMA,
    BenchError,
    Column,
    CpuTimer,
    Runner,
    add_row_filter,
    add_run_options,
    describe_machine,
    machine_line,
    print_table,
    require_folder,
    say,
    seconds_of,
    threads_of,
    time_runners,
    write_json,
)

SMOLLM2, MINILM = "SmolLM2-135M", "MiniLM-L6"
ALLOWED = {SMOLLM2: 1e-3, MINILM: 1e-5}  # difference of logits, of embeddings
LIBRARY_CACHE = "attn_ext, library cache"
IMPLEMENTATIONS = {"attn_ext": "attn_ext", "torch": "sdpa", "eager": "eager", LIBRARY_CACHE: "attn_ext"}


@dataclass(frozen=True)
class Case:
    """One row. In decode rows `length` positions are in the cache, and a call computes one token more."""

    model: str
    work: str  # "prefill", "decode" or "embed"
    batch: int
    length: int
    quick: bool = False

    @property
    def id(self) -> str:
        return f"{self.model} {self.work} {self.batch}×{self.length}"

    @property
    def items(self) -> int:
        """Tokens (sentences in embed rows) that one call computes."""
        return self.batch * (self.length if self.work == "prefill" else 1)

    @property
    def unit(self) -> str:
        return "sentences/s" if self.work == "embed" else "tokens/s"


CASES = (
    Case(SMOLLM2, "prefill", 1, 128, quick=True),
    Case(SMOLLM2, "prefill", 1, 512),
    Case(SMOLLM2, "prefill", 4, 128),
    Case(SMOLLM2, "decode", 1, 128, quick=True),
    Case(SMOLLM2, "decode", 1, 512),
    Case(SMOLLM2, "decode", 1, 1024),
    Case(MINILM, "embed", 1, 16, quick=True),
    Case(MINILM, "embed", 32, 32, quick=True),
    Case(MINILM, "embed", 8, 128),
    Case(MINILM, "embed", 4, 256),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m bench model`."""
    add_row_filter(parser)
    add_run_options(parser, seconds="3, quick 0.5")
    parser.add_argument("--quick", action="store_true", help="the short rows, less time each")
    parser.add_argument("--json", metavar="FILE", help="write the result for compare")


def run(options: argparse.Namespace) -> int:
    """Runs the benchmark; 0, or 1 where a result was wrong."""
    texts = [text.lower() for text in options.rows]
    cases = [case for case in CASES if not texts or any(text in case.id.lower() for text in texts)]
    cases = [case for case in cases if case.quick or not options.quick]
    if not cases:
        raise BenchError(
            "no row fits these filters; --list names the rows (with --quick only the short ones run)"
        )
    if options.list:
        print("\n".join(case.id for case in cases))
        return 0
    threads = threads_of(options)
    seconds = seconds_of(options, 0.5 if options.quick else 3.0)
    if options.json:  # now, not after minutes of work
        require_folder(options.json)
    torch.set_num_threads(threads)
    settings = {"seconds": seconds, "rounds": 3 if options.quick else 5, "pause": 0.1}
    result = measure(cases, threads, settings)
    show(result)
    if options.json:
        write_json(options.json, result)
    return int(any(not row["check"]["ok"] for row in result["rows"]))


def measure(cases: Sequence[Case], threads: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The whole run. Returns what goes into the JSON file."""
    machine = describe_machine("cpu", threads)
    hf = real_models.require_integration()
    rows = []
    for name, make_calls in ((SMOLLM2, _smollm2_calls), (MINILM, _minilm_calls)):
        own = [case for case in cases if case.model == name]
        if own:
            say(f"loading {name}")
            calls_of = make_calls(hf)
        for case in own:
            say(case.id)
            rows.append(measure_row(case, calls_of(case), settings))
    import transformers

    return {
        "schema": SCHEMA,
        "bench": "model",
        "machine": {**machine, "transformers": transformers.__version__},
        "settings": settings,
        "rows": rows,
    }


Calls = dict[str, Callable[[], Tensor]]  # by rival; each returns logits or embeddings


def measure_row(case: Case, calls: Calls, settings: dict[str, Any]) -> dict[str, Any]:
    """Checks one row, then times all rivals in it."""
    row: dict[str, Any] = {
        "id": case.id,
        "model": case.model,
        "work": case.work,
        "items": case.items,
        "unit": case.unit,
        "check": check(case, calls),
        "rivals": {},
    }
    if not row["check"]["ok"]:
        say(f"    WRONG: {row['check']['worst']}")
        return row
    runners = [Runner(name, call, how=IMPLEMENTATIONS[name]) for name, call in calls.items()]
    for name, timing in time_runners(CpuTimer(), runners, **settings).items():
        row["rivals"][name] = {
            "how": IMPLEMENTATIONS[name],
            **timing.report(),
            "per_second": case.items / timing.median_us * 1e6,
        }
    row["ratio"] = row["rivals"]["torch"]["median_us"] / row["rivals"]["attn_ext"]["median_us"]
    return row


def check(case: Case, calls: Calls) -> dict[str, Any]:
    """Compares what every rival computes with sdpa: ok, and the worst difference in words."""
    with torch.no_grad():
        results = {name: call() for name, call in calls.items()}
    expected, allowed = results.pop("torch"), ALLOWED[case.model]
    differences = {
        name: float((result - expected).abs().nan_to_num(torch.inf).max()) for name, result in results.items()
    }
    worst = max(differences, key=differences.__getitem__)
    return {
        "ok": differences[worst] <= allowed,
        "worst": f"{worst}: {differences[worst]:.1e} beside sdpa, allowed {allowed:.0e}",
    }


# --- what is timed ------------------------------------------------------------------------------------------------


def _smollm2_calls(hf: Any) -> Callable[[Case], Calls]:
    from transformers import DynamicCache

    model, tokenizer = real_models.load_smollm2()
    models = {how: real_models.with_attention(model, how) for how in set(IMPLEMENTATIONS.values())}
    longest = max(case.batch * case.length for case in CASES if case.model == SMOLLM2)
    paragraphs, text = python_topics(), ""
    while len(text) < 8 * longest:  # a token of English prose has four to five letters
        text += paragraphs.pop(0).flowing + "\n"
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]

    def prefill(model: Any, new_cache: Callable[[], Any], ids: Tensor) -> Tensor:
        return model(input_ids=ids, cache=new_cache(), logits_to_keep=1).logits

    def decode(model: Any, cache: Any, token: Tensor) -> Tensor:
        logits = model(input_ids=token, cache=cache, logits_to_keep=1).logits
        cache.crop(-1)
        return logits

    def calls_of(case: Case) -> Calls:
        ids = tokens[:, : case.batch * case.length].reshape(case.batch, case.length)
        calls: Calls = {}
        for name, how in IMPLEMENTATIONS.items():
            ours = name == "attn_ext"
            new_cache = hf.cache if ours else DynamicCache
            new_cache = functools.partial(new_cache, config=model.config)
            if case.work == "decode":
                cache = new_cache()
                with torch.no_grad():
                    prefill(models[how], lambda cache=cache: cache, ids)
                calls[name] = functools.partial(decode, models[how], cache, ids[:, :1])
            elif name != LIBRARY_CACHE:
                calls[name] = functools.partial(prefill, models[how], new_cache, ids)
        return calls

    return calls_of


def _minilm_calls(hf: Any) -> Callable[[Case], Calls]:
    model = real_models.load_minilm()
    models = {
        name: real_models.with_attention(model, IMPLEMENTATIONS[name]) for name in ("attn_ext", "eager")
    }
    models["torch"] = model
    texts = [paragraph.flowing for paragraph in python_topics(min_words=24)]

    def calls_of(case: Case) -> Calls:
        ids, mask = real_models.sentence_batch(texts[: case.batch], case.length)
        return {
            name: functools.partial(real_models.embed, models[name], ids, mask)
            for name in IMPLEMENTATIONS
            if name in models
        }

    return calls_of


# --- output -------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Prints the table, and what one must know to read it."""
    rivals = [name for name in IMPLEMENTATIONS if any(name in row["rivals"] for row in result["rows"])]
    columns = [Column("row", right=False), Column("unit", right=False)]
    for name in rivals:
        columns += [Column(IMPLEMENTATIONS[name] if name == "torch" else name), Column("call µs")]
    columns += [Column("× sdpa"), Column("largest difference", right=False)]
    cells = []
    for row in result["rows"]:
        if not row["check"]["ok"]:
            cells.append([row["id"], "WRONG", *[""] * (len(columns) - 3), row["check"]["worst"]])
            continue
        cells.append([row["id"], row["unit"]])
        for name in rivals:
            rival = row["rivals"].get(name)
            cells[-1] += ["–", "–"] if rival is None else [f"{rival['per_second']:.1f}", microseconds(rival)]
        cells[-1] += [f"{row['ratio']:.2f}", row["check"]["worst"]]
    machine = result["machine"]
    print_table(columns, cells, f"{machine_line(machine)}; transformers {machine['transformers']}")
    print()
    print(
        "Rows: sequences × tokens (decode: in the cache; embed: at most). A call: median ± half the spread from the "
        "20th to the 80th percentile. × sdpa: its time over ours."
    )
    measured = [row for row in result["rows"] if row["check"]["ok"]]
    lost = [row["id"] for row in measured if row["ratio"] < 1]
    print(
        f"attn_ext is slower than sdpa in {len(lost)} of {len(measured)} rows"
        + (f": {'; '.join(lost)}." if lost else ".")
    )
