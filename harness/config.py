"""Configuration: a recipe (YAML) is a grid of cells; a cell is everything one measurement depends on.

A cell's directory is named by the hash of its resolved configuration, so running a recipe again runs only what is
missing, and nothing that changes a number can change silently.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from harness.contracts import digest
from harness.methods import Frozen, Method, Name

Precision = Literal["float32", "bfloat16"]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class EnvConfig(Frozen):
    """An environment and the protocol under which it is played."""

    id: str = Field(description="registered environment id, e.g. Sokoban-v1")
    options: dict[str, Any] = Field(default_factory=dict, description="constructor options of the environment")
    history: int | None = Field(None, ge=0, description="history window k; default: the environment card's")
    max_steps: int | None = Field(None, ge=1, description="step limit; default: the environment card's")
    max_prompt_tokens: int = Field(2048, ge=16, description="longer prompts drop their oldest history turns")
    max_response_tokens: int = Field(512, ge=1, description="longest answer, end token included")
    max_env_errors: float = Field(
        0.1, ge=0, le=1, description="share of crashed episodes above which the run stops and says why"
    )


class LoraConfig(Frozen):
    """Low-rank adapters (arXiv 2106.09685): only they are trained; the reference is the model without them."""

    rank: int = Field(16, ge=1, description="r")
    alpha: float = Field(32.0, gt=0, description="the update is scaled by alpha / r")
    targets: Literal["all-linear", "attention"] = Field("all-linear", description="which layers of the decoder adapt")


class EngineConfig(Frozen):
    """What samples the answers. Scoring always stays in the trainer."""

    kind: Literal["local", "vllm"] = Field("local", description="the trained model itself, or a vLLM engine beside it")
    gpu_memory: float = Field(0.4, gt=0, lt=1, description="vllm: share of the GPU's memory that it may take")
    tensor_parallel: int = Field(1, ge=1, description="vllm: GPUs that one model is split over")
    correction: Literal["truncated", "none"] = Field(
        "truncated",
        description="what is done about the gap between the sampler's log-probs and the trainer's: each token's policy "
        "gradient weighted by min(pi_trainer / pi_sampler, cap), or nothing; the gap is told in either case",
    )
    cap: float = Field(2.0, ge=1, description="largest weight of the truncated correction")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        usual = {name: field.default for name, field in EngineConfig.model_fields.items() if name != "kind"}
        odd = [name for name, value in usual.items() if getattr(self, name) != value]
        if self.kind == "local" and odd:
            raise ValueError(f"{odd[0]} belongs to kind vllm, not to local")
        if self.correction == "none" and "cap" in odd:
            raise ValueError("cap belongs to the truncated correction, not to none")
        return self


class TrainConfig(Frozen):
    """How a policy is trained. Defaults are the paper's (PAPER section 2) where it states one."""

    updates: int = Field(150, ge=0)
    tasks: int = Field(16, ge=1, description="tasks per update")
    group: int = Field(8, ge=1, description="N: episodes per task")
    panel_size: int | None = Field(None, ge=1, description="tasks of the train panel; default: all of it")
    temperature: float = Field(1.0, gt=0)
    learning_rate: float = Field(1e-6, gt=0)
    warmup: float = Field(0.0, ge=0, le=1, description="share of the updates over which the learning rate rises")
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    mini_batches: int = Field(1, ge=1, description="optimizer steps per update")
    max_rows: int | None = Field(
        None, ge=1, description="train on at most this many step rows per update, drawn evenly"
    )
    token_budget: int = Field(16384, ge=1, description="prompt + response tokens per micro-batch, padding included")
    clip: float = Field(0.2, gt=0)
    dual_clip: float = Field(3.0, gt=1, description="c: cap of the ratio for negative advantages")
    kl: float = Field(0.01, ge=0, description="beta_KL: weight of the k3 KL to the reference policy")
    entropy: float = Field(0.0, ge=0, description="weight of the entropy bonus (paper: none; code: 0.001)")
    invalid_action_penalty: float = Field(0.1, ge=0, description="subtracted from the score of an invalid step's row")
    normalise: Literal["token", "episode"] = Field(
        "token", description="average the policy loss over tokens or episodes first"
    )
    gradient_checkpointing: bool = False
    lora: LoraConfig | None = Field(None, description="train low-rank adapters instead of all weights (extra `lora`)")
    exploding: float = Field(
        1000.0, gt=0, description="gradient norm above which, as without a finite one, an optimizer step is left out"
    )
    max_skipped: int = Field(5, ge=1, description="steps left out in a row after which the run stops")
    checkpoint_every: int = Field(10, ge=1, description="updates between checkpoints; the last one is always written")
    detail: int = Field(
        1,
        ge=0,
        description="tasks per update whose episodes are kept with prompts, pictures and the credit of each token",
    )


class Stage1Config(Frozen):
    """Hindsight-skill SFT (paper 1.2): collect with the base policy, annotate, fine-tune on (episode -> skill)."""

    tasks: int = Field(180, ge=1, description="M")
    attempts: int = Field(8, ge=1, description="K0 episodes per task")
    temperature: float = Field(0.4, gt=0)
    annotator: str = Field("scripted", description="scripted, or MODEL@BASE_URL of an OpenAI-compatible endpoint")
    epochs: int = Field(3, ge=1)
    batch: int = Field(8, ge=1, description="samples per optimizer step")
    learning_rate: float = Field(5e-6, gt=0)


