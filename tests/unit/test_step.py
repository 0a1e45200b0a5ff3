"""One block over rows of every kind, with models that are tables over (last token, position in the block)."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from smc_sglang.smc import step
from smc_sglang.smc.densities import Density, log_density
from smc_sglang.smc.rng import Stream, sample_categorical, uniforms

VOCAB = 300  # more than one block of sampling
_GENERATOR = torch.Generator().manual_seed(1)
TARGET = torch.randn(VOCAB, VOCAB, generator=_GENERATOR) * 2
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=_GENERATOR)


class Models:
    """Bigram models that write down what they were asked."""

    def __init__(self, draft: Tensor = DRAFT, target: Tensor = TARGET) -> None:
        self._draft, self._target = draft, target
        self.passes: list[tuple[int, list[int], list[int]]] = []
        self.scored: list[Tensor] = []

    def draft(self, k: int, rows: Tensor, tokens: Tensor) -> Tensor:
        self.passes.append((k, rows.tolist(), tokens.tolist()))
        return self._draft[tokens]

    def score(self, tokens: Tensor) -> Tensor:
        self.scored.append(tokens)
        return self._target[tokens]


def make_rows(draft_lengths: list[int], **changes: Tensor | bool) -> step.Rows:
    n = len(draft_lengths)
    rows = step.Rows(
        pending=torch.arange(n) * 7 + 1,
        draft_lengths=torch.tensor(draft_lengths),
        draft_lengths_list=tuple(draft_lengths),
        density=Density(torch.linspace(0.5, 1.5, n)),
        greedy=torch.zeros(n, dtype=torch.bool),
        powers=torch.ones(n),
        seeds=torch.arange(n) + 100,
        particles=torch.arange(n) % 3,
        positions=torch.arange(n) * 5,
    )
    return replace(rows, **changes)


def take(rows: step.Rows, index: list[int]) -> step.Rows:
    chosen = {
        field.name: getattr(rows, field.name)[index]
        for field in fields(rows)
        if isinstance(getattr(rows, field.name), Tensor)
    }
    chosen["density"] = rows.density.rows(torch.tensor(index))
    return replace(rows, **chosen, draft_lengths_list=tuple(rows.draft_lengths_list[i] for i in index))


def run(rows: step.Rows) -> tuple[step.Block, Models]:
    models = Models()
    return step.propose_and_score(rows, models.draft, models.score)[0], models


MIXED = make_rows(
    [3, 0, 1, 3, 2, 4, 0],
    greedy=torch.tensor([False, False, True, True, False, False, True]),
    powers=torch.tensor([1.0, 2.0, 1.0, 1.0, 0.5, 1.0, 3.0]),
)


def naive_row(rows: step.Rows, row: int) -> tuple[list[int], list[float]]:
    """One row's block, by the book."""
    k_row, alpha, temperature = rows.draft_lengths_list[row], float(rows.powers[row]), rows.density.temperatures[row]
    position = int(rows.positions[row])

    def draw(log_probs: Tensor, offset: int, stream: Stream) -> int:
        u = uniforms(rows.seeds[row], rows.particles[row], torch.tensor(position + offset), stream)
        return int(sample_categorical(log_probs, u))

    tokens, increments, last = [], [], int(rows.pending[row])
    if rows.greedy[row]:
        proposal = last
        for _ in range(k_row + 1):
            last = int(TARGET[last].argmax())
            tokens.append(last)
            proposal = int(DRAFT[proposal].argmax())
            if proposal != last:
                break
        return tokens, [0.0] * len(tokens)
    for k in range(k_row):
        log_q, log_p = log_density(DRAFT[last], temperature), log_density(TARGET[last], temperature)
        last = draw(log_q, k, Stream.DRAFT)
        tokens.append(last)
        increments.append(alpha * float(log_p[last]) - float(log_q[last]))
    powered = alpha * log_density(TARGET[last], temperature).double()
    log_c = float(powered.logsumexp(-1)) if alpha != 1 else 0.0
    tokens.append(draw((powered - log_c).float(), k_row, Stream.BONUS))
    return tokens, [*increments, log_c]


def test_every_row_follows_the_book() -> None:
    block, _ = run(MIXED)
    width = 5
    assert block.tokens.shape == block.log_increments.shape == (7, width)
    assert block.log_increments.dtype == torch.float64
    for row in range(7):
        tokens, increments = naive_row(MIXED, row)
        padding = width - len(tokens)
        assert int(block.lengths[row]) == len(tokens)
        assert block.tokens[row].tolist() == tokens + [step.PADDING] * padding
        assert block.log_increments[row].tolist() == pytest.approx(increments + [0.0] * padding, abs=1e-5)


def test_a_row_alone_gives_the_same_bits() -> None:
    together, _ = run(MIXED)
    for row in range(7):
        alone, _ = run(take(MIXED, [row]))
        width = alone.tokens.shape[1]
        assert torch.equal(alone.tokens[0], together.tokens[row, :width])
        assert torch.equal(alone.log_increments[0], together.log_increments[row, :width])
        assert torch.equal(alone.lengths[0], together.lengths[row])


def test_the_order_of_the_rows_does_not_matter() -> None:
    order = [5, 2, 6, 0, 4, 3, 1]
    together, shuffled = run(MIXED)[0], run(take(MIXED, order))[0]
    assert torch.equal(shuffled.tokens, together.tokens[order])
    assert torch.equal(shuffled.log_increments, together.log_increments[order])


