"""Types and LoRA adapters as they are written on the command line; torch is not needed to tell."""

from dataclasses import dataclass

from gradsight.errors import UsageError

TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LORA_FORM = "r=16, or r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj,dtype=bf16"


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters of low rank on a frozen model; the defaults are PEFT's."""

    r: int
    alpha: int = 8
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """Names of the modules that get one; none: those that PEFT has for the model's kind."""
    dtype: str = "fp32"
    """Of the adapters, whatever the frozen model has."""


def parse_lora(text: str) -> Lora:
    """Adapters as they are written on the command line.

    >>> parse_lora("r=16,targets=q_proj+v_proj")
    Lora(r=16, alpha=8, dropout=0.0, targets=('q_proj', 'v_proj'), dtype='fp32')
    """
    given = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in ("r", "alpha", "dropout", "targets", "dtype"):
            raise UsageError(
                f"--lora {text}: {part.strip()!r} is not understood; write {LORA_FORM}"
            )
        given[name] = value.strip()
    try:
        lora = Lora(
            r=int(given["r"]),
            alpha=int(given.get("alpha", 8)),
            dropout=float(given.get("dropout", 0)),
            targets=tuple(name for name in given.get("targets", "").split("+") if name),
            dtype=given.get("dtype", "fp32"),
        )
    except (KeyError, ValueError):
        raise UsageError(f"--lora {text} is not understood; write {LORA_FORM}") from None
    if lora.r < 1 or not 0 <= lora.dropout < 1 or lora.dtype not in TYPES:
        raise UsageError(
            f"--lora {text}: r must be 1 or more, dropout at least 0 and below 1, and dtype one of "
            f"{', '.join(TYPES)}"
        )
    return lora
