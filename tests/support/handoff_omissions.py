"""The hand-off's tables with one thing left out, and what the explorer does not notice of that."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, islice

from support.handoff_world import explore

from kvrelay.connector.handoff import SENDER, receiver_table

_NUM_PROCESSES = 2


def omissions(one_sided):
    """Each pair of tables with one row, or one action of a row, left out; and what was left out."""
    base = (SENDER, receiver_table(one_sided))
    for side in (0, 1):
        for row, (state, actions) in base[side].items():
            without = {"row": None} | {a: (state, tuple(x for x in actions if x != a)) for a in actions}
            for what, new in without.items():
                changed = [dict(base[0]), dict(base[1])]
                if new is None:
                    del changed[side][row]
                else:
                    changed[side][row] = new
                yield ("pd"[side], row, what), changed


def missed(one_sided):
    """All omissions that the explorer does not notice; each is looked for by itself, so on all cores."""
    with ProcessPoolExecutor(_NUM_PROCESSES, multiprocessing.get_context("spawn")) as processes:
        parts = processes.map(partial(_missed, one_sided), range(_NUM_PROCESSES))
        return list(chain.from_iterable(parts))


def _missed(one_sided, part):
    mine = islice(omissions(one_sided), part, None, _NUM_PROCESSES)
    return [omission for omission, changed in mine if not explore(one_sided, *changed, to_the_end=False)[1]]
