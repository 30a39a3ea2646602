"""Fair, repeatable benchmarking of language and vision-language agents trained with reinforcement learning."""

__version__ = "0.1.0"
