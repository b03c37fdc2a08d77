# SPDX-License-Identifier: Apache-2.0
"""The command line, `python -m kda`: one module a command.

A command module has `HELP`, `add_arguments(parser)` and `run(args) -> exit status`, and imports torch only in
`run`, so that help and usage errors come at once.
"""
from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = ("doctor", "demo", "compile", "tune", "bench")


class CommandError(Exception):
    """What the user can put right: one sentence on stderr, exit status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kda", description="Kimi Delta Attention kernels.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"kda.cli.{name}")
        sub = subparsers.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except CommandError as e:
        print(f"python -m kda {args.command}: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 1
