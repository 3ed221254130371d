"""An answer's figures as lines for a person. Pure."""

from kvrelay.cli.client import Handoff, Timings, Usage

_FIRST = (
    ("route", "route_ms"),
    ("prefill queue", "prefill_queue_ms"),
    ("prefill", "prefill_ms"),
    ("first token out", "first_token_out_ms"),
)
_SECOND = (
    ("exposed transfer", "exposed_transfer_ms"),
    ("decode queue", "decode_queue_ms"),
    ("first decode step", "first_decode_step_ms"),
)


def describe(usage: Usage | None, timings: Timings | None, handoff: Handoff | None) -> list[str]:
    """Where the time to the first and to the second token went, and what the hand-off moved."""
    lines = []
    if timings:
        lines.append(f"time to first token   {timings.ttft_ms:8.1f} ms = {_sum(timings, _FIRST)}")
        if timings.second_token_ms:
            lines.append(
                f"time to second token  {timings.second_token_ms:8.1f} ms = first token + {_sum(timings, _SECOND)}"
            )
        lines.append(f"whole answer          {timings.total_ms:8.1f} ms{_rate(usage, timings)}")
    if handoff:
        lines.append(
            f"KV handed over        {handoff.kv_bytes:,} bytes in {_count(handoff.kv_blocks, 'block')}"
            f" over {handoff.transport}, {handoff.prefill_node} -> {handoff.decode_node};"
            f" {_count(handoff.cached_blocks, 'block')} cached there already"
        )
        lines.append(
            f"                      granted in {handoff.grant_ms:.1f} ms, landed {handoff.transfer_ms:.1f} ms later"
        )
    elif timings:
        lines.append("KV handed over        none: one node did both, or the first token was the last")
    return lines


def _sum(timings: Timings, segments: tuple[tuple[str, str], ...]) -> str:
    return " + ".join(f"{name} {getattr(timings, attribute):.1f}" for name, attribute in segments)


def _rate(usage: Usage | None, timings: Timings) -> str:
    if not usage:
        return ""
    shown = f", {usage.prompt_tokens} tokens in ({usage.cached_tokens} cached), {usage.completion_tokens} out"
    decoding_s = (timings.total_ms - timings.ttft_ms) / 1000
    if usage.completion_tokens > 1 and decoding_s > 0:
        shown += f", {(usage.completion_tokens - 1) / decoding_s:.1f} tokens/s after the first"
    return shown


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def one_line(usage: Usage, timings: Timings) -> str:
    """What matters while one talks: speed, the wait, and how much of the conversation was still in a cache."""
    decoding_s = (timings.total_ms - timings.ttft_ms) / 1000
    rate = f"{(usage.completion_tokens - 1) / decoding_s:.1f} tokens/s, " if decoding_s > 0 else ""
    return (
        f"{_count(usage.completion_tokens, 'token')}, {rate}first after {timings.ttft_ms:.0f} ms"
        f" ({usage.prompt_tokens} in, {usage.cached_tokens} cached)"
    )
