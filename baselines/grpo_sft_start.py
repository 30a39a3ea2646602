"""GRPO from SEED's own start. Against GRPO: begins after hindsight-skill SFT; shows what stage 1 alone brings."""

from harness.methods import Method

METHOD = Method(name="grpo-sft-start", summary="GRPO after hindsight-skill SFT", start="hindsight_sft")
