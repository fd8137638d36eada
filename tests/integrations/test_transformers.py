"""attn_ext as the attention of transformers: tiny random models give what the library's eager attention gives."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

import tiny_models
import transformers as tf
from tiny_models import KINDS, LENGTH, WINDOW, batch_of, logits_and_gradients, real

import attn_ext
from attn_ext import reference
from attn_ext.integrations import transformers as hf

make = functools.cache(
    tiny_models.make
)  # tests switch the implementation, and nothing else, of a shared model

PADDED = [
    pytest.param(kind, padding, id=f"{kind.name}-{padding}")
    for kind in KINDS.values()
    for padding in ((None, "left", "right") if kind.padded else (None,))
]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    torch.set_num_threads(1)  # the models are so small that a second thread only waits
    hf.register()
    yield
    hf.register()  # whatever a test put in its place


def error(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float((got.detach() - expected.detach()).abs().nan_to_num(math.inf).max())


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, padding", PADDED)
def test_logits_and_gradients_are_those_of_eager(kind: tiny_models.Kind, padding: str | None) -> None:
    model, batch = make(kind.build), batch_of(kind, padding)
    model.set_attn_implementation("eager")
    before = hf.reached(model).calls
    logits, gradients = logits_and_gradients(model, batch)
    assert hf.reached(model).calls == before

    report = hf.register(model)
    assert [layer.why_not for layer in report.layers] == [None] * kind.layers
    ours, our_gradients = logits_and_gradients(model, batch)
    assert hf.reached(model).calls == before + kind.layers
    model.set_attn_implementation("eager")
    assert len(hf.reached(model).unreached) == kind.layers
    assert error(ours, logits) <= 1e-5
    assert our_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert error(our_gradients[name], gradient) <= 1e-4 * float(gradient.abs().max()) + 1e-7, name
    assert max(float(gradient.abs().max()) for gradient in gradients.values()) > 1e-2


@pytest.mark.parametrize(
    "kind, padding, lost",
    [
        ("llama", "left", "attention_mask"),
        ("bert", "right", "attention_mask"),
        ("whisper", "left", "attention_mask"),
        ("mistral", None, "window"),
        ("gemma2", None, "softcap"),
        ("gpt_oss", None, "s_aux"),
        ("t5", None, "position_bias"),
        ("gpt2", None, "scaling"),
        ("bart", None, "is_causal"),
    ],
)
def test_the_comparison_notices_what_is_lost(kind: str, padding: str | None, lost: str) -> None:
    model, batch = make(KINDS[kind].build), batch_of(KINDS[kind], padding)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = real(batch, model(**batch).logits)

    def forward(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        if lost in ("attention_mask", "window"):
            mask = None
        if lost == "window":
            del options["sliding_window"]
        elif lost == "is_causal":
            options["is_causal"] = False
        elif lost != "attention_mask":
            assert options.pop(lost) is not None
        return hf.attention_forward(module, q, k, v, mask, **options)

    hf.AttentionInterface.register("attn_ext", forward)
    model.set_attn_implementation("attn_ext")
    with torch.no_grad():
        assert error(real(batch, model(**batch).logits), logits) > 1e-3


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_output_attentions_gives_the_weights(kind: tiny_models.Kind) -> None:
    model, batch = make(kind.build), batch_of(kind, "right" if kind.padded else None)
    weights = {}
    for implementation in ("eager", "attn_ext"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            output = model(**batch, output_attentions=True)
        weights[implementation] = {
            name: value for name, value in output.items() if name.endswith("attentions") and value
        }
    assert weights["attn_ext"].keys() == weights["eager"].keys() and weights["eager"]
    for name, layers in weights["eager"].items():
        assert len(weights["attn_ext"][name]) == len(layers) > 0
        for ours, theirs in zip(weights["attn_ext"][name], layers, strict=True):
            assert error(ours[0], theirs[0]) <= 1e-5  # the first sequence is not padded
            if theirs.shape[2] == theirs.shape[3]:
                assert error(ours[1, :, :-3], theirs[1, :, :-3]) <= 1e-5


def test_output_attentions_may_stand_in_the_configuration() -> None:
    model, batch = tiny_models.make(KINDS["bert"].build), batch_of(KINDS["bert"], None)
    model.config.output_attentions = True  # the library lets one say so while eager is set
    hf.register(model)
    assert len(model(**batch).attentions) == 2


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_static_caches_are_filled_from_the_front(kind: str) -> None:
    """Mask None with more keys than queries: the keys behind are empty slots."""
    model, batch = make(KINDS[kind].build), batch_of(KINDS[kind], None)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**batch).logits
        model.set_attn_implementation("attn_ext")
        cache = tf.StaticCache(config=model.config, max_cache_len=2 * LENGTH)
        ids, steps = batch["input_ids"], []
        for part in (slice(0, 5), slice(5, 6), slice(6, 9), slice(9, LENGTH)):
            steps.append(model(input_ids=ids[:, part], cache=cache).logits)
    assert error(torch.cat(steps, dim=1), expected) <= 1e-5


def test_packed_sequences_do_not_see_each_other() -> None:
    model = make(KINDS["llama"].build)
    hf.register(model)
    ids = batch_of(KINDS["llama"], None)["input_ids"]
    lengths = (4, 5, 2)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=part).logits for part in ids[:1].split(lengths, dim=1)], dim=1)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        ends = torch.tensor([0, 4, 9, 11], dtype=torch.int32)
        numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].int()
        for how in (
            {},
            {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5},
            {"cu_seq_lens_q": ends, "attention_mask": torch.ones(1, LENGTH, dtype=torch.long)},
            {"seq_idx": numbers, "attention_mask": torch.ones(1, LENGTH, dtype=torch.long)},
        ):
            packed = model(input_ids=ids[:1], position_ids=positions, use_cache=False, **how).logits
            assert error(packed, alone) <= 1e-5, how.keys()


def test_a_user_mask_of_four_dimensions_passes_through() -> None:
    model, batch = make(KINDS["llama"].build), batch_of(KINDS["llama"], None)
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(2, 1, LENGTH, LENGTH, generator=generator) < 0.5
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    bias = torch.where(seen, torch.randn(seen.shape, generator=generator), torch.finfo(torch.float32).min)
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(input_ids=batch["input_ids"], attention_mask=bias).logits
        hf.register(model)
        assert error(model(input_ids=batch["input_ids"], attention_mask=bias).logits, expected) <= 1e-5


def test_training_with_checkpointing_gives_the_same_gradients() -> None:
    model, batch = tiny_models.make(KINDS["llama"].build), batch_of(KINDS["llama"], "left")
    _, expected = logits_and_gradients(model, batch)
    hf.register(model)
    model.activation_checkpointing_enable()
    model.train()
    _, gradients = logits_and_gradients(model, batch)
    assert all(error(gradients[name], gradient) <= 1e-5 for name, gradient in expected.items())


def test_bfloat16_is_no_less_exact_than_eager() -> None:
    model, batch = tiny_models.make(KINDS["llama"].build), batch_of(KINDS["llama"], "left")
    with torch.no_grad():
        exact = real(batch, model(**batch).logits)
        model.to(torch.bfloat16)
        eager = error(real(batch, model(**batch).logits).float(), exact)
        hf.register(model)
        assert error(real(batch, model(**batch).logits).float(), exact) <= 2 * eager + 1e-5


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_whole_model_compiles_into_one_graph(kind: str) -> None:
    model, batch = tiny_models.make(KINDS[kind].build), batch_of(KINDS[kind], "right")
    hf.register(model)
    with torch.no_grad():
        expected = real(batch, model(**batch, use_cache=False).logits)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert error(real(batch, compiled(**batch, use_cache=False).logits), expected) <= 1e-5
    torch.compiler.reset()


# --- what was reached -------------------------------------------------------------------------------------------------


def test_models_outside_the_interface_stay_with_their_own_attention() -> None:
    model, batch = tiny_models.make(tiny_models.bloom), batch_of(KINDS["llama"], "left")
    with torch.no_grad():
        expected = real(batch, model(**batch).logits)
        report = hf.register(model)
        assert model.config._attn_implementation == "eager"
        assert torch.equal(real(batch, model(**batch).logits), expected)
        assert len(report.unreached) == 2 and not report.reached and hf.reached(model).calls == 0
        assert "0 of 2 attention layers" in str(report) and "outside the attention interface" in str(report)

        # Loaded with the name in its configuration, which the library does not refuse, it must not lose its masks.
        loaded = type(model)._from_config(model.config, attn_implementation="attn_ext").eval()
        loaded.load_state_dict(model.state_dict())
        assert loaded.config._attn_implementation == "attn_ext"
        assert torch.equal(real(batch, loaded(**batch).logits), expected)
        assert len(hf.reached(loaded).unreached) == 2 and hf.reached(loaded).calls == 0


def test_wrappers_of_attention_layers_are_not_counted_twice() -> None:
    names = [layer.name for layer in hf.reached(make(tiny_models.gpt_neo)).unreached]
    assert names == ["transformer.h.0.attn.attention", "transformer.h.1.attn.attention"]
    (first, _) = hf.reached(make(KINDS["bert"].build)).layers
    assert (first.name, first.class_name) == ("bert.encoder.layer.0.attention.self", "BertSelfAttention")


def test_the_report_names_each_layer_and_its_calls() -> None:
    model = tiny_models.make(KINDS["llama"].build)
    text = str(hf.reached(model))
    assert "0 of 2 attention layers reached, 0 calls" in text and "its configuration says 'eager'" in text
    hf.register(model)
    model(**batch_of(KINDS["llama"], None))
    model.model.layers[0].self_attn(
        torch.zeros(1, 2, 32), (torch.ones(1, 2, 8), torch.zeros(1, 2, 8)), attention_mask=None
    )
    report = hf.reached(model)
    assert [layer.calls for layer in report.layers] == [2, 1] and report.calls == 3
    assert "model.layers.0.self_attn (LlamaAttention): 2 calls" in str(report)
    (held,) = hf.reached(nn.ModuleList([model.model.layers[1].self_attn])).layers
    assert held.name == "0" and held.calls == 1


# --- the function itself ------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """What attention_forward may read of an attention layer."""

    def __init__(self, is_causal: bool | None = None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def tensors(Lq: int = 5, Lk: int = 5, **shape: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    B, Hkv = shape.get("B", 2), 2
    make_one = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    q = make_one(B, Lq, 4, 8).transpose(1, 2)
    return q, make_one(B, Hkv, Lk, 8), make_one(B, Hkv, Lk, shape.get("Dv", 8))


def expected(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return reference.attention(q, k, v, **options).transpose(1, 2)


@pytest.mark.parametrize("Dv", [8, 3])
@pytest.mark.parametrize("Lq, Lk", [(5, 5), (5, 9), (1, 9), (9, 5)])
@pytest.mark.parametrize("layer, given, causal", [
    (True, None, True), (False, None, False), (None, None, True), (True, False, False), (False, True, True),
])  # fmt: skip
def test_without_a_mask_causality_is_top_left_and_never_of_one_query(
    layer: bool | None, given: bool | None, causal: bool, Lq: int, Lk: int, Dv: int
) -> None:
    q, k, v = tensors(Lq, Lk, Dv=Dv)
    right = expected(q, k, v, causal="top_left" if causal and Lq > 1 else False)
    for laid_out in (q, q.contiguous()):
        out, weights = hf.attention_forward(Layer(layer), laid_out, k, v, None, is_causal=given)
        assert weights is None and out.shape == (2, Lq, 4, Dv) and out.is_contiguous()
        assert error(out, right) < 1e-12


@pytest.mark.parametrize("scaling", [None, 1.0, 0.0])
def test_scaling_is_taken_as_it_is(scaling: float | None) -> None:
    q, k, v = tensors()
    out, _ = hf.attention_forward(Layer(), q, k, v, None, 0.0, scaling, softcap=0.7)
    assert error(out, expected(q, k, v, causal=True, scale=scaling, softcap=0.7)) < 1e-12


def test_a_mask_rules_alone() -> None:
    q, k, v = tensors(5, 9)
    mask = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(5)) < 0.5
    out, _ = hf.attention_forward(Layer(True), q, k, v, mask, sliding_window=2)
    assert error(out, expected(q, k, v, mask=mask)) < 1e-12


@pytest.mark.parametrize("Lq, is_causal, window", [
    (5, True, {"causal": "top_left", "window": (2, 0)}),
    (5, False, {"window": (2, 2)}),
    (1, True, {"window": (2, None)}),
])  # fmt: skip
def test_a_window_without_a_mask(Lq: int, is_causal: bool, window: dict[str, Any]) -> None:
    q, k, v = tensors(Lq, 5)
    out, _ = hf.attention_forward(Layer(is_causal), q, k, v, None, sliding_window=3)
    assert error(out, expected(q, k, v, **window)) < 1e-12


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_gradients_reach_bias_sinks_and_float_masks(mask: str | None) -> None:
    q, k, v = tensors()
    generator = torch.Generator().manual_seed(6)
    bias, sinks, float_mask = (
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in ((1, 4, 5, 5), (4,), (2, 1, 5, 5))
    )
    hidden = torch.rand(2, 1, 5, 5, generator=generator) < 0.7
    given = {None: None, "bool": hidden, "float": float_mask}[mask]
    learned = [bias, sinks] + [float_mask] * (mask == "float")
    out, _ = hf.attention_forward(Layer(), q, k, v, given, position_bias=bias, s_aux=sinks)
    right = expected(q, k, v, mask=given, bias=bias, sinks=sinks, causal=mask is None)
    assert error(out, right) < 1e-12
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((out * weights).sum(), learned),
        torch.autograd.grad((right * weights).sum(), learned),
        strict=True,
    ):
        assert float(theirs.abs().max()) > 1e-3 and error(ours, theirs) < 1e-10


def test_dropout_is_applied_only_where_it_is_given() -> None:
    q, k, v = tensors()
    layer = Layer().train()
    plain, weights = hf.attention_forward(layer, q, k, v, None, output_attentions=True)
    assert torch.equal(plain, hf.attention_forward(layer, q, k, v, None, dropout=0.0)[0])
    torch.manual_seed(7)
    dropped, before = hf.attention_forward(layer, q, k, v, None, dropout=0.5, output_attentions=True)
    assert error(dropped, plain) > 1e-2 and torch.equal(before, weights)
    assert error(weights.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64)) < 1e-12


def test_one_set_of_queries_serves_every_sequence() -> None:
    q, k, v = tensors(B=3)
    out, _ = hf.attention_forward(Layer(False), q[:1], k, v, None)
    assert error(out, expected(q[:1].expand(3, -1, -1, -1), k, v)) < 1e-12


def test_what_is_unknown_is_refused_by_name() -> None:
    q, k, v = tensors()
    with pytest.raises(TypeError, match="Layer passes block_indices=…, which attn_ext does not know"):
        hf.attention_forward(Layer(), q, k, v, None, block_indices=torch.zeros(1))
    with pytest.raises(TypeError, match="flavour"):
        hf.attention_forward(Layer(), q, k, v, None, flavour=False)
    known = {name: torch.zeros(1) for name in hf.HARMLESS}
    out, _ = hf.attention_forward(Layer(), q, k, v, None, **known, flavour=None)
    assert error(out, expected(q, k, v, causal=True)) < 1e-12


def test_a_model_passes_what_is_unknown_on_to_be_refused() -> None:
    model = make(KINDS["llama"].build)
    hf.register(model)
    with pytest.raises(TypeError, match="LlamaAttention passes flavour="):
        model(**batch_of(KINDS["llama"], None), flavour="strong")


def test_packing_that_does_not_fit_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="cu_seq_lens_q packs one row, but the batch has 2"):
        hf.attention_forward(Layer(), q, k, v, None, cu_seq_lens_q=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"seq_idx \(2, 4\) must number every one of 5 queries"):
        hf.attention_forward(Layer(), q, k, v, None, seq_idx=torch.zeros(2, 4))
    with pytest.raises(TypeError, match="mask must be bool"):
        hf.attention_forward(Layer(), q, k, v, torch.ones(5, 5, dtype=torch.long))


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_packing_goes_together_with_a_mask(mask: str) -> None:
    q, k, v = tensors(6, 6, B=1)
    seen = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(8)) < 0.7
    together = attn_ext.masks.documents(torch.tensor([0, 0, 1, 1, 1, 2]))
    given = seen if mask == "bool" else attn_ext.masks.to_bias(seen)
    out, _ = hf.attention_forward(Layer(), q, k, v, given, cu_seq_lens_k=torch.tensor([0, 2, 5, 6]))
    assert error(out, expected(q, k, v, mask=seen & together)) < 1e-12


# --- installation ---------------------------------------------------------------------------------------------------


def run(code: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    before = f"import sys; sys.path.insert(0, {str(path)!r}); " if path else "import sys; "
    return subprocess.run([sys.executable, "-c", before + code], capture_output=True, text=True, check=False)


def test_the_package_of_integrations_imports_none_of_the_libraries() -> None:
    done = run("import attn_ext.integrations; print('transformers' in sys.modules)")
    assert done.returncode == 0 and done.stdout == "False\n", done.stderr


def test_without_transformers_one_sentence_says_what_to_install() -> None:
    done = run("sys.modules['transformers'] = None; import attn_ext.integrations.transformers")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: attn_ext.integrations.transformers needs transformers ≥ ")
    assert last.endswith("pip install 'attn_ext[hf]'")


def test_a_transformers_that_is_too_old_is_named(tmp_path: Path) -> None:
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("__version__ = '4.40.2'\n")
    done = run("import attn_ext.integrations.transformers", tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "needs transformers ≥ " in last and "but 4.40.2 is installed" in last and "pip install -U" in last


def test_registering_again_changes_nothing() -> None:
    hf.register()
    hf.register()
    assert hf.AttentionInterface()["attn_ext"] is hf.attention_forward
    assert hf.AttentionMaskInterface()["attn_ext"] is hf.attention_mask
    assert WINDOW < LENGTH  # or no test of this file would see a window
