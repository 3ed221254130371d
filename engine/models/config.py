"""What kind of decoder a checkpoint's config.json describes, or why it is one that we do not build.

Nothing is guessed: an architecture, an activation, a rope type or a setting that is not known here is refused by name,
since ignoring it would load and then answer nonsense.
"""

from kvrelay.engine.errors import ModelError
from kvrelay.engine.models.families import FAMILIES
from kvrelay.engine.models.hf_config import ConfigReader, HfConfig
from kvrelay.engine.models.options import DecoderConfig


def is_known(hf: HfConfig) -> bool:
    """Whether the decoder knows the architecture; it may still refuse a setting."""
    return _architecture(hf) in FAMILIES


def decoder_config(hf: HfConfig) -> DecoderConfig:
    """Raises: ModelError, naming the architecture or setting that is not supported or not plausible."""
    architecture = _architecture(hf)
    if architecture not in FAMILIES:
        raise ModelError(f"architecture {architecture} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    reader = ConfigReader(hf)
    config = FAMILIES[architecture](reader)
    reader.refuse_unread()
    return config


def _architecture(hf: HfConfig) -> str:
    named = hf.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "none named"
