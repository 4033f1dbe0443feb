"""The configured credit rules, in the order in which they apply."""

from headrace.config import CreditConfig
from headrace.credit.pacg import PACG
from headrace.credit.vppo import VPPO
from headrace.records import CreditRule


def credit_rules(config: CreditConfig) -> list[CreditRule]:
    """VPPO's factors and selection, then PACG's gates; none where neither is configured."""
    rules: list[CreditRule] = []
    if config.vppo is not None:
        rules.append(VPPO(config.vppo, config.intervention))
    if config.pacg is not None:
        rules.append(PACG(config.pacg, config.intervention))
    return rules
