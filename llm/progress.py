"""The bar over a list of prompts: where somebody looks, on a terminal or in a notebook, and nowhere else."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvrelay.llm.outputs import RequestOutput

Advance = Callable[[RequestOutput], None]
MakeBar = Callable[..., Any]  # tqdm, or what takes its arguments


@contextmanager
def progress(num_prompts: int, use_tqdm: bool | MakeBar) -> Iterator[Advance]:
    """Call what it yields with each prompt that is done. `use_tqdm`: a tqdm class of the caller's shows it anyhow."""
    make_bar = _default_bar() if isinstance(use_tqdm, bool) else use_tqdm
    if not use_tqdm or make_bar is None:
        yield lambda done: None
        return
    num_tokens, started_at = 0, time.monotonic()
    with make_bar(total=num_prompts, desc="Processed prompts", unit="prompt", dynamic_ncols=True) as bar:

        def advance(done: RequestOutput) -> None:
            nonlocal num_tokens
            num_tokens += done.usage.completion_tokens
            rate = num_tokens / max(1e-9, time.monotonic() - started_at)
            bar.set_postfix_str(f"{rate:.0f} output tokens/s", refresh=False)
            bar.update()

        yield advance


def _default_bar() -> MakeBar | None:
    """The notebook's own in a notebook; the plain one on a terminal; else none."""
    from tqdm import tqdm  # not before a list of prompts runs
    from tqdm.asyncio import tqdm_asyncio
    from tqdm.auto import tqdm as chosen

    if chosen is not tqdm_asyncio:  # tqdm has found itself in a notebook that can draw it
        return chosen
    return tqdm if sys.stderr is not None and sys.stderr.isatty() else None
