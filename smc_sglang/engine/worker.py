"""The two models and one cycle's launch half: draft, score, weigh, resample, on tensors.

SGLang's scheduler calls :meth:`SmcWorker.forward_batch_generation` once per step. What it returns is only a proposal
to the scheduler: :mod:`smc_sglang.engine.coordinator` commits it to requests, tree and streams.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

from smc_sglang.config import SmcConfig
from smc_sglang.engine import logprobs
from smc_sglang.engine.decision import GroupRows, Verdict, accept_exactly, decide, identical_chains
from smc_sglang.engine.finish import needs_host, stop_ids, valid_lengths
from smc_sglang.engine.grammar import GrammarMasks
from smc_sglang.engine.group import Particle, ParticleGroup, Solo, block_width, role
from smc_sglang.engine.sampling import density_of
from smc_sglang.engine.scoring import PendingInput, ScoreInput
from smc_sglang.platform.linear import int8_weights
from smc_sglang.smc import step

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


PADDING_SLOT = 0  # SGLang's pools keep it for the KV of padded tokens


@dataclass
class CycleResult(GenerationBatchResult):
    """SGLang's result of a decode step, and what the commit half needs besides."""

    block: step.Block | None = None
    members: list[GroupRows] | None = None
    # Not of groups of which only the host can tell which tokens finish a particle.
    verdicts: dict[ParticleGroup, Verdict] = field(default_factory=dict)


@dataclass
class PrefillResult(GenerationBatchResult):
    """SGLang's result of a prefill, with every particle's first token."""

    first_tokens: list[list[int]] | None = None  # [n_requests][n_particles]
    first_log_weights: torch.Tensor | None = None  # float64 [n_requests], log c of the first token
    first_logprobs: list[list[float]] | None = None  # of the first tokens, where a client wants to know


def _no_logits(input_ids: torch.Tensor, hidden_states: torch.Tensor, *_: Any, **__: Any) -> LogitsProcessorOutput:
    return LogitsProcessorOutput(next_token_logits=hidden_states.new_empty(len(hidden_states), 0))


class DraftWorker(TpModelWorker):
    """The draft model's SGLang worker. It shares the target's rows and slot indices."""

    @contextmanager
    def kv_only(self) -> Iterator[None]:
        """Forwards leave out the output layer, a fifth of a small model: their logits are of no token.

        Of no effect on a graph that was captured outside, or on a model that makes its logits in another way.
        """
        processor = getattr(self.model_runner.model, "logits_processor", None)
        if not isinstance(processor, LogitsProcessor):
            yield
            return
        processor.forward = _no_logits
        try:
            yield
        finally:
            del processor.forward

    @property
    def draft_runners(self) -> list[ModelRunner]:
        return [self.model_runner]


