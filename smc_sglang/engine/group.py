"""What the engine keeps beside SGLang's `Req`s: one role object per request, in `req.smc`.

* :class:`Solo`: an ordinary request (mode `off`, or temperature 0). One row, no weights.
* :class:`ParticleGroup`: a client's SMC request. Its `Req`, the parent, is prefilled once and then waits outside
  every batch, without KV, while its particles decode; only the parent is ever streamed.
* :class:`Particle`: one member of a group; its `Req` is an ordinary row of the decode batch.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req

from smc_sglang.config import SmcParams
from smc_sglang.engine import logprobs
from smc_sglang.engine.grammar import forked
from smc_sglang.engine.reasoning import ReasoningCount
from smc_sglang.smc.rng import invert_cdf
from smc_sglang.smc.weights import Weights

if TYPE_CHECKING:
    from smc_sglang.engine.coordinator import Coordinator

_NO_WORD = "The grammar cannot go on: it allows none of the tokens in the model's vocabulary."


@dataclass(eq=False)
class Solo:
    """An ordinary row: `draft_length` 0 is plain autoregressive decoding."""

    params: SmcParams
    seed: int
    draft_length: int

    def report(self, req: Req) -> dict[str, Any]:
        """The response's `smc` object."""
        cycles = req.spec_verify_ct
        return {
            "mode": "exact" if self.draft_length else "off",
            "n_particles": 1,
            "draft_length": self.draft_length,
            "cycles": cycles,
            "resamples": 0,
            "mean_ess": 1.0,
            "log_z": None,
            "fallbacks": 0,
            "tokens_per_cycle": len(req.output_ids_through_stop) / max(cycles, 1),
            "kv_saved": 0.0,
            "kv_tokens_peak": len(req.origin_input_ids) + len(req.output_ids),
            "shrinks": 0,
            "retractions": req.retraction_count,
        }


@dataclass(eq=False)
class Particle:
    """Particle `index` of `group`; its tokens, finish state and KV are its `Req`'s."""

    group: ParticleGroup
    index: int
    req: Req

    @property
    def finished(self) -> bool:
        return bool(self.req.finished())

    @property
    def tokens(self) -> array[int]:
        """Output tokens up to and with the finishing one."""
        return self.req.output_ids_through_stop

    def start_grammar(self, grammar: Any) -> None:
        """Take over a grammar that has accepted all tokens but the last."""
        self.req.grammar = grammar
        try:
            grammar.accept_token(self.req.output_ids[-1])
        except ValueError:
            self.req.to_finish = FINISH_ABORT(_NO_WORD, HTTPStatus.BAD_REQUEST)

    def become(self, other: Particle) -> None:
        """Copy the host state of `other`; its KV is :meth:`radix_patch.ParticleTree.move`'s."""
        req, source = self.req, other.req
        req.output_ids = array("q", source.output_ids)
        logprobs.inherit(req, source, 0)
        req.full_untruncated_fill_ids = array("q")  # append-only by contract: force a rebuild
        req.finished_reason, req.finished_len = source.finished_reason, source.finished_len
        req.skip_radix_cache_insert = source.skip_radix_cache_insert
        req.grammar = None if source.grammar is None else forked(source.grammar, source.output_ids)


@dataclass
class Diagnostics:
    """What a request's `smc` report is made of."""

    cycles: int = 0
    resamples: int = 0
    fallbacks: int = 0
    shrinks: int = 0
    ess: list[float] = field(default_factory=list)
    kv_saved: list[float] = field(default_factory=list)
    kv_tokens_peak: int = 0


