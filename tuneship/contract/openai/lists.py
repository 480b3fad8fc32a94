"""Pages of OpenAI's lists: the next page begins behind the id of the last entry."""

from typing import Annotated

from pydantic import Field

PageSize = Annotated[int, Field(ge=1, le=100, description="Entries in one page, 1 to 100.")]
AfterId = Annotated[
    str,
    Field(min_length=1, max_length=128, description="The page begins behind the entry of this id."),
]
