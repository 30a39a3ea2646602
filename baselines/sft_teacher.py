"""SFT-Teacher: imitation of a stronger policy's episodes. Against GRPO: supervised learning, no updates of RL."""

from harness.methods import Method

METHOD = Method(
    name="sft-teacher", summary="fine-tuning on a stronger policy's episodes", start="teacher_sft", advantage=None
)