@dataclass(eq=False)
class ParticleGroup:
    """One client request, its particles and its weights."""

    coordinator: Coordinator
    parent: Req
    params: SmcParams
    seed: int
    particles: list[Particle] = field(default_factory=list)
    weights: Weights | None = None  # [n_particles], while particles exist
    log_z: float | None = 0.0  # None: there is no estimate
    speaking: bool = False  # the parent may be streamed
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    final_particles: list[dict[str, Any]] | None = None
    client_params: Any = None  # SGLang's SamplingParams as the client sent them
    prefilled_at: int = 0  # the parent's output tokens when it was last queued
    grammar: Any = None  # SGLang's grammar object, in the state after the parent's output tokens
    reasoning: ReasoningCount = field(default_factory=ReasoningCount)

    def __post_init__(self) -> None:
        self.client_params = self.parent.sampling_params
        if self.params.mode == "exact":
            self.log_z = None

    # -- the parent's two lives --------------------------------------------------------------------------

    def queue(self) -> None:
        """Prepare the parent for SGLang's queue: it asks for the whole population's KV and never finishes by
        itself, since whether x_0 finishes is each particle's own affair.
        """
        population = copy.copy(self.client_params)
        spoken = len(self.parent.output_ids)
        per_particle = self.client_params.max_new_tokens - spoken + 1  # its last block may reach one beyond
        population.max_new_tokens = spoken + self.params.n_particles * per_particle + 1
        population.ignore_eos = True
        population.stop_strs, population.stop_regex_strs = [], []
        self.parent.sampling_params = population
        self.prefilled_at = len(self.parent.output_ids)

    def take_grammar(self) -> None:
        """Keep the parent's grammar from SGLang, which would advance it over a first token that is only one
        particle's."""
        if self.parent.grammar is not None:
            self.grammar, self.parent.grammar = self.parent.grammar, None

    @property
    def prefill_is_complete(self) -> bool:
        """Whether the parent's last prefill chunk has run (it then has one token more than when queued)."""
        return len(self.parent.output_ids) > self.prefilled_at

    def fork(
        self, first_tokens: list[int], log_weights: torch.Tensor, first_logprobs: list[float] | None = None
    ) -> None:
        """Create the particles after the parent's prefill.

        Args:
            first_tokens: the token that each particle starts with (x_0, or the bonus after a retraction).
            log_weights: float64 [n_particles].
            first_logprobs: of these tokens, where the client wants to know.
        """
        parent = self.parent
        parent.sampling_params = self.client_params
        prefix = parent.output_ids[:-1]
        self.particles = [
            Particle(self, index, self._particle_req(index, array("q", [*prefix, token])))
            for index, token in enumerate(first_tokens)
        ]
        for particle in self.particles:
            particle.req.smc = particle
            if self.grammar is not None:
                particle.start_grammar(forked(self.grammar, prefix))
        self.weights = Weights(log_weights)
        if parent.return_logprob and first_logprobs is not None:
            for particle, log_prob in zip(self.particles, first_logprobs, strict=True):
                logprobs.inherit(particle.req, parent, 0)
                own = particle.req.logprob
                own.output_token_logprobs_val[-1], own.output_token_logprobs_idx[-1] = log_prob, particle.tokens[-1]
            logprobs.inherit(parent, parent, len(prefix), len(prefix))
        parent.output_ids = prefix

    def _particle_req(self, index: int, output_ids: array[int]) -> Req:
        parent = self.parent
        req = Req(
            rid=f"{parent.rid}#{index}",
            origin_input_text="",
            origin_input_ids=parent.origin_input_ids,
            sampling_params=self.client_params,
            eos_token_ids=parent.eos_token_ids,
            vocab_size=parent.vocab_size,
            extra_key=parent.extra_key,
            cache_salt=parent.cache_salt,
            priority=parent.priority,
            return_logprob=parent.return_logprob,
            top_logprobs_num=parent.logprob.top_logprobs_num,
            token_ids_logprob=parent.logprob.token_ids_logprob,
        )
        req.tokenizer = parent.tokenizer
        req.output_ids = output_ids
        return req

    def add_log_z(self, increment: float | None) -> None:
        """Take in a factor of Z^; None, once and for all, where there is none."""
        self.log_z = None if self.log_z is None or increment is None else self.log_z + increment

    # -- state -------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[Particle]:
        return [particle for particle in self.particles if not particle.finished]

    @property
    def length(self) -> int:
        """Output tokens of the longest particle."""
        return max(len(particle.tokens) for particle in self.particles)

    def twins(self, position: int) -> list[Particle]:
        """Live particles whose first `position` output tokens are also those of another live one."""
        # What all agree on need not be compared.
        agreed = len(self.parent.output_ids)
        alike: dict[bytes, list[Particle]] = {}
        for particle in self.live:
            alike.setdefault(particle.req.output_ids[agreed:position].tobytes(), []).append(particle)
        return [particle for particles in alike.values() if len(particles) > 1 for particle in particles]

    def renew(self, particles: list[Particle]) -> None:
        """Go on with these particles only, counted anew."""
        for index, particle in enumerate(particles):
            particle.index = index
        self.particles = particles

    @property
    def all_finished(self) -> bool:
        return all(particle.finished for particle in self.particles)

    @property
    def abort_reason(self) -> FINISH_ABORT | None:
        """Set once a particle was aborted: the client's abort, or an error."""
        reasons = (particle.req.finished_reason for particle in self.particles)
        return next((reason for reason in reasons if isinstance(reason, FINISH_ABORT)), None)

    def agree(self) -> int:
        """Extend the parent's tokens by what all particles agree on; returns how many were added.

        What all particles share they inherit, so it never changes again: it can be streamed.
        """
        agreed = self.parent.output_ids
        start = len(agreed)
        tails = [particle.tokens[start:] for particle in self.particles]
        agreed.extend(tails[0][: _agreement(tails)])
        logprobs.inherit(self.parent, self.particles[0].req, start, len(agreed))
        return len(agreed) - start

    def adopt_answer(self, chosen: Particle) -> None:
        """The parent takes over the tokens and the finish state of the particle that was drawn."""
        parent = self.parent
        logprobs.inherit(parent, chosen.req, len(parent.output_ids))
        parent.output_ids.extend(chosen.req.output_ids[len(parent.output_ids) :])
        parent.finished_reason = chosen.req.finished_reason
        parent.finished_len = chosen.req.finished_len
        self.grammar = chosen.req.grammar

    def describe_particles(self) -> list[dict[str, Any]]:
        """All particles with their weights, for `return_particles`."""
        assert self.weights is not None
        weights = self.weights.normalized.tolist()
        log_weights = self.weights.log_weights.tolist()
        return [
            {
                "text": self._text(particle),
                "output_ids": list(particle.tokens),
                "log_weight": log_weight if math.isfinite(log_weight) else None,
                "weight": weight,
                "finish_reason": particle.req.finished_reason.to_json() if particle.finished else None,
            }
            for particle, weight, log_weight in zip(self.particles, weights, log_weights, strict=True)
        ]

    def _text(self, particle: Particle) -> str | None:
        if self.parent.tokenizer is None:
            return None
        return self.parent.tokenizer.decode(
            list(particle.tokens), skip_special_tokens=self.client_params.skip_special_tokens
        )

    def report(self, req: Req) -> dict[str, Any]:
        """The response's `smc` object (design.md's response fields)."""
        diagnostics = self.diagnostics
        report = {
            "mode": self.params.mode,
            "n_particles": self.params.n_particles,
            "draft_length": self.params.draft_length,
            "cycles": diagnostics.cycles,
            "resamples": diagnostics.resamples,
            "mean_ess": _mean(diagnostics.ess, default=float(self.params.n_particles)),
            "log_z": self.log_z,
            "fallbacks": diagnostics.fallbacks,
            "tokens_per_cycle": len(req.output_ids_through_stop) / max(diagnostics.cycles, 1),
            "kv_saved": _mean(diagnostics.kv_saved, default=0.0),
            "kv_tokens_peak": diagnostics.kv_tokens_peak,
            "shrinks": diagnostics.shrinks,
            "retractions": req.retraction_count,
        }
        if self.final_particles is not None:
            report["particles"] = self.final_particles
        return report


