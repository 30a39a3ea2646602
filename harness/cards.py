"""What stands beside every number: the protocol it was measured under, and what was spent on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class ProtocolCard:
    """The conditions under which a number was measured. Cells whose cards differ are not comparable."""

    env: str
    panel: str
    panel_hash: str
    episodes_per_task: int
    history: int
    max_steps: int
    truncation: str
    temperature: float
    checkpoint: str
    """``"last"`` or ``"best"``: which weights were evaluated."""
    parser: str
    decoding: str
    invalid_action: str
    reward: str
    success: str
    prompt_hash: str
    engine: str
    data: str

    def differences(self, other: ProtocolCard) -> list[str]:
        """Names of the fields in which two cards differ, in declaration order."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]


@dataclass
class Ledger:
    """What a cell spent. SEED pays for its own analysis and re-scoring."""

    env_steps: int = 0
    episodes: int = 0
    sampled_tokens: int = 0
    """Response tokens generated while acting in training."""
    analyzer_tokens: int = 0
    """Tokens that the policy generated while writing skills."""
    external_prompt_tokens: int = 0
    """Prompt tokens that an external annotator read, as its endpoint counted them."""
    external_answer_tokens: int = 0
    """Tokens that it answered."""
    rescored_tokens: int = 0
    """Response tokens scored again by a teacher (with a skill, or by another model)."""
    trained_tokens: int = 0
    """Response tokens that entered a loss, counted once per optimisation pass."""
    optimizer_steps: int = 0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    flops: float = 0.0
    """Estimate: 2 x parameters x tokens forward, 6 x parameters x tokens trained (4 x where only adapters are), prompts
    included."""

    def add(self, other: Ledger) -> None:
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
