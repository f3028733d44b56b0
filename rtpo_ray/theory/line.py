"""One checked number of a fact."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Line:
    """`sign` "=": |measured - expected| <= within; ">" and "<": measured is above or below expected."""

    what: str
    expected: float
    measured: float
    within: float = 1e-9
    sign: str = "="

    @property
    def ok(self) -> bool:
        if self.sign == "=":
            return abs(self.measured - self.expected) <= self.within
        return self.measured > self.expected if self.sign == ">" else self.measured < self.expected
