"""The statements about the model of a release, and which of them must be made: `model_card` of the release file.

Its errors name fields and never show a statement: a run's parameters end in logs when they are refused.
"""

from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import InitErrorDetails

from tuneship.contract.model_card import Statements

STATEMENTS = tuple(Statements.model_fields)


def _known(name: str) -> str:
    if name not in STATEMENTS:
        raise ValueError(f"must be the name of a statement: {', '.join(STATEMENTS)}")
    return name


StatementName = Annotated[
    str, AfterValidator(_known), WithJsonSchema({"type": "string", "enum": [*STATEMENTS]})
]


class CardStatements(Statements):
    """Statements for the model card; what is left out reads "not stated"."""

    required: list[StatementName] = Field(
        default_factory=list[str],
        description="Without these statements the release is refused before anything is made.",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _errors_without_texts(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            # Pydantic would quote the text.
            hidden = [
                InitErrorDetails(
                    type=one["type"], loc=one["loc"], input="...", ctx=one.get("ctx", {})
                )
                for one in error.errors(include_url=False, include_input=False)
            ]
        raise ValidationError.from_exception_data(cls.__name__, hidden)

    @model_validator(mode="after")
    def _stated(self) -> Self:
        lacking = [name for name in self.required if getattr(self, name) is None]
        if lacking:
            raise ValueError(f"required, and not stated: {', '.join(dict.fromkeys(lacking))}")
        return self

    @property
    def statements(self) -> Statements:
        """The statements alone, without the list of those that must be there."""
        return Statements.model_validate(self.model_dump(exclude={"required"}))
