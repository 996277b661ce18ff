"""A page that is described once and written twice: as Markdown, and as one HTML file that needs nothing but itself."""

from tfdp_rec.page.page import (
    Block,
    Code,
    Facts,
    Figures,
    Given,
    Items,
    Page,
    Picture,
    Pictures,
    Piece,
    Section,
    Strong,
    Table,
    Text,
    Verbatim,
    Words,
)

__all__ = [
    "Block",
    "Code",
    "Facts",
    "Figures",
    "Given",
    "Items",
    "Page",
    "Picture",
    "Pictures",
    "Piece",
    "Section",
    "Strong",
    "Table",
    "Text",
    "Verbatim",
    "Words",
]
