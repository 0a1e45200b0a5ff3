"""Runs SGLang's server, with our app, from its command-line arguments to its end."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import server.quiet  # noqa: F401  SGLang's child processes import this module before SGLang

# isort: split
from sglang.srt.entrypoints.engine import run_detokenizer_process, run_scheduler_process
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils import kill_process_tree

from server.app import build


class LaunchError(ValueError):
    """The server cannot start as asked; one sentence."""


def serve(argv: Sequence[str], ready: Callable[[Any], None]) -> None:
    """Run the server until it is told to stop; all of its processes have ended on return.

    Args:
        argv: SGLang's command-line arguments.
        ready: called with SGLang's `ServerArgs` once the server is warm.
    Raises:
        LaunchError: SGLang or the plugin refuses the arguments.
    """
    load_plugins()
    check_options(argv)
    try:
        server_args = prepare_server_args(list(argv))
        server_args.resolve_once()
    except (ValueError, AssertionError, RuntimeError, OSError) as error:  # OSError: no such model
        raise LaunchError(str(error).strip().partition("\n")[0]) from error
    if server_args.tokenizer_worker_num > 1:
        raise LaunchError("--tokenizer-worker-num must be 1: the smc object is handled in one HTTP process")
    build()
    try:
        launch_server(
            server_args,
            run_scheduler_process_func=run_scheduler,
            run_detokenizer_process_func=run_detokenizer,
            launch_callback=lambda: ready(server_args),
        )
    except KeyboardInterrupt:
        pass  # Ctrl-C is how a server in a terminal is stopped
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def check_options(argv: Sequence[str]) -> None:
    """Refuse, in one sentence, what SGLang's parser would answer with its usage of hundreds of lines.

    Abbreviated options are refused as well: one could stand for one that `smc-sglang serve` sets itself.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    try:
        _, unknown = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise LaunchError(str(error)) from error
    if unknown:
        raise LaunchError(f"{unknown[0]} is neither an option of smc-sglang serve nor of SGLang")


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    _leave_interrupts_to_the_parent()
    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    _leave_interrupts_to_the_parent()
    run_detokenizer_process(*args, **kwargs)


def _leave_interrupts_to_the_parent() -> None:
    """A terminal's Ctrl-C reaches every process of the group. A child that dies of it looks like a crash to
    SGLang's watchdog, which then kills the parent in the middle of its shutdown."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