def lineage(
    streams: Sequence[array[int]], weights: torch.Tensor, limit: int, uniform: Callable[[int], torch.Tensor]
) -> torch.Tensor | None:
    """Which particles to go on with so that at most `limit` tokens are held back; None where all may stay.

    Args:
        streams: each particle's tokens; what they have in common at their beginning is not held back.
        weights: W_i, [n_particles].
        uniform: float64 [1] by position: where the kept streams differ, the continuation is drawn by its total weight.
    Returns:
        bool [n_particles]: a set that was drawn with probability sum W_i.
    """
    kept = torch.ones_like(weights, dtype=torch.bool)
    while True:
        left = [stream for stream, stays in zip(streams, kept.tolist(), strict=True) if stays]
        at = _agreement(left)
        if max(map(len, left)) - at <= limit:
            return None if len(left) == len(streams) else kept
        drawn = streams[int(invert_cdf(weights.masked_fill(~kept, 0.0), uniform(at)))]
        # A particle may also end here.
        kept &= torch.tensor([stream[at : at + 1] == drawn[at : at + 1] for stream in streams])


def _agreement(streams: Sequence[array[int]]) -> int:
    """Length of the longest common prefix."""
    length = min(map(len, streams))
    first = streams[0]
    return next((i for i in range(length) if any(stream[i] != first[i] for stream in streams)), length)


def _mean(values: list[float], default: float) -> float:
    return sum(values) / len(values) if values else default


def role(req: Req) -> Solo | Particle | ParticleGroup | None:
    """What `req` is to the engine; None for a request that SGLang made outside our admission."""
    return getattr(req, "smc", None)


def block_width(req: Req) -> int:
    """W = K + 1, the KV slots that the next block of a decoding row fills: its pending token and K drafted ones.

    Nothing is drafted past max_new_tokens, so nothing is written past the context either. A row that drafts drafts
    at least one token: that pass also gives the pending token its draft KV.
    """
    match role(req):
        case Particle(group=group):
            draft_length = group.params.draft_length
        case Solo(draft_length=draft_length):
            pass
        case _:
            draft_length = 0
    remaining = req.sampling_params.max_new_tokens - len(req.output_ids)
    return min(draft_length, max(remaining - 1, 1)) + 1
