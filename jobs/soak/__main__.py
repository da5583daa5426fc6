"""The command line of the soaks: `python -m jobs.soak submits --count 20 --json PATH`."""

from __future__ import annotations

import argparse
import random
import sys
from typing import Any

from jobs import json_flag


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 all went well every time, 1 something did not, 2 wrong usage."""
    arguments = _parser().parse_args(argv)
    if arguments.seed is not None:
        _say(f"seed {arguments.seed}")
    found: dict[str, Any] = arguments.soak(arguments)
    json_flag.write(found, arguments.json, _say)
    for failure in found["failures"]:
        _say(f"failed: {failure}")
    _say(f"{len(found['failures'])} failures")
    return 1 if found["failures"] else 0


def _submits(arguments: argparse.Namespace) -> dict[str, Any]:
    from jobs.soak import submits

    return submits.soak(arguments.count, arguments.seed, _say)


def _reforms(arguments: argparse.Namespace) -> dict[str, Any]:
    from jobs.soak import reforms

    return reforms.soak(arguments.count, arguments.seed, _say)


def _drains(arguments: argparse.Namespace) -> dict[str, Any]:
    from jobs.soak import drains

    return drains.soak(
        arguments.count,
        arguments.seed,
        _say,
        deadline_s=arguments.deadline,
        save_takes_s=arguments.save_takes,
    )


def _storage(arguments: argparse.Namespace) -> dict[str, Any]:
    from jobs.soak import storage

    return storage.soak(arguments.saves, arguments.seed, _say)


def _alarms(arguments: argparse.Namespace) -> dict[str, Any]:
    from jobs.soak import alarms

    return alarms.soak(arguments.minutes, _say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jobs.soak", description=__doc__)
    soaks = parser.add_subparsers(required=True, metavar="SOAK")
    for name, soak, count, what in (
        ("submits", _submits, 20, "two submissions of one name at once, through two clusters"),
        (
            "reforms",
            _reforms,
            50,
            "re-forms in a row, and what the surviving process gains by them",
        ),
        ("drains", _drains, 20, "nodes told to go, one after the other, and what each costs"),
    ):
        one = soaks.add_parser(name, help=what, description=what)
        one.add_argument("--count", type=_count, default=count, help="how many times")
        one.add_argument("--seed", type=int, default=random.randrange(2**32))
        json_flag.add_to(one)
        one.set_defaults(soak=soak)
        if name == "drains":
            _add_times(one)
    what = "saves on storage that fails at random: what is called complete, and what is lost"
    storage = soaks.add_parser("storage", help=what, description=what)
    storage.add_argument("--saves", type=_count, default=1000, help="how many")
    storage.add_argument("--seed", type=int, default=random.randrange(2**32))
    json_flag.add_to(storage)
    storage.set_defaults(soak=_storage)
    what = "a run that nothing happens to, on a busy machine: what is taken for a failure"
    alarms = soaks.add_parser("alarms", help=what, description=what)
    alarms.add_argument("--minutes", type=float, default=10.0)
    json_flag.add_to(alarms)
    alarms.set_defaults(soak=_alarms, seed=None)
    return parser


def _add_times(parser: argparse.ArgumentParser) -> None:
    what = "seconds from the notice to the end of the node"
    parser.add_argument("--deadline", type=_count, default=30, metavar="S", help=what)
    what = "seconds that each save takes on slow storage; more than the deadline is allowed"
    parser.add_argument("--save-takes", type=float, default=0.0, metavar="S", help=what)


if __name__ == "__main__":
    sys.exit(main())
