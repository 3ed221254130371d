"""How byte-level tokenizers split text before they merge, by the names that GGUF has for it (tokenizer.ggml.pre).

GGUF names the splitting and does not spell it. What a name stands for is what the tokenizer.json of the models under
that name has. A name that is not here is refused: with another splitting a model reads token ids that it has not seen
in training, and nothing else shows it.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers as pre

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

# Words that end where upper case follows lower case.
_NOT_LOWER, _NOT_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_BEFORE}{_NOT_LOWER}*{_NOT_UPPER}+|{_BEFORE}{_NOT_LOWER}+{_NOT_UPPER}*|\p{{N}}|{_PATHS}|{_SPACES}"
_GPT4O = (
    rf"{_BEFORE}{_NOT_LOWER}*{_NOT_UPPER}+{_CONTRACTIONS}?|{_BEFORE}{_NOT_LOWER}+{_NOT_UPPER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """What goes before byte-level merging."""

    patterns: tuple[str, ...] = ()  # each cuts what the one before has left
    gpt2: bool = False  # and GPT-2's own pattern comes last
    single_digits: bool = False  # come first
    nfc: bool = False
    ignore_merges: bool = False  # a whole word that is a token needs none
    adds_bos: bool = False  # where the file does not say

    @property
    def normalizer(self) -> Any | None:
        return normalizers.NFC() if self.nfc else None

    @property
    def pre_tokenizer(self) -> Any:
        steps: list[Any] = [pre.Digits(individual_digits=True)] if self.single_digits else []
        steps += [pre.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        steps.append(pre.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=self.gpt2))
        return steps[0] if len(steps) == 1 else pre.Sequence(steps)


_GPT2 = Splitting(gpt2=True)
_DIGITS = Splitting(single_digits=True, gpt2=True)
_LLAMA_BPE = Splitting(patterns=(_LLAMA3,), ignore_merges=True, adds_bos=True)

SPLITTINGS: dict[str, Splitting] = {
    "command-r": Splitting(single_digits=True, gpt2=True, nfc=True),
    "dbrx": Splitting(patterns=(_LLAMA3,)),
    "deepseek-coder": Splitting(patterns=_DEEPSEEK_CODER),
    "deepseek-r1-qwen": Splitting(patterns=(_QWEN2,), nfc=True),
    "gpt-2": _GPT2,
    "gpt-4o": Splitting(patterns=(_GPT4O,)),
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "megrez": Splitting(patterns=(_QWEN2,), nfc=True),
    "mpt": Splitting(gpt2=True, nfc=True),
    "olmo": Splitting(gpt2=True, nfc=True),
    "phi-2": _GPT2,
    "qwen2": Splitting(patterns=(_QWEN2,), nfc=True),
    "refact": _DIGITS,
    "seed-coder": Splitting(patterns=(_SEED,)),
    "smaug-bpe": Splitting(patterns=(_LLAMA3,)),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": Splitting(patterns=(_TEKKEN,), ignore_merges=True, adds_bos=True),
}
