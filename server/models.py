"""The response object `smc`, and the body of `GET /v1/smc/config`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field

from smc_sglang.config import Mode, Resampling, SmcConfig


class SmcParticle(BaseModel):
    """One particle of a group, as it was when the answer was drawn."""

    text: str | None = Field(description="The particle's text; null where the server runs without a tokenizer.")
    output_ids: list[int]
    log_weight: float | None = Field(description="log w since the last resampling; null is minus infinity.")
    weight: float = Field(ge=0, le=1, description="W: the probability with which this particle is the answer.")
    finish_reason: dict[str, Any] | None = Field(description="As in `meta_info.finish_reason`; null: cut.")


class SmcReport(BaseModel):
    """How an answer came about: `smc` at the top level of a response.

    One object when the response has one choice, else a list in the order of the choices. In a stream it is on
    the last data event before `[DONE]`; on `/generate` it is `meta_info.smc`.
    """

    mode: Mode = Field(description="What ran: temperature 0 always runs as `exact` or `off`.")
    n_particles: int = Field(ge=1, description="N.")
    draft_length: int = Field(ge=0, description="K.")
    cycles: int = Field(ge=0, description="Scoring passes of the target.")
    resamples: int = Field(ge=0, description="Cycles that ended with a resampling.")
    mean_ess: float = Field(description="Mean effective sample size over the cycles, before resampling.")
    log_z: float | None = Field(description="Estimate of the log normalising constant; null where there is none.")
    fallbacks: int = Field(ge=0, description="Blocks that were redone exactly, since no particle was possible.")
    tokens_per_cycle: float = Field(description="Tokens of the answer per scoring pass.")
    kv_saved: float = Field(description="Share of the particles' KV that is shared instead of copied.")
    kv_tokens_peak: int = Field(ge=0, description="Most KV slots that the request held, blocks in flight included.")
    shrinks: int = Field(ge=0, description="How often KV pressure made the group smaller.")
    retractions: int = Field(ge=0, description="How often it was taken out of the batch and prefilled again.")
    particles: list[SmcParticle] | None = Field(default=None, description="With `return_particles` only.")


class SmcDefaults(BaseModel):
    """What a request gets that does not say otherwise."""

    mode: Mode
    n_particles: int
    draft_length: int
    resample_threshold: float
    resampling: Resampling
    power: float


class SmcLimits(BaseModel):
    """The largest values that a request may ask for; the smallest are 1."""

    n_particles: int
    draft_length: int


class SmcServerConfig(BaseModel):
    """`GET /v1/smc/config`."""

    object: Literal["smc.config"] = "smc.config"
    model: str = Field(description="The name that requests use.")
    draft_model: str | None
    modes: list[Mode]
    resampling: list[Resampling]
    defaults: SmcDefaults
    limits: SmcLimits
    versions: dict[str, str]

    @classmethod
    def of(cls, config: SmcConfig, model: str, draft_model: str | None) -> SmcServerConfig:
        """
        Args:
            model: the served model's name.
            draft_model: repository or local directory; of a directory only the last part is told.
        """
        if draft_model is not None and Path(draft_model).is_dir():
            draft_model = Path(draft_model).name
        return cls(
            model=model,
            draft_model=draft_model,
            modes=list(get_args(SmcConfig.model_fields["mode"].annotation)),
            resampling=list(get_args(Resampling)),
            defaults=SmcDefaults.model_validate(config.model_dump(include=set(SmcDefaults.model_fields))),
            limits=SmcLimits(n_particles=config.max_particles, draft_length=config.longest_draft),
            versions={name: version(name) for name in ("smc-sglang", "sglang", "torch")},
        )


class OpenAIError(BaseModel):
    """The `error` object of every response with a status of 400 or more."""

    message: str = Field(description="One sentence that names the field and its range.")
    type: Literal["invalid_request_error", "server_error"]
    param: str | None = Field(description="The field.")
    code: str | None = Field(description="Such as `model_not_found` or `invalid_api_key`.")


class OpenAIErrorBody(BaseModel):
    """Body of every response with a status of 400 or more."""

    error: OpenAIError
