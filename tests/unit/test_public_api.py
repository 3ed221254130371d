"""What clients can say: a list that grows only on purpose."""

from kvrelay.proto import inference_pb2

GENERATE = {
    "request_id", "model", "text", "token_ids", "chat", "sampling", "priority", "timeout_s", "cache_salt", "trace",
    "stream",
}  # fmt: skip
SAMPLING = {
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logit_bias",
    "logprobs", "prompt_logprobs", "bad_words", "n", "skip_special_tokens", "structured_output",
}  # fmt: skip


def test_clients_can_set_these_fields_and_no_others() -> None:
    """E04: nothing of what passes between router and nodes (addresses, epochs, transfers, attempts) is among them."""
    assert set(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) == GENERATE
    assert set(inference_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == SAMPLING