def test_draft_passes() -> None:
    block, models = run(MIXED)
    drafted = models.scored[0]
    assert [(k, rows) for k, rows, _ in models.passes] == [
        (0, [0, 2, 3, 4, 5]),
        (1, [0, 2, 3, 4, 5]),
        (2, [0, 3, 4, 5]),
        (3, [0, 3, 5]),
        (4, [5]),
    ]
    for k, rows, tokens in models.passes:
        assert tokens == drafted[rows, k].tolist()
    assert len(models.scored) == 1
    assert drafted[:, 0].tolist() == MIXED.pending.tolist()
    beyond = torch.arange(5) > MIXED.draft_lengths[:, None]
    assert bool((drafted[beyond] == 0).all())
    sampled = ~MIXED.greedy
    is_drafted = (~beyond)[:, 1:] & sampled[:, None]
    assert torch.equal(drafted[:, 1:][is_drafted], block.tokens[:, :-1][is_drafted])


def test_rows_without_a_draft_need_no_draft_pass() -> None:
    rows = make_rows([0, 0, 0])
    block, models = run(rows)
    assert models.passes == []
    assert [scored.tolist() for scored in models.scored] == [rows.pending[:, None].tolist()]
    assert block.lengths.tolist() == [1, 1, 1]
    assert block.log_increments.tolist() == [[0.0]] * 3


def test_what_padding_scores_does_not_matter() -> None:
    models = Models()

    def score(tokens: Tensor) -> Tensor:
        logits = models.score(tokens)
        beyond = torch.arange(tokens.shape[1]) > MIXED.draft_lengths[:, None]
        return logits.masked_fill(beyond[..., None], torch.nan)

    (block, _), (expected, _) = step.propose_and_score(MIXED, models.draft, score), run(MIXED)
    assert torch.equal(block.tokens, expected.tokens)
    assert torch.equal(block.log_increments, expected.log_increments)


def test_without_greedy_rows_nothing_changes_by_saying_so() -> None:
    rows = make_rows([2, 3, 0])
    said, unsaid = run(replace(rows, any_greedy=False))[0], run(rows)[0]
    assert torch.equal(said.tokens, unsaid.tokens)
    assert torch.equal(said.log_increments, unsaid.log_increments)


@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize("draft", [DRAFT, TARGET], ids=["another draft", "the target as draft"])
def test_greedy_rows_decode_like_the_target_alone(draft_length: int, draft: Tensor) -> None:
    plain, last = [], 5
    for _ in range(40):
        last = int(TARGET[last].argmax())
        plain.append(last)
    models, tokens, cycles = Models(draft), [5], 0
    while len(tokens) <= len(plain):
        rows = make_rows([draft_length], pending=torch.tensor(tokens[-1:]), greedy=torch.tensor([True]))
        block, _ = step.propose_and_score(rows, models.draft, models.score)
        tokens += block.tokens[0, : int(block.lengths[0])].tolist()
        cycles += 1
    assert tokens[1 : len(plain) + 1] == plain
    if draft is TARGET:
        assert cycles == math.ceil(len(plain) / (draft_length + 1))


def test_a_perfect_draft_gives_no_weight() -> None:
    models = Models(draft=TARGET)
    block, _ = step.propose_and_score(make_rows([4, 2, 3]), models.draft, models.score)
    assert bool((block.log_increments == 0).all())


def test_a_token_that_the_target_excludes_weighs_minus_infinity() -> None:
    target, draft = TARGET.clone(), DRAFT.clone()
    target[:, : VOCAB - 1] = -torch.inf
    draft[:, VOCAB - 1] = -torch.inf
    models = Models(draft, target)
    block, _ = step.propose_and_score(make_rows([2, 2]), models.draft, models.score)
    assert bool(block.log_increments[:, :2].isneginf().all())
    assert block.tokens[:, 2].tolist() == [VOCAB - 1] * 2
    assert bool((block.log_increments[:, 2] == 0).all())


def test_first_tokens_are_shared_at_power_one_only() -> None:
    rows = make_rows(
        [1, 1, 1],
        powers=torch.tensor([1.0, 2.0, 2.0]),
        greedy=torch.tensor([False, False, True]),
        particles=torch.zeros(3, dtype=torch.int64),
    )
    logits = TARGET[:3] / 3
    tokens, log_c = step.first_tokens(logits, rows, 16)
    assert tokens.shape == (3, 16)
    assert len(tokens[0].unique()) == 1
    assert len(tokens[1].unique()) > 4
    assert tokens[2].unique().tolist() == [int(logits[2].argmax())]
    powered = 2 * log_density(logits[1], rows.density.temperatures[1]).double()
    assert log_c.dtype == torch.float64
    assert log_c.tolist() == pytest.approx([0.0, float(powered.logsumexp(-1)), 0.0], abs=1e-5)


def test_a_first_token_is_the_bonus_of_its_position() -> None:
    """A prefill draws what a block without a draft would have drawn at the same place."""
    rows = make_rows([0, 0, 0], particles=torch.zeros(3, dtype=torch.int64))
    tokens, _ = step.first_tokens(TARGET[rows.pending], rows, 1)
    assert torch.equal(tokens, run(rows)[0].tokens)
