"""Requests with any parameters, in any mixture."""

import random
from dataclasses import replace

from support.oracle import make_request, random_prompt

from kvrelay.engine.request import Request, StructuredKind, StructuredOutput
from kvrelay.proto import inference_pb2 as pb

FORMS = (
    StructuredOutput.json_object(),
    StructuredOutput.json_schema(
        '{"type":"object","properties":{"a":{"type":"integer"},"b":{"enum":["x","yz"]}},'
        '"required":["a","b"],"additionalProperties":false}',
    ),
    StructuredOutput.regex("[a-f]{2,9}( and [g-m]{1,5})?"),
    StructuredOutput.choice(["yes", "yes, of course", "no", "größer"]),
    StructuredOutput.grammar('start: "(" start ")" | /[0-9]{1,3}/'),
)


def random_request(rng: random.Random, number: int) -> Request:
    """Any parameters, in any mixture."""
    ids = range(256)
    request = make_request(
        random_prompt(rng.choice([1, 5, 16, 17, 40, 64, 65]), seed=rng.randrange(3)),
        f"random-{number}",
        max_tokens=rng.randint(1, 24),
        min_tokens=rng.choice([0, 0, 1]),
        seed=rng.randrange(2**64),
        temperature=rng.choice([0.0, 5e-324, 1e-5, 0.3, 1.0, 4.0]),
        top_k=rng.choice([0, 0, 1, 20]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.95]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        presence_penalty=rng.choice([0.0, 1.5, -1.0]),
        frequency_penalty=rng.choice([0.0, 0.7, -0.5]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        logit_bias=tuple((token_id, rng.uniform(-9, 9)) for token_id in rng.sample(ids, rng.choice([0, 0, 5]))),
        bad_word_ids=tuple(tuple(rng.sample(ids, rng.randint(1, 2))) for _ in range(rng.choice([0, 0, 8]))),
        stop_token_ids=tuple(rng.sample(ids, rng.choice([0, 0, 20]))),
        ignore_eos=rng.choice([True, False]),
        logprobs=rng.choice([None, None, 0, 5]),
        prompt_logprobs=rng.choice([None, None, 0, 2]),
        n=rng.choice([1, 1, 2, 3]),
        priority=rng.choice([0, 0, 1]),
    )
    return with_form(request, rng.choice(FORMS)) if rng.random() < 0.25 else request


def with_form(request: Request, form: StructuredOutput) -> Request:
    """It ends when its form says so; and a few bad words may forbid all that the form allows."""
    sampling = replace(request.sampling, structured_output=form, min_tokens=0, ignore_eos=False, bad_word_ids=())
    return replace(request, sampling=sampling)


def as_form(form: StructuredOutput | None) -> pb.StructuredOutput | None:
    """As gRPC's clients send it."""
    if form is None:
        return None
    if form.kind is StructuredKind.JSON_OBJECT:
        return pb.StructuredOutput(json_object=pb.JsonObject())
    if form.kind is StructuredKind.CHOICE:
        return pb.StructuredOutput(choice=pb.Choices(choices=form.choices))
    return pb.StructuredOutput(**{form.kind: form.specification})
