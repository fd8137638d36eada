"""Words backwards: the data, greedy decoding, and that it is learned."""

from __future__ import annotations

import pytest
import torch

from attn_ext.teach import reverse
from attn_ext.teach.reverse import END, LONGEST, PAD, SHORTEST, START

pytestmark = pytest.mark.usefixtures("one_thread")


def test_words_have_every_length_and_letter_and_padding_at_the_end() -> None:
    words = reverse.draw_words(3000, torch.Generator().manual_seed(1))
    lengths = (words != PAD).sum(dim=1)
    assert words.shape == (3000, LONGEST) and set(lengths.tolist()) == set(range(SHORTEST, LONGEST + 1))
    assert set(words.flatten().tolist()) == {PAD, *range(3, reverse.VOCAB_SIZE)}
    for word, length in zip(words.tolist(), lengths.tolist(), strict=True):
        assert PAD not in word[:length] and set(word[length:]) <= {PAD}


@pytest.mark.parametrize("word", ["a", "ab", "abcd", "transformers", "racecar"])
def test_targets_are_the_letters_backwards(word: str) -> None:
    target = reverse.reverse(torch.cat([reverse.spell(word), reverse.spell("other")]))[0].tolist()
    letters = [3 + ord(letter) - ord("a") for letter in reversed(word)]
    assert target == [START, *letters, END] + [PAD] * (LONGEST - len(word))
    assert reverse.read_back(torch.tensor(target)) == word[::-1]


@pytest.mark.parametrize("word", ["", "thirteenchars", "Upper", "a b", "naïve"])
def test_what_is_no_word_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="expected 1 to 12 letters from a to z"):
        reverse.spell(word)


def test_greedy_writes_the_likeliest_token_given_what_it_wrote() -> None:
    torch.manual_seed(1)
    model = reverse.new_model().eval()
    words = reverse.draw_words(20)
    with torch.no_grad():
        # Untrained and tied, it would repeat its last token for ever. Like this it writes END in most rows.
        model.output.weight = torch.nn.Parameter(torch.randn_like(model.output.weight))
        model.output.weight[END] *= 3
        written = reverse.greedy(model, words)
        assert written.shape == (20, LONGEST + 1)
        assert 3 < (written[:, :-1] == END).any(dim=1).sum() < 20
        for word, row in zip(words, written, strict=True):
            target = torch.tensor([[START]])
            for token in row:
                if target[0, -1] in (END, PAD):
                    assert token == PAD
                else:
                    assert token == model(word[None], target)[0, -1].argmax()
                target = torch.cat([target, token.reshape(1, 1)], dim=1)


def test_a_match_is_exact_only_with_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    words = reverse.draw_words(4)
    right = reverse.reverse(words)[:, 1:]
    wrong = right.clone()
    wrong[0, 0] += 1
    wrong[1][wrong[1] == END] = PAD
    wrong[2, -1] = END
    monkeypatch.setattr(reverse, "greedy", lambda model, source: wrong)
    assert reverse.exact_matches(None, words) == 1  # type: ignore[arg-type]
    monkeypatch.setattr(reverse, "greedy", lambda model, source: right)
    assert reverse.exact_matches(None, words) == 4  # type: ignore[arg-type]


def test_a_seed_gives_the_same_run_and_leaves_torchs_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reverse, "_HELD_OUT", 50)
    state = torch.get_rng_state()
    steps: list[int] = []
    first, again, other = (reverse.train(seed, steps=3, on_step=steps.append)[1] for seed in (5, 5, 6))
    assert first == again and first.losses != other.losses and sum(steps) == 9
    assert torch.equal(torch.get_rng_state(), state)
    assert first.held_out == 50 and first.exact == 0 and first.interval[0] < 1e-9


def test_held_out_words_are_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []

    def draw_few(count: int, generator: None = None) -> torch.Tensor:
        words = torch.randint(3, 8, (count, 2))  # 25 words, so that most would occur on both sides
        drawn.append(torch.nn.functional.pad(words, (0, LONGEST - 2)))
        return drawn[-1][:20] if len(drawn) == 1 else drawn[-1]

    def step(model: object, optimizer: object, words: torch.Tensor) -> float:
        seen.append(words)
        return 0.0

    monkeypatch.setattr(reverse, "draw_words", draw_few)
    monkeypatch.setattr(reverse, "_step", step)
    reverse.train(steps=2)
    held_out = set(map(tuple, drawn[0][:20].tolist()))
    trained_on = set(map(tuple, torch.cat(seen).tolist()))
    assert trained_on and not trained_on & held_out
    assert set(map(tuple, torch.cat(drawn[1:]).tolist())) & held_out


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_is_learned(seed: int) -> None:
    model, run = reverse.train(seed, steps=900)
    assert not model.training and run.exact_match >= 0.99 and run.losses[-1] < 0.05
    assert reverse.read_back(reverse.greedy(model, reverse.spell("attention"))[0]) == "noitnetta"
