"""The verb goodput: where the time of a run's slots went, and the money. Reads only.

Must import neither ray nor torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict

import click

from elastic.dashboard.goodput import goodput_text, read_goodput
from elastic.dashboard.text import to_json
from elastic.policy.goodput import money
from elastic.storage.ledger import read_ledger
from elastic.verbs.run_argument import json_option, open_run, reading, run_argument


@click.command(short_help="Where the time of its slots went, in seconds and money.")
@run_argument
@click.option(
    "--price-per-slot-hour",
    "price",
    type=click.FloatRange(min=0),
    metavar="PRICE",
    help="What one worker's place costs an hour, in any currency.",
)
@json_option
def goodput(run: str, price: float | None, as_json: bool) -> None:
    """Every second of every slot that RUN held, in one bucket each, up to its last word.

    A slot is the place of one worker. The buckets add up to the whole; `useful` are the steps that
    count, each once.
    """
    if price is not None and not math.isfinite(price):
        raise click.BadParameter(
            f"expected a finite price, found {price}", param_hint="--price-per-slot-hour"
        )
    with reading(run):
        fs, _ = open_run(run)
        found = read_goodput(fs, read_ledger(fs))
        text = goodput_text(found, price_per_slot_hour=price)
        if as_json:
            costs = None if price is None else money(found, price_per_slot_hour=price)
            told = {"price_per_slot_hour": price, "money": costs}
            text = to_json(asdict(found) | told)
    click.echo(text)
