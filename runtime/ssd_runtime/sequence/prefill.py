"""The result of running a prompt: the states that choose its first new token and its route."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ssd_runtime.sequence.prompt_states import PromptStates


@dataclass(frozen=True, slots=True)
class Prefill:
    """The result of running a prompt: states [hidden] after the final norm."""

    last: Tensor
    """State of the prompt's last token. Its logits choose the first new token, and it is the `last` feature."""
    mean: Tensor
    """Mean over the prompt's tokens: the `mean` feature."""
    tokens: int
    """Number of the prompt's tokens."""
    states: PromptStates = field(default_factory=PromptStates, repr=False, compare=False)
    """Sums of the states, from which a longer prompt goes on."""

    def feature(self, name: str) -> Tensor:
        """The routing feature, `last` or `mean`, in fp32 on the CPU."""
        return (self.last if name == "last" else self.mean).float().cpu()
