"""The commit half of a cycle, and the only place that decides over a group's life.

After every scheduler step: a parent whose prefill is complete forks into particles; particles take over their
ancestors' state; groups whose particles have all finished draw their answer; what a group agrees on is streamed.
How KV moves is :class:`radix_patch.ParticleTree`'s; what the weights are is :mod:`smc_sglang.smc`'s.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker

from radix_patch import ParticleTree
from radix_patch.accounting import check_ownership, usage
from smc_sglang.config import SmcConfig, SmcParams
from smc_sglang.engine.decision import GroupRows, Verdict, decide
from smc_sglang.engine.group import Particle, ParticleGroup, Solo, block_width, lineage, role
from smc_sglang.engine.metrics import Metrics
from smc_sglang.engine.running_batch import decode_batch, join_running, refresh_pending
from smc_sglang.engine.worker import CycleResult, PrefillResult
from smc_sglang.smc import step
from smc_sglang.smc.resampling import SCHEMES, arrange
from smc_sglang.smc.rng import Stream, uniforms
from smc_sglang.smc.weights import Weights

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

_ADMISSION_SLACK = 3  # KV slots that SGLang's own admission wants to see free beyond what a request needs


class Coordinator:
    """Groups of one scheduler, from admission to answer."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._config = SmcConfig.current()
        self._tree = ParticleTree(
            scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        )
        self._metrics = Metrics(scheduler)
        self._checks_ownership = envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get() > 0
        self._n_enlisted = 0

    # -- admission ---------------------------------------------------------------------------------------

    def enlist(self, req: Req) -> None:
        """Give a new request its role, or finish it with the reason why it can never run here."""
        if req.to_finish is not None or req.finished():
            return
        custom = req.sampling_params.custom_params or {}
        params = SmcParams.resolve(custom.get("smc"), self._config)
        seed = self._seed(req)
        if req.sampling_params.top_k == 1 and params.mode != "off":
            req.smc = Solo(params, seed, draft_length=params.draft_length)
        elif params.mode == "off" or req.sampling_params.max_new_tokens == 0:  # 0: only the prompt is wanted
            req.smc = Solo(params, seed, draft_length=0)
        else:
            self._enlist_group(req, params, seed, chosen=(custom.get("smc") or {}).get("n_particles") is not None)

    def _enlist_group(self, req: Req, params: SmcParams, seed: int, *, chosen: bool) -> None:
        """Admit a group whose whole population can run, alone at least.

        Args:
            chosen: the client asked for this n_particles: then it is honoured or refused. The server's own default
                is lowered to what fits instead; the report says how many particles there were.
        """
        if not chosen:  # SGLang cuts answers at the end of the pool; our particle needs a little more there
            room = self._scheduler.max_total_num_tokens - _ADMISSION_SLACK - len(req.origin_input_ids) - 1
            req.sampling_params.max_new_tokens = max(min(req.sampling_params.max_new_tokens, room), 1)
        n, problem = self._largest_population(req, params)
        if n < params.n_particles and (chosen or n < 1):
            req.set_finish_with_abort(problem)
            return
        req.smc = ParticleGroup(self, req, params.model_copy(update={"n_particles": n}), seed)
        req.smc.queue()

    def _seed(self, req: Req) -> int:
        """The client's seed, or one that all tensor-parallel ranks derive alike."""
        self._n_enlisted += 1
        if req.sampling_params.sampling_seed is not None:
            return int(req.sampling_params.sampling_seed)
        text = f"{req.rid}/{self._n_enlisted}/{self._scheduler.server_args.random_seed}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)

    def _largest_population(self, req: Req, params: SmcParams) -> tuple[int, str]:
        """How many of the particles that `req` would have this server can hold, and a sentence on what limits them."""
        n, n_rows = params.n_particles, self._tree.n_rows
        if n > n_rows:
            return n_rows, f"smc.n_particles={n} is above the server's {n_rows} rows (--max-running-requests)"
        prompt, new_tokens = len(req.origin_input_ids), req.sampling_params.max_new_tokens
        per_particle = new_tokens + 1  # see ParticleGroup.queue
        limit = self._scheduler.max_total_num_tokens
        fitting = max(limit - _ADMISSION_SLACK - prompt, 0) // per_particle
        need = prompt + n * per_particle + _ADMISSION_SLACK
        return min(n, fitting), (
            f"The request may need {need} KV slots ({prompt} prompt tokens and {n} particles of "
            f"up to {new_tokens} new tokens) but the server has {limit}: lower max_tokens or smc.n_particles"
        )

    def rows_promised(self, running: Iterable[Req]) -> int:
        """Rows that no request holds but that finished particles get back when a resampling revives them."""
        return sum(len(group.particles) - len(group.live) for group in _groups(running))

    @property
    def n_free_rows(self) -> int:
        return self._tree.n_free_rows

    # -- after a step --------------------------------------------------------------------------------------

    def commit(self, batch: ScheduleBatch, result: Any) -> None:
        """Commit one scheduler step, after SGLang has appended its tokens and checked every row's finish."""
        if isinstance(result, PrefillResult):
            self._commit_prefill(batch, result)
        elif isinstance(result, CycleResult):
            self._commit_cycle(batch, result)
        self._observe()

    def _observe(self) -> None:
        live = [
            req for req in self._scheduler.running_batch.reqs if isinstance(role(req), Particle) and not req.finished()
        ]
        self._metrics.observe(self._tree, live)
        if self._checks_ownership:
            check_ownership(self._tree, live)

    def _commit_prefill(self, batch: ScheduleBatch, result: PrefillResult) -> None:
        assert result.first_tokens is not None
        assert result.first_log_weights is not None
        forked: list[Req] = []
        newborn: list[Req] = []
        first_logprobs: Sequence[list[float] | None] = result.first_logprobs or [None] * len(batch.reqs)
        for req, tokens, log_weight, log_probs in zip(
            batch.reqs, result.first_tokens, result.first_log_weights, first_logprobs, strict=True
        ):
            own = role(req)
            if isinstance(own, Solo) and own.draft_length == 0:
                # Only the target runs on what comes now: it must not be offered to requests that draft.
                req.skip_radix_cache_insert = True
            if not isinstance(own, ParticleGroup) or req.finished() or not own.prefill_is_complete:
                continue
            forked.append(req)
            self._fork(own, tokens, log_weight.expand(len(tokens)).clone(), log_probs)
            if own.abort_reason is not None:
                self._abort(own, own.abort_reason)
                continue
            newborn += [particle.req for particle in own.live]
            self._speak_or_finish(own)
        if forked:
            batch.filter_batch(reqs_to_exclude=forked)
            join_running(self._scheduler, newborn)

    def _fork(
        self,
        group: ParticleGroup,
        first_tokens: list[int],
        log_weights: torch.Tensor,
        first_logprobs: list[float] | None,
    ) -> None:
        if log_weights.isneginf().all():  # nothing of p~ is in the grammar's language
            group.diagnostics.fallbacks += 1
            group.add_log_z(None)
            log_weights = torch.zeros_like(log_weights)
        group.fork(first_tokens, log_weights, first_logprobs)
        self._tree.fork(group.parent, [particle.req for particle in group.particles])
        for particle in group.particles:
            particle.req.update_finish_state(1)
            if particle.finished:
                self._tree.finish(particle.req)
        self._account(group)

    def _commit_cycle(self, batch: ScheduleBatch, result: CycleResult) -> None:
        verdicts = result.verdicts | self._decide_on_host(batch, result)
        # Finished rows leave now: a particle that a resampling revives gets a new row and joins again.
        batch.filter_batch()
        revived: list[Req] = []
        members = result.members or ()
        for member in members:
            revived += self._commit_group(member, verdicts[member.group])
        if any(verdicts[m.group].ancestors is not None or m.group.params.max_stream_lag is not None for m in members):
            refresh_pending(batch)
        join_running(self._scheduler, revived)

    def _commit_group(self, member: GroupRows, verdict: Verdict) -> list[Req]:
        """Commit one group's cycle; returns the particles that have to join the batch again."""
        group = member.group
        reason = group.abort_reason
        if reason is None and verdict.broken:
            reason = FINISH_ABORT("A particle's weight is not a number.", HTTPStatus.INTERNAL_SERVER_ERROR)
        if reason is not None:
            self._abort(group, reason)
            return []
        self._record(group, verdict)
        ancestors = verdict.ancestors
        if (limit := group.params.max_stream_lag) is not None and not verdict.exact:
            ancestors = self._narrow(group, ancestors, limit)
        revived = [] if ancestors is None else self._resample(group, ancestors)
        self._tree.extend(particle.req for particle in group.twins(member.position))
        self._account(group)
        self._speak_or_finish(group)
        return revived

    def _decide_on_host(self, batch: ScheduleBatch, result: CycleResult) -> dict[ParticleGroup, Verdict]:
        """The launch half's decision, taken here because stop strings are only seen in decoded text."""
        block, members = result.block, [m for m in result.members or () if m.group not in result.verdicts]
        if not members:
            return {}
        assert block is not None
        valid = [0] * len(batch.reqs)
        for member in members:
            for row in member.rows:
                if row >= 0:
                    valid[row] = len(batch.reqs[row].output_ids_through_stop) - member.position
        device = block.lengths.device
        finished = torch.tensor([bool(req.finished()) for req in batch.reqs], device=device)
        return decide(members, block.log_increments, torch.tensor(valid, device=device), finished)

    def _record(self, group: ParticleGroup, verdict: Verdict) -> None:
        group.weights = verdict.weights
        group.diagnostics.cycles += 1
        if verdict.degenerate:
            group.diagnostics.fallbacks += 1
            group.add_log_z(None)
        if verdict.exact:
            return
        group.add_log_z(verdict.log_z_increment)
        group.diagnostics.ess.append(verdict.ess)
        if verdict.ancestors is not None:
            group.diagnostics.resamples += 1
            self._metrics.resamples.inc()

    def _account(self, group: ParticleGroup) -> None:
        """Note the KV that `group` holds between two cycles, and with the blocks of the next one."""
        live = [particle.req for particle in group.live]
        if not live:
            return
        # What all agree on is one path of the tree, except the last token: it may still be pending.
        agreed = len(group.parent.origin_input_ids) + len(group.parent.output_ids) - 1
        held = usage(self._tree, live, common=min(agreed, live[0].kv.kv_committed_len))
        group.diagnostics.kv_saved.append(held.saved)
        peak = held.distinct + sum(block_width(req) for req in live)
        group.diagnostics.kv_tokens_peak = max(group.diagnostics.kv_tokens_peak, peak)

    def _resample(self, group: ParticleGroup, ancestors: list[int]) -> list[Req]:
        """Let every particle become a copy of its ancestor; returns those that have to join the batch again."""
        # Arranged so that a surviving particle keeps its place: sources are never overwritten.
        arranged = enumerate(arrange(torch.tensor(ancestors)).tolist())
        pairs = [(group.particles[index], group.particles[ancestor]) for index, ancestor in arranged]
        return [particle.req for particle, source in pairs if particle is not source and self._become(particle, source)]

    def _narrow(self, group: ParticleGroup, ancestors: list[int] | None, limit: int) -> list[int] | None:
        """Where a group would hold back more than `limit` tokens, let it go on within one lineage.

        Args:
            ancestors: what this cycle's resampling has decided, not carried out yet.
        Returns:
            The ancestors of the two resamplings together.
        """
        assert group.weights is not None
        n, start = len(group.particles), len(group.parent.output_ids)
        sources = list(range(n)) if ancestors is None else ancestors
        tails = [group.particles[source].tokens[start:] for source in sources]
        weights = group.weights.normalized.cpu()
        kept = lineage(
            tails, weights, limit, lambda at: _draws(group, torch.tensor([0]), Stream.LINEAGE, start + at).cpu()
        )
        if kept is None:
            return ancestors
        device = group.weights.log_weights.device
        draws = _draws(group, torch.arange(n), Stream.NARROW, group.length)
        scheme = SCHEMES[group.params.resampling]
        chosen, log_z_increment = step.narrow(group.weights, kept.to(device), scheme, draws)
        group.add_log_z(float(log_z_increment))
        group.weights = Weights.uniform(n, device=device)
        group.diagnostics.resamples += 1
        self._metrics.resamples.inc()
        return [sources[i] for i in chosen.tolist()]

    def _become(self, particle: Particle, source: Particle) -> bool:
        """Make `particle` a copy of `source`, KV and host state; returns whether that has revived it."""
        was_live = not particle.finished
        if not source.finished:
            self._tree.move(particle.req, source.req)
        elif was_live:
            self._tree.release(particle.req)
        particle.become(source)
        return not was_live and not particle.finished

    # -- the answer ------------------------------------------------------------------------------------------

    def _speak_or_finish(self, group: ParticleGroup) -> None:
        if group.all_finished:
            self._answer(group)
        elif group.agree() and group.parent.stream:
            self._stream(group)

    def _answer(self, group: ParticleGroup) -> None:
        """Every particle has finished: draw one by its weight and let the parent speak with it."""
        if group.params.return_particles:
            group.final_particles = group.describe_particles()
        group.adopt_answer(self._settle(group))
        self._retire(group)

    def _settle(self, group: ParticleGroup) -> Particle:
        """Draw one particle with probability W_i; log Z^ takes in the weights."""
        assert group.weights is not None
        uniform = _draws(group, torch.tensor(0), Stream.SETTLE, group.length)
        index, log_z_increment = step.settle(group.weights, uniform)
        group.add_log_z(float(log_z_increment))
        return group.particles[int(index)]

    def _drop_live(self, group: ParticleGroup, reason: FINISH_ABORT) -> None:
        """Live particles give up their KV and leave the batch at its next filtering."""
        for particle in group.live:
            self._tree.release(particle.req)
            particle.req.finished_reason = reason

    def _abort(self, group: ParticleGroup, reason: FINISH_ABORT) -> None:
        self._drop_live(group, reason)
        group.parent.finished_reason = reason
        self._retire(group)

    def _retire(self, group: ParticleGroup) -> None:
        group.parent.time_stats.set_completion_time()
        self._stream(group)
        group.particles, group.weights = [], None

    def _stream(self, group: ParticleGroup) -> None:
        group.reasoning.update(group.parent, self._scheduler.batch_result_processor._maybe_update_reasoning_tokens)
        group.speaking = True
        self._scheduler.output_streamer.stream_output([group.parent], group.parent.return_logprob)
        group.speaking = False

    # -- pressure ----------------------------------------------------------------------------------------------

    def withdraw(self, group: ParticleGroup) -> Req | None:
        """Take a group out of the batch: draw one particle and queue the parent with its tokens.

        The draw is unbiased, so the group goes on from there with equal weights when it comes back. Returns the
        parent to requeue, or None where a finished particle was drawn: that is the answer.
        """
        chosen = self._settle(group)
        finished = chosen.finished
        group.adopt_answer(chosen)
        withdrawn = FINISH_ABORT("withdrawn")
        if not finished:
            self._tree.finish(chosen.req)  # evictable: what is still there then need not be prefilled again
            chosen.req.finished_reason = withdrawn
        self._drop_live(group, withdrawn)
        if finished:
            self._retire(group)
            return None
        group.particles, group.weights = [], None
        group.parent.reset_for_retract()
        group.queue()
        return group.parent

    def withdraw_all(self, running: ScheduleBatch) -> list[Req]:
        """Withdraw every group of the running batch; returns the parents to requeue."""
        parents = [self.withdraw(group) for group in _groups(running.reqs)]
        running.filter_batch()
        return [parent for parent in parents if parent is not None]

    def retract(
        self, original: Callable[[ScheduleBatch], tuple[list[Req], float, list[Req]]], batch: ScheduleBatch
    ) -> tuple[list[Req], float, list[Req]]:
        """`ScheduleBatch.retract_decode` for batches with groups.

        Groups first become smaller, down to one live particle, most KV first. Only when that is not enough do groups
        leave the batch, each as one and shortest answer first, to be prefilled and forked again.
        """
        pressed = not batch.check_decode_mem()  # else it is SGLang's test of retraction: one request has to go
        while not batch.check_decode_mem() and (group := self._most_kv(batch)) is not None:
            self._shrink(group, batch)
        requeued: list[Req] = []
        groups = sorted(_groups(batch.reqs), key=lambda group: len(group.live[0].req.output_ids), reverse=True)
        # The last one stays, unless others hold KV beside it.
        others = any(not isinstance(role(req), Particle) for req in batch.reqs) or self._scheduler.chunked_req
        while len(groups) > (0 if others else 1) and (not batch.check_decode_mem() or not (pressed or requeued)):
            parent = self.withdraw(groups.pop())
            batch.filter_batch()
            if parent is not None:
                requeued.append(parent)
        if batch.check_decode_mem():
            ratio = NewTokenRatioTracker.estimate_new_token_ratio_after_retract(batch.reqs)
            return requeued, ratio, []
        for group in groups:  # alone, and still too large: admission should have refused it
            self._abort(group, FINISH_ABORT("The KV pool is full.", HTTPStatus.SERVICE_UNAVAILABLE))
        batch.filter_batch()
        retracted, ratio, aborted = original(batch) if batch.reqs else ([], 1.0, [])
        return requeued + retracted, ratio, aborted

    def _most_kv(self, batch: ScheduleBatch) -> ParticleGroup | None:
        """The group that holds the most KV of those that can be made smaller."""

        def held(group: ParticleGroup) -> int:
            return usage(self._tree, [particle.req for particle in group.live]).distinct

        return max((group for group in _groups(batch.reqs) if len(group.live) > 1), key=held, default=None)

    def _shrink(self, group: ParticleGroup, batch: ScheduleBatch) -> None:
        """Resample `group` to half as many particles; the others leave `batch`, and their KV returns to the pool.

        Its log Z^ takes in the mean weight, and the survivors go on with equal weights: unbiased, like resampling.
        """
        assert group.weights is not None
        old_n = len(group.particles)
        n = old_n // 2
        # Counted from the old N: a second shrinking in the same place draws other numbers.
        draws = _draws(group, torch.arange(old_n, old_n + n), Stream.SHRINK, group.length)
        ancestors, log_z_increment = step.shrink(group.weights, SCHEMES[group.params.resampling], draws)
        group.add_log_z(float(log_z_increment))
        group.weights = Weights(torch.zeros_like(draws))
        group.diagnostics.shrinks += 1
        self._metrics.shrinks.inc()

        sources = [group.particles[ancestor] for ancestor in ancestors.tolist()]
        survivors = list(dict.fromkeys(sources))
        spare = sorted((particle for particle in group.particles if particle not in survivors), key=_finished)
        revived = []
        for source in _repeated(sources):
            particle = spare.pop(0)
            if self._become(particle, source):
                revived.append(particle.req)
            survivors.append(particle)
        dropped = [particle.req for particle in spare if not particle.finished]
        self._tree.shrink(dropped)
        for req in dropped:
            req.finished_reason = FINISH_ABORT("dropped")
        group.renew(survivors)
        batch.filter_batch()
        if revived:
            batch.merge_batch(decode_batch(self._scheduler, revived))
        refresh_pending(batch)
        if group.all_finished:
            self._answer(group)


def _draws(group: ParticleGroup, particles: torch.Tensor, stream: Stream, position: int) -> torch.Tensor:
    """Uniforms of `group` for these particle counters at one output position, where its weights are."""
    assert group.weights is not None
    draws = uniforms(torch.tensor(group.seed), particles, torch.tensor(position), stream)
    return draws.to(group.weights.log_weights.device)


def _finished(particle: Particle) -> bool:
    return particle.finished


def _repeated(particles: Iterable[Particle]) -> Iterator[Particle]:
    """Every occurrence of a particle but its first."""
    seen = set()
    for particle in particles:
        if particle in seen:
            yield particle
        seen.add(particle)


def _groups(reqs: Iterable[Req]) -> list[ParticleGroup]:
    """The distinct groups that `reqs` belong to, in order."""
    return list(dict.fromkeys(own.group for req in reqs if isinstance(own := role(req), Particle)))