class ImitationConfig(Frozen):
    """SFT on a teacher's episodes: the external teacher plays training tasks, its answers are what is trained on."""

    tasks: int = Field(180, ge=1)
    attempts: int = Field(8, ge=1, description="episodes per task")
    temperature: float = Field(1.0, gt=0)
    episodes: Literal["all", "successes"] = Field("successes", description="which episodes are imitated")
    epochs: int = Field(3, ge=1)
    batch: int = Field(8, ge=1, description="answers per optimizer step")
    learning_rate: float = Field(5e-6, gt=0)


class AnalysisConfig(Frozen):
    """Decoding of the policy's own analyses: greedy, cut at ``max_tokens``; longer prompts lose their oldest steps."""

    max_tokens: int = Field(4096, ge=1)
    max_prompt_tokens: int = Field(16384, ge=16)
    annotator: str = Field(
        "", description="who writes for teacher.analyzer external: scripted, or MODEL@BASE_URL of an endpoint"
    )


class EvalConfig(Frozen):
    """How learning curves and final scores are measured."""

    panel: str = "eval"
    panel_size: int | None = Field(None, ge=1, description="first tasks of the panel; default: all")
    episodes_per_task: int = Field(1, ge=1)
    temperature: float = Field(0.4, ge=0, description="0 is greedy; the paper's code samples at 0.4")
    every: int = Field(5, ge=1, description="updates between evaluations; the start and the last update always are")
    batch: int = Field(128, ge=1, description="episodes played at once; does not change any score")


class CellConfig(Frozen):
    """One cell. ``method`` is None for an evaluation without training."""

    env: EnvConfig
    policy: str = Field(
        "tiny", description="tiny, random, oracle, a model directory, a hub id, api:MODEL@BASE_URL, ..."
    )
    policy_fingerprint: str = Field("", description="filled in by the runner: hash of the weights")
    precision: Precision = Field("float32", description="type the model computes in; trained weights stay float32")
    engine: EngineConfig = EngineConfig()
    method: Method | None = None
    teacher: str = Field("", description="external teacher, for methods that need one")
    teacher_fingerprint: str = ""
    library: str = Field("", description="skill library, for methods that need one: packaged name or JSON file")
    library_fingerprint: str = ""
    seed: Seed = 0
    train: TrainConfig | None = None
    stage1: Stage1Config | None = None
    imitation: ImitationConfig | None = None
    analysis: AnalysisConfig | None = None
    eval: EvalConfig = EvalConfig()

    @property
    def hash(self) -> str:
        """First 12 hex digits of the SHA-256 of the resolved configuration."""
        return digest(self.model_dump(mode="json"))[:12]

    @property
    def title(self) -> str:
        method = self.method.name if self.method else self.policy
        return f"{self.env.id} {method} seed {self.seed}"


class EnvPlan(Frozen):
    """One environment of a recipe with the settings that differ from the recipe's own."""

    env: EnvConfig
    train: dict[str, Any] = Field(default_factory=dict)
    stage1: dict[str, Any] = Field(default_factory=dict)
    imitation: dict[str, Any] = Field(default_factory=dict)
    analysis: dict[str, Any] = Field(default_factory=dict)
    eval: dict[str, Any] = Field(default_factory=dict)
    methods: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="per method: overrides of these settings"
    )


def longest_sequence(cell: CellConfig) -> int:
    """Tokens of the longest prompt with its answer that a cell may ask its policy for."""
    acting = cell.env.max_prompt_tokens + cell.env.max_response_tokens
    if cell.analysis is None:
        return acting
    return max(acting, cell.analysis.max_prompt_tokens + cell.analysis.max_tokens)


class Needs(Frozen):
    """What one cell takes of a machine; decides where `--cluster` places it and changes no number."""

    cpus: float = Field(1, gt=0)
    gpus: float = Field(0, ge=0, description="a part, where several cells share one, or a whole number")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.gpus > 1 and not self.gpus.is_integer():
            raise ValueError(f"gpus must be a part of one or a whole number, not {self.gpus:g}")
        return self


class Recipe(Frozen):
    """A grid: environments x methods x seeds, under shared settings."""

    name: str = Field(
        pattern=r"^\w[\w .+-]*(/\w[\w .+-]*)*$",
        max_length=120,
        description="names a directory below results/: words, perhaps with /",
    )
    summary: str = ""
    policy: str = "tiny"
    precision: Precision = "float32"
    engine: EngineConfig = EngineConfig()
    needs: Needs = Needs()
    teacher: str = "tiny-teacher"
    library: str = Field("tiny", description="skill library: packaged name (harness skills list) or JSON file")
    methods: list[str]
    variants: dict[Name, dict[str, Any]] = Field(
        default_factory=dict,
        description="methods of this recipe: name to {of: a method, and what differs from it}",
    )
    baselines: list[str] = Field(
        default_factory=list, description="policies evaluated without training: random, oracle, ..."
    )
    seeds: list[Seed] = Field(default_factory=lambda: [0])
    envs: list[EnvPlan]
    train: TrainConfig = TrainConfig()
    stage1: Stage1Config = Stage1Config()
    imitation: ImitationConfig = ImitationConfig()
    analysis: AnalysisConfig = AnalysisConfig()
    eval: EvalConfig = EvalConfig()
