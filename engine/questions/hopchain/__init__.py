"""Video-HopChain: multi-hop questions about the moments of a video, generated, checked and judged (paper 000 §2; docs/hopchain.md)."""

from headrace.questions.hopchain.segments import segment_shots
from headrace.questions.hopchain.specification import draw_specification, totals_distinct

__all__ = ["draw_specification", "segment_shots", "totals_distinct"]
