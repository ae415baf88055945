"""GS603: packed documents that see each other."""

from collections.abc import Iterator

from gradsight.health.registry import Advice, Asked, Fact, check
from gradsight.health.window import Window


@check(
    "GS603",
    "packed documents see each other",
    "critical",
    asked=Asked(when="first", needs=("first step",)),
    advice=Advice(
        recommendation=(
            "Several documents lie in one row, and the outputs of one depend on another: give "
            "the attention a mask of blocks, or the lengths to a kernel that takes them; "
            "positions that start again do not keep documents apart."
        ),
        fix="""
# in the model: let a token attend to earlier tokens of its own document
# documents: [rows, time], the number of each token's document
# (nn.MultiheadAttention takes the opposite mask: there True hides)
def attend(query, key, value, documents):
    same = documents[:, :, None] == documents[:, None, :]
    mask = same & torch.ones_like(same).tril()
    attention = F.scaled_dot_product_attention
    return attention(query, key, value, attn_mask=mask[:, None])
""",
    ),
)
def documents_mixed(window: Window, *, ratio: float = 1e-3) -> Iterator[Fact]:
    """Documents that are packed into one row see each other.

    Why: a document is continued from a stranger, and what is learned depends on how they were
    packed. Judged only where the script says that rows are packed: positions that start again,
    or ids of documents.
    """
    first = window.now.signals.first
    leak = None if first is None else first.documents
    if leak is not None and leak.ratio > ratio:
        yield Fact(leak.example)
