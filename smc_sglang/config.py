"""What a server and a request may choose, validated once.

:class:`SmcConfig` holds the server-wide defaults and limits, :class:`SmcRequest` what a client sent, and
:class:`SmcParams` the two combined: frozen, complete, and the only one that the engine sees.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, model_validator

Mode = Literal["smc", "exact", "off"]
Resampling = Literal["systematic", "stratified", "residual", "multinomial"]
GrammarSemantics = Literal["local", "global"]

MAX_DRAFT_LENGTH = 64  # a block is scored in one pass; past this the pass is compute-bound everywhere
_ENV = "SMC_SGLANG_CONFIG"  # carries the server's SmcConfig into SGLang's child processes, and nothing else


class SmcRequest(BaseModel):
    """The `smc` object of a request. Every field is optional; the server's defaults fill the rest."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode | None = Field(
        None,
        description="`smc`: particles, reweighted and resampled, never rejected. `off`: plain autoregressive "
        "decoding. `exact`: speculative decoding by rejection.",
    )
    n_particles: int | None = Field(None, ge=1, strict=True, description="N, particles of this request.")
    draft_length: int | None = Field(
        None, ge=1, le=MAX_DRAFT_LENGTH, strict=True, description="K, tokens drafted per particle and cycle."
    )
    resample_threshold: float | None = Field(
        None, ge=0, le=1, strict=True, description="tau: resample when ESS < tau * N. 0 = never."
    )
    resampling: Resampling | None = Field(None, description="Resampling scheme; all four are unbiased.")
    power: float | None = Field(None, gt=0, le=100, strict=True, description="alpha: the target density is p~^alpha.")
    grammar_semantics: GrammarSemantics | None = Field(None, description="How a grammar enters the target.")
    max_stream_lag: int | None = Field(None, ge=1, strict=True, description="Most tokens that a stream may hold back.")
    return_particles: StrictBool | None = Field(
        None, description="Report every particle with its weight in the response."
    )


class SmcConfig(BaseModel):
    """Server-wide defaults and limits. Built once (CLI or :class:`smc_sglang.Engine`), then frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = "smc"
    n_particles: int = Field(4, ge=1)
    draft_length: int = Field(8, ge=1, le=MAX_DRAFT_LENGTH)
    resample_threshold: float = Field(0.5, ge=0, le=1)
    resampling: Resampling = "systematic"
    power: float = Field(1.0, gt=0, le=100)
    max_particles: int = Field(64, ge=1, description="Largest n_particles that a request may ask for.")
    max_draft_length: int | None = Field(
        None, ge=1, le=MAX_DRAFT_LENGTH, description="Largest draft_length; default: draft_length."
    )
    draft_int8: bool = Field(False, description="Round the draft's weights to 8 bits (torch CPU platform only).")

    @model_validator(mode="after")
    def _defaults_within_limits(self) -> SmcConfig:
        if self.n_particles > self.max_particles:
            raise ValueError(f"n_particles={self.n_particles} is above max_particles={self.max_particles}")
        if self.draft_length > self.longest_draft:
            raise ValueError(f"draft_length={self.draft_length} is above max_draft_length={self.max_draft_length}")
        return self

    @property
    def longest_draft(self) -> int:
        """The largest K of any request; block buffers are K + 1 tokens wide."""
        return self.max_draft_length or self.draft_length

    def export(self) -> None:
        """Make :meth:`current` return this configuration in this process and in those it starts."""
        os.environ[_ENV] = self.model_dump_json()

    @staticmethod
    def is_exported() -> bool:
        return _ENV in os.environ

    @staticmethod
    def current() -> SmcConfig:
        """The configuration of this server (defaults where none was exported)."""
        return SmcConfig.model_validate_json(os.environ.get(_ENV, "{}"))


class SmcParams(BaseModel):
    """One request's resolved choices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode
    n_particles: int
    draft_length: int
    resample_threshold: float
    resampling: Resampling
    power: float
    grammar_semantics: GrammarSemantics
    max_stream_lag: int | None
    return_particles: bool

    @classmethod
    def resolve(cls, raw: Any, config: SmcConfig) -> SmcParams:
        """Combine a request's `smc` object with the server's defaults.

        Args:
            raw: the client's `smc` value: a JSON object, or None.
        Raises:
            ValueError: one sentence naming the field and its range.
        """
        request = _validated(raw)
        n_particles = _first(request.n_particles, config.n_particles)
        draft_length = _first(request.draft_length, config.draft_length)
        if n_particles > config.max_particles:
            raise ValueError(f"smc.n_particles must be from 1 to {config.max_particles}, got {n_particles}")
        if draft_length > config.longest_draft:
            raise ValueError(f"smc.draft_length must be from 1 to {config.longest_draft}, got {draft_length}")
        return cls(
            mode=_first(request.mode, config.mode),
            n_particles=n_particles,
            draft_length=draft_length,
            resample_threshold=float(_first(request.resample_threshold, config.resample_threshold)),
            resampling=_first(request.resampling, config.resampling),
            power=float(_first(request.power, config.power)),
            grammar_semantics=_first(request.grammar_semantics, "local"),
            max_stream_lag=request.max_stream_lag,
            return_particles=bool(request.return_particles),
        )


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value


def _validated(raw: Any) -> SmcRequest:
    if raw is None:
        return SmcRequest()
    if not isinstance(raw, dict):
        raise ValueError(f"smc must be an object, got {type(raw).__name__}")
    try:
        return SmcRequest.model_validate(raw)
    except ValidationError as error:
        raise ValueError(_one_sentence(error)) from None


def _one_sentence(error: ValidationError) -> str:
    """The first problem of a validation error, as `smc.field: what is wrong`."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = ", ".join(SmcRequest.model_fields)
        return f"smc.{field} is not a known field; known fields: {known}"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"smc.{field}: {message}, got {first['input']!r}"
