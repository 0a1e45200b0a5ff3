"""The command line: `smc-sglang serve` and `smc-sglang doctor`.

Nothing of SGLang's is imported before a command runs, so `--help` answers at once.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from smc_sglang.config import MAX_DRAFT_LENGTH, SmcConfig

DEMO_NAME = "smollm2-135m-instruct"
# SGLang's flags that `serve` sets itself -> what to use instead.
_OURS = {
    "--speculative-algorithm": "this server runs SMC and nothing else",
    "--speculative-draft-model-path": "use --draft-model-path",
    "--speculative-draft-model": "use --draft-model-path",
    "--speculative-num-steps": "use --draft-length",
    "--speculative-num-draft-tokens": "use --draft-length",
    "--speculative-eagle-topk": "SMC drafts chains: use --n-particles",
}
_PLUGINS = {"sglang.srt.plugins": "smc", "sglang.srt.platforms": "smc_cpu"}

app = typer.Typer(
    name="smc-sglang",
    help="Sequential Monte Carlo speculative decoding on SGLang.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the `smc-sglang` command."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"smc-sglang {version('smc-sglang')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model_path: Annotated[str | None, typer.Option(help="Target model. Default: the embedded demo.")] = None,
    draft_model_path: Annotated[str | None, typer.Option(help="Draft model, of the same vocabulary.")] = None,
    n_particles: Annotated[int, typer.Option(help="N, particles per request.")] = 4,
    draft_length: Annotated[int, typer.Option(help=f"K, 1 to {MAX_DRAFT_LENGTH} drafted tokens.")] = 8,
    resample_threshold: Annotated[float, typer.Option(help="tau: resample when ESS < tau * N.")] = 0.5,
    max_particles: Annotated[int, typer.Option(help="Most particles that a request may ask for.")] = 64,
    max_draft_length: Annotated[
        int | None, typer.Option(help="Most drafted tokens that a request may ask for. Default: --draft-length.")
    ] = None,
    draft_int8: Annotated[bool, typer.Option("--draft-int8", help="Draft with weights of 8 bits, on a CPU.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 30000,
) -> None:
    """Serve an OpenAI-compatible API. Every other option is SGLang's own and is passed on.

    Without models it serves the embedded demo pair, which needs no download. Ctrl-C or SIGTERM stops it.
    """
    extra = list(context.args)
    for flag, instead in _OURS.items():
        if _given(flag, extra):
            _fail(f"{flag} cannot be used here: {instead}")
    if (model_path is None) != (draft_model_path is None):
        _fail("--model-path and --draft-model-path belong together: give both, or none for the demo pair")
    config = _config(
        n_particles=n_particles,
        draft_length=draft_length,
        resample_threshold=resample_threshold,
        max_particles=max_particles,
        max_draft_length=max_draft_length,
        draft_int8=draft_int8,
    )
    config.export()  # before any process of SGLang's is started
    _serve(config, model_path, draft_model_path, ["--host", host, "--port", str(port), *extra])


def _config(**values: Any) -> SmcConfig:
    try:
        return SmcConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # a rule between fields: it names them
            _fail(first["msg"].removeprefix("Value error, "))
        flag = "--" + str(first["loc"][0]).replace("_", "-")
        _fail(f"{flag} must be {first['msg'].removeprefix('Input should be ')}, got {first['input']}")


def _serve(config: SmcConfig, model: str | None, draft: str | None, arguments: list[str]) -> None:
    # Quiet, with /metrics and cached_tokens, without endless blanks in JSON, and with a cycle for who is decoding
    # between two chunks of another's prompt, unless the user says otherwise: the last of two equal flags counts.
    quiet = [] if _given("--log-level", arguments) else ["--log-level", "warning"]
    if model is None or draft is None:
        model, draft, name = _demo()
        quiet += [] if _given("--served-model-name", arguments) else ["--served-model-name", name]
    argv = ["--model-path", model, "--speculative-algorithm", "SMC", "--speculative-draft-model-path", draft]
    argv += ["--speculative-num-steps", str(config.longest_draft)]
    argv += ["--enable-metrics", "--enable-cache-report", "--constrained-json-max-whitespace-cnt", "16"]
    argv += ["--prefill-decode-interval", "1"]
    argv += [*quiet, *arguments]

    from server.launch import LaunchError, serve

    try:
        serve(argv, lambda server_args: _announce(server_args, config))
    except LaunchError as error:
        _fail(str(error))


def _demo() -> tuple[str, str, str]:
    """(target, draft, served name) of the embedded pair, built on first use."""
    from smc_sglang.demo import DemoError, ensure_demo_pair

    typer.echo("no --model-path given: serving the embedded demo pair (built once, then cached)")
    try:
        pair = ensure_demo_pair()
    except DemoError as error:
        _fail(str(error))
    return str(pair.target), str(pair.draft), DEMO_NAME


def _announce(server_args: Any, config: SmcConfig) -> None:
    typer.echo(
        f"smc-sglang is ready: {server_args.url()}/v1 "
        f"(model {server_args.served_model_name}, N={config.n_particles}, K={config.draft_length})"
    )


def _given(flag: str, arguments: list[str]) -> bool:
    return any(argument == flag or argument.startswith(f"{flag}=") for argument in arguments)


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"smc-sglang: {sentence}", err=True)
    raise typer.Exit(2)


@app.command()
def doctor() -> None:
    """Tell what is installed and whether SMC can run here; exits with 1 if it cannot."""
    for package in ("smc-sglang", "sglang", "torch", "flashinfer-python", "transformers"):
        typer.echo(f"{package:20} {_installed(package)}")
    typer.echo(f"{'device':20} {_device()}")
    typer.echo(f"{'demo pair':20} {_demo_folder()}")
    problems = [
        f"SGLang does not see the plugin {name!r} (entry-point group {group}): reinstall smc-sglang"
        for group, name in _PLUGINS.items()
        if name not in entry_points(group=group).names
    ]
    problems += _hook_problems()
    for problem in problems:
        typer.echo(f"problem: {problem}", err=True)
    typer.echo(f"{'plugin':20} {'not usable' if problems else 'registered, all hooks applied'}")
    raise typer.Exit(1 if problems else 0)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _demo_folder() -> str:
    from smc_sglang.demo import default_cache_dir, is_intact

    built = [str(folder) for folder in default_cache_dir().glob("demo-*") if is_intact(folder)]
    return ", ".join(built) or "not built yet; `smc-sglang serve` without models builds it"


def _hook_problems() -> list[str]:
    import server.quiet  # noqa: F401

    # isort: split
    from sglang.srt.plugins import load_plugins

    from smc_sglang.engine import hooks

    load_plugins()
    return hooks.verify()


if __name__ == "__main__":
    main()