class SmcWorker(BaseSpecWorker):
    """Target and draft behind SGLang's speculative worker interface."""

    def __init__(self, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker) -> None:
        super().__init__()
        logprobs.use_the_models_own()
        self.server_args = server_args
        self._target_worker = target_worker
        self.speculative_num_draft_tokens = get_spec().speculative_num_draft_tokens
        self.parallel_layout = resolve_draft_parallel_layout(
            DraftParallelSpec(tp_execution=DraftTPExecution.TARGET_LAYOUT)
        )
        weights = int8_weights() if SmcConfig.current().draft_int8 else nullcontext()
        with self._draft_context(), draft_model_build_scope(), weights:
            self._draft_worker = DraftWorker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                is_draft_worker=True,
                # The draft runs at the target's absolute positions.
                context_length=target_worker.model_runner.model_config.context_len,
            )
        self.draft_runner = self._draft_worker.model_runner
        # What only one of the models has is padding.
        runners = (target_worker.model_runner, self.draft_runner)
        self._vocab_size = min(runner.model_config.vocab_size for runner in runners)

    # -- SGLang's set-up interface -----------------------------------------------------------------------

    @contextmanager
    def _draft_context(self) -> Iterator[None]:
        with draft_tp_context(self.parallel_layout), draft_pp_context():
            yield

    def init_attention_backends(self) -> None:
        with self._draft_context():
            self._draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        # SGLang's decode graph refuses a draft model of an algorithm that it does not know.
        with self._draft_context():
            self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        return (self.target_worker.model_runner.attn_backend, self.draft_runner.attn_backend)

    # -- one step ------------------------------------------------------------------------------------------

    def forward_batch_generation(
        self, batch: ScheduleBatch, on_publish: Any = None, pp_proxy_tensors: Any = None, **_: Any
    ) -> GenerationBatchResult:
        """Run one scheduler step. SGLang restores `batch` afterwards."""
        if batch.forward_mode.is_extend():
            result = self._prefill(batch)
        elif batch.forward_mode.is_idle() or not batch.reqs:
            result = self.target_worker.forward_batch_generation(batch)
            result.next_draft_input = PendingInput(torch.empty(0, dtype=torch.int64, device=batch.device))
        else:
            result = self._cycle(batch)
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def _prefill(self, batch: ScheduleBatch) -> PrefillResult:
        """Both models read the prompts, into the same slots; every particle draws its first token."""
        batch.spec_info = None
        for req in batch.reqs:
            if isinstance(own := role(req), ParticleGroup):
                own.take_grammar()
        target = self.target_worker.forward_batch_generation(batch, is_verify=True)
        draft_batch = copy.copy(batch)
        draft_batch.return_logprob = False
        with self._draft_worker.kv_only():
            self._draft_forward(draft_batch)
        rows = _describe(batch, torch.zeros_like(batch.seq_lens), self._vocab_size)
        sizes = [_first_draws(req) for req in batch.reqs]
        logits = target.logits_output.next_token_logits[:, : self._vocab_size]
        tokens, log_weights = step.first_tokens(logits, rows, max(sizes))
        first_tokens = [row[:size] for row, size in zip(tokens.tolist(), sizes, strict=True)]
        first_logprobs = None
        if batch.return_logprob:
            of_all = logprobs.of_first_tokens(batch, target.logits_output, tokens).tolist()
            first_logprobs = [row[:size] for row, size in zip(of_all, sizes, strict=True)]
        return PrefillResult(
            logits_output=target.logits_output,
            next_token_ids=tokens[:, 0].to(torch.int32),
            can_run_cuda_graph=target.can_run_cuda_graph,
            next_draft_input=PendingInput(tokens[:, 0].contiguous()),
            new_seq_lens=batch.seq_lens,
            speculative_num_draft_tokens=self.speculative_num_draft_tokens,
            first_tokens=first_tokens,
            first_log_weights=log_weights.cpu(),
            first_logprobs=first_logprobs,
        )

    def _cycle(self, batch: ScheduleBatch) -> CycleResult:
        """One SMC cycle over all rows: the algorithm box of :mod:`smc_sglang.smc.step` on SGLang's forwards."""
        rows = _describe(batch, batch.spec_info.bonus_tokens, self._vocab_size)
        models = _BlockForwards(self, batch, widths=[length + 1 for length in rows.draft_lengths_list])
        block, laws = step.propose_and_score(rows, models.draft, models.score)
        members = _group_rows(batch.reqs)
        block, verdicts = _decide(batch.reqs, members, block, laws)
        _give_up_dead_ends(batch.reqs, rows.density.masks, verdicts)

        if batch.return_logprob:
            logprobs.of_block(batch, models.logits_output, block.tokens)
        last = (block.lengths - 1).unsqueeze(1)
        return CycleResult(
            logits_output=models.logits_output,
            next_token_ids=block.tokens.reshape(-1).to(torch.int32),
            accept_lens=block.lengths.to(torch.int32),
            new_seq_lens=batch.seq_lens + block.lengths,
            can_run_cuda_graph=models.can_run_cuda_graph,
            next_draft_input=PendingInput(block.tokens.gather(1, last).squeeze(1)),
            speculative_num_draft_tokens=block.tokens.shape[1],
            block=block,
            members=members,
            verdicts=verdicts,
        )

    def _draft_forward(self, batch: ScheduleBatch) -> torch.Tensor:
        """One forward of the draft model; logits [n_rows, vocab]."""
        forward_batch = ForwardBatch.init_new(
            batch,
            self.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        with self._draft_context():
            logits = self.draft_runner.forward(forward_batch).logits_output.next_token_logits
        return logits[:, : self._vocab_size]


class _BlockForwards:
    """The two callables of the algorithm for one batch: draft one token per row, score a whole block."""

    def __init__(self, worker: SmcWorker, batch: ScheduleBatch, widths: list[int]) -> None:
        self._worker = worker
        self._batch = batch
        self._widths = widths  # [n_rows], each row's own block
        self._committed = batch.seq_lens  # [n_rows], tokens with KV: the pending one excluded
        self._committed_cpu = batch.seq_lens_cpu
        offsets = torch.arange(max(widths), device=self._committed.device)
        self._positions = self._committed[:, None] + offsets
        table = batch.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices[:, None], self._positions].to(torch.int64)
        # A row owns slots for its own block only; the padding behind it is written to SGLang's dummy slot.
        own = torch.tensor(widths, device=offsets.device)
        self._slots = slots.masked_fill(offsets >= own[:, None], PADDING_SLOT)  # [n_rows, width]
        self._views: dict[int, ScheduleBatch] = {}
        self.logits_output: Any = None
        self.can_run_cuda_graph = False

    def draft(self, k: int, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """One draft pass over `rows` at block offset `k`; logits [len(rows), vocab], of no token in the last pass."""
        view = self._view(rows)
        whole = len(rows) == len(self._batch.reqs)
        committed = self._committed if whole else self._committed[rows]
        committed_cpu = self._committed_cpu if whole else self._committed_cpu[rows.cpu()]
        view.forward_mode = ForwardMode.DECODE
        view.spec_info = None
        view.input_ids = tokens.contiguous()
        view.seq_lens = committed + k + 1
        view.seq_lens_cpu = committed_cpu + k + 1
        view.seq_lens_sum = None
        view.out_cache_loc = (self._slots if whole else self._slots[rows])[:, k].contiguous()
        is_last = k == self._slots.shape[1] - 1
        with self._worker._draft_worker.kv_only() if is_last else nullcontext():
            return self._worker._draft_forward(view)

    def score(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's logits after every block token, [n_rows, width, vocab]: one TARGET_VERIFY forward."""
        batch, (n_rows, width) = copy.copy(self._batch), tokens.shape
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = tokens.reshape(-1)
        batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = self._committed, self._committed_cpu, None
        batch.out_cache_loc = self._slots.reshape(-1)
        rows = self._batch.req_to_token_pool.req_to_token
        batch.spec_info = ScoreInput(self._positions.reshape(-1), width, rows, self._widths)
        result = self._worker.target_worker.forward_batch_generation(batch, is_verify=True)
        self.logits_output, self.can_run_cuda_graph = result.logits_output, result.can_run_cuda_graph
        return result.logits_output.next_token_logits.view(n_rows, width, -1)[..., : self._worker._vocab_size]

    def _view(self, rows: torch.Tensor) -> ScheduleBatch:
        """The batch restricted to `rows` (rows only ever drop out, so their number names them)."""
        if len(rows) not in self._views:
            view = copy.copy(self._batch)
            if len(rows) < len(view.reqs):
                kept = rows.tolist()
                view.reqs = [view.reqs[i] for i in kept]
                view.req_pool_indices = view.req_pool_indices[rows]
                view.req_pool_indices_cpu = view.req_pool_indices_cpu[kept]
                view.orig_seq_lens = view.orig_seq_lens[rows]
                view.multimodal_inputs = None
            self._views[len(rows)] = view
        return self._views[len(rows)]


def _decide(
    reqs: list[Req], members: list[GroupRows], block: step.Block, laws: step.Laws
) -> tuple[step.Block, dict[ParticleGroup, Verdict]]:
    """What the cycle does to every group, and the block as it is committed."""
    exact = [member for member in members if member.group.params.mode == "exact"]
    verdicts: dict[ParticleGroup, Verdict] = {}
    if exact:
        block, verdicts = accept_exactly(exact, [member.rows for member in exact], block, laws)
    remaining = [req.sampling_params.max_new_tokens - len(req.output_ids) for req in reqs]
    valid, finished = valid_lengths(
        block.tokens,
        block.lengths,
        [stop_ids(req, req.sampling_params) for req in reqs],
        torch.tensor(remaining, device=block.tokens.device),
    )
    weighed = decide([m for m in members if m.group not in verdicts], block.log_increments, valid, finished)
    # Whether a stop string comes before the first impossible token is not known here: such a block is redone, too.
    degenerate = [member for member in members if member.group in weighed and weighed[member.group].degenerate]
    if degenerate:
        chains = [identical_chains(member, reqs) for member in degenerate]
        block, redone = accept_exactly(degenerate, chains, block, laws)
        weighed |= {group: replace(verdict, degenerate=True) for group, verdict in redone.items()}
    if any(needs_host(req) for req in reqs):
        weighed = {group: verdict for group, verdict in weighed.items() if verdict.degenerate}
    verdicts |= weighed
    _bar_from_tree(reqs, members, verdicts)
    return block, verdicts


def _bar_from_tree(reqs: list[Req], members: list[GroupRows], verdicts: dict[ParticleGroup, Verdict]) -> None:
    """After exact acceptance all rows of a group hold the winner's tokens, but only its row the KV of them: should they
    finish, the others' KV must not be published. (:meth:`Particle.become` sets all of that right.)"""
    for member in members:
        verdict = verdicts.get(member.group)
        if verdict is None or not verdict.exact or verdict.ancestors is None:
            continue
        for index, row in enumerate(member.rows):
            if row >= 0 and index != verdict.ancestors[index]:
                reqs[row].skip_radix_cache_insert = True
                reqs[row].grammar = None  # it may not allow the winner's tokens; the winner's own will be forked


def _give_up_dead_ends(reqs: list[Req], masks: Any, verdicts: dict[ParticleGroup, Verdict]) -> None:
    """Particles in a dead end of their grammar have weight 0 and go on without it until they become copies of others.

    Where nothing is left but dead ends the grammar stays, and SGLang aborts the request: no invalid token is said.
    """
    for row in masks.dead_ends if isinstance(masks, GrammarMasks) else ():
        own = role(reqs[row])
        if isinstance(own, Particle) and (verdict := verdicts.get(own.group)) and not verdict.exact:
            reqs[row].grammar = None


@dataclass(frozen=True)
class _RowParams:
    draft_length: int
    power: float
    seed: int
    particle: int


def _row(req: Req) -> _RowParams:
    match role(req):
        case Particle(group=group, index=index):
            return _RowParams(block_width(req) - 1, group.params.power, group.seed, index)
        case ParticleGroup(params=params, seed=seed):
            return _RowParams(params.draft_length, params.power, seed, 0)
        case Solo(seed=seed):
            return _RowParams(block_width(req) - 1, 1.0, seed, 0)
        case _:
            return _RowParams(0, 1.0, 0, 0)


def _first_draws(req: Req) -> int:
    """How many first tokens `req` needs: one per particle, or one for an ordinary row."""
    own = role(req)
    return own.params.n_particles if isinstance(own, ParticleGroup) else 1


def _describe(batch: ScheduleBatch, pending: torch.Tensor, vocab_size: int) -> step.Rows:
    """The batch's rows as the algorithm sees them."""
    device = batch.seq_lens.device
    rows = [_row(req) for req in batch.reqs]
    draft_lengths = tuple(row.draft_length for row in rows)
    greedy = [req.sampling_params.top_k == 1 for req in batch.reqs]
    density = density_of(batch.reqs, draft_lengths, vocab_size, device)
    return step.Rows(
        pending=pending,
        draft_lengths=torch.tensor(draft_lengths, dtype=torch.int64, device=device),
        draft_lengths_list=draft_lengths,
        density=density,
        greedy=torch.tensor(greedy, dtype=torch.bool, device=device),
        any_greedy=any(greedy),
        powers=torch.tensor([row.power for row in rows], dtype=torch.float32, device=device),
        seeds=torch.tensor([row.seed for row in rows], dtype=torch.int64, device=device),
        particles=torch.tensor([row.particle for row in rows], dtype=torch.int64, device=device),
        positions=torch.tensor([len(req.output_ids) for req in batch.reqs], dtype=torch.int64, device=device),
        keeps_laws=density.may_vanish or any(_is_exact(req) for req in batch.reqs),
    )


def _is_exact(req: Req) -> bool:
    own = role(req)
    return isinstance(own, Particle) and own.group.params.mode == "exact"


def _group_rows(reqs: list[Req]) -> list[GroupRows]:
    """The groups in the batch; their finished particles have no row."""
    found: dict[ParticleGroup, dict[int, int]] = {}
    for row, req in enumerate(reqs):
        own = role(req)
        if isinstance(own, Particle):
            found.setdefault(own.group, {})[own.index] = row
    return [
        GroupRows(
            group=group,
            rows=[row_of.get(index, -1) for index in range(len(group.particles))],
            # Live particles of a group have one length, so any of them tells the position.
            position=len(group.live[0].req.output_ids),
        )
        for group, row_of in found.items()
    ]
