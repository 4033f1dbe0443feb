"""What every section of a configuration is."""

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the field and what is expected."""

    on_every_rank = True
    """All ranks read the same configuration, so one of them is enough to tell."""


class Model(BaseModel):
    """Base of every section: unknown keys are refused, docstrings under fields become descriptions."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)
