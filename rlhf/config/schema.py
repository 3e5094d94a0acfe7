"""What a configuration may say: frozen pydantic models, unknown keys refused.

A default lives here and nowhere else. A recipe in ``configs/`` states only what differs. Functions
receive their own section, never the whole :class:`Config`. Checks over several sections are in
``config.check``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue


def _not_a_truth_value(value: Any) -> Any:
    """pydantic would take ``true`` for 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Int = Annotated[int, BeforeValidator(_not_a_truth_value)]
Float = Annotated[float, BeforeValidator(_not_a_truth_value)]
Count = Annotated[Int, Field(ge=0)]
PositiveInt = Annotated[Int, Field(gt=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
NonNegative = Annotated[Float, Field(ge=0)]
PositiveFloat = Annotated[Float, Field(gt=0)]
Seconds = Annotated[Float, Field(gt=0, le=2_000_000)]
"""A time limit; the system counts milliseconds in 32 bits, which hold 24 days."""
Seed = Annotated[Int, Field(ge=0, lt=2**32)]
Text = Annotated[str, Field(min_length=1)]
AutoWord = BeforeValidator(lambda value: {"auto": True} if value == "auto" else value)


class Section(BaseModel):
    """Base of all sections."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


class ModelSection(Section):
    path: Text
    """HF folder with config.json, safetensors and tokenizer. Relative to the working directory."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Body of the model in training and rollout; bfloat16 keeps float32 optimizer masters."""
    fp32_head: bool = True
    """Output head in float32 in trainer and engine; halves the bf16 gap between them."""


class ExpertsSection(Section):
    """Training of a model with routed experts; for other models every key is refused."""

    dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach the ranks of their experts; flex is DeepEP (GPUs)."""
    aux_loss: Literal["none", "sequence", "global"] = "none"
    """Loss that rewards even loads: of each sequence (arXiv:2412.19437, Eq. 17-20), or of all
    micro-batches so far of an update on all ranks (arXiv:2501.11873)."""
    aux_loss_coef: PositiveFloat | None = None
    """Its factor; needed unless aux_loss is none."""
    z_loss_coef: NonNegative = 0.0
    """Factor of the mean squared log-sum-exp of the router's logits (arXiv:2202.08906, Eq. 5)."""
    freeze_router: bool = False
    """The routers' weights are not trained."""
    bias_update_rate: NonNegative = 0.0
    """Step by which an expert's bias follows its load after an update (arXiv:2408.15664);
    0: the biases stay."""
    bias_decay: Fraction = 0.0
    """Share of each bias that is taken away after an update."""


class TrainSection(Section):
    """Megatron's layout and how a pass runs. dp = ranks / (tp * pp * cp)."""

    auto: bool = False
    """The layout with the shortest predicted step is chosen; keys that are given stay."""
    tp: PositiveInt = 1
    pp: PositiveInt = 1
    vpp: PositiveInt = 1
    """Virtual pipeline chunks per stage."""
    first: PositiveInt | None = None
    """Layers of the first stage; empty: even."""
    last: PositiveInt | None = None
    """Layers of the last stage; empty: even."""
    cp: PositiveInt = 1
    """Context parallel size: ranks that share the tokens of each sequence. Sequences are padded to
    multiples of 2 * cp, and attention gathers keys and values over these ranks."""
    ep: PositiveInt = 1
    etp: PositiveInt | None = None
    """Tensor parallel size of experts; empty: tp."""
    moe: ExpertsSection = ExpertsSection()
    sequence_parallel: bool = False
    """Shard activations between tp regions over the sequence."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: attention only, or whole layers."""
    overlap: bool = True
    """Overlap gradient reduction and parameter gathering with computation (dp > 1)."""
    tokens_per_microbatch: PositiveInt = 16384
    """Token budget of one packed forward pass."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Rows of the logit matrix that exist at one time."""


class SamplingSection(Section):
    temperature: NonNegative = 1.0
    """0 = greedy. Trainer log-probabilities are divided by it too."""
    top_p: Annotated[Float, Field(gt=0, le=1)] = 1.0
    top_k: Int = -1
    """-1 = off."""
    max_new_tokens: PositiveInt = 1024
    stop: tuple[Text, ...] = ()
    """Texts that end an answer; each must be a single token (the engine sees token ids)."""


class RolloutSection(Section):
    """SGLang's layout, its memory and how answers are sampled. Engines = ranks / (tp * pp)."""

    auto: bool = False
    """As train.auto."""
    tp: PositiveInt = 1
    dp: PositiveInt = 1
    """DP-attention inside an engine: attention tp = tp / dp."""
    ep: PositiveInt = 1
    pp: PositiveInt = 1
    a2a: Literal["none", "deepep"] = "none"
    quantization: Literal["none", "block_fp8"] = "none"
    """block_fp8: float8_e4m3fn weights in the layers, a float32 scale per block of 128 x 128."""
    sampling: SamplingSection = SamplingSection()
    deterministic: bool = True
    """Seed per request, whole shares admitted at once: the same run twice gives the same tokens."""
    routes: bool = False
    """Also record which experts each token took (models with routed experts, pp=1)."""
    prefix_cache: bool = True
    """Compute a prompt that several answers share once per rollout."""
    max_running_requests: PositiveInt = 64
    """Requests that an engine decodes at the same time."""
    kv_tokens: PositiveInt | None = None
    """Tokens of the engine's KV cache; empty: what mem_fraction leaves."""
    mem_fraction: Annotated[Float, Field(gt=0, lt=1)] = 0.6
    """Share of the device for engine weights and KV cache."""
    free_host_weights: bool = False
    """On a CPU: an engine asleep gives the memory of its weights back to the system, and takes it
    again at the next reshard, which costs about 0.7 s per GiB. On a GPU it always does."""
    start_timeout_s: Seconds = 300
    timeout_s: Seconds = 3600
    """Longest rollout phase."""


class ReshardSection(Section):
    window_mib: PositiveInt = 128
    """Size of one staging window; a rank has two. Half of each takes what arrives, half what is
    sent."""
    max_peers: PositiveInt = 64
    """A rank exchanges messages with at most so many others in a round."""
    timeout_s: Seconds = 120
    verify_every: Count = 10
    """Compare checksums of what trainers sent and engines hold in the first of every so many
    reshards; a difference stops the run. 0: never. NaN and infinite weights always do."""
    probe_tokens: Count = 32
    """Length of a fixed prompt, drawn from the seed, that the trainer scores after its update and
    the engines before their rollout; at most what an engine's context holds. 0: no probe."""
    probe_alarm: PositiveFloat = 0.1
    """Warn when the two differ by more than this on average, in nats."""
    probe_stop: bool = False
    """Stop the run then."""


class MemorySection(Section):
    """Who gives up device memory in phases that do without it."""

    time_slice: Literal["engine", "all"] = "engine"
    """engine: engines while the models are trained, gradients while engines run. all: also the
    weights of each role outside its phases, and the KV cache while weights move."""
    optimizer: Literal["device", "host"] = "device"
    """Where masters and moments are. host: they pass through the device in two buffers at each
    update."""
    stream_mib: PositiveInt = 512
    """Of each of the two buffers, at most."""


class JsonlSource(Section):
    """Rows of a JSONL file."""

    type: Literal["jsonl"]
    name: Text
    """Domain; metrics are split by it."""
    path: Text
    prompt_key: Text = "prompt"
    """A text, or a list of chat messages {role, content}."""
    answer_key: Text = "answer"
    reward: Text = "exact_match"
    """Name of a reward rule, or file.py:function."""
    weight: PositiveFloat = 1.0
    """Share of this domain in the mix."""


class ReasoningGymSource(Section):
    """Tasks of the reasoning-gym package, generated from a seed."""

    type: Literal["reasoning_gym"]
    name: Text
    task: Text
    """Registered task, e.g. chain_sum."""
    params: dict[str, JsonValue] = {}
    size: PositiveInt = 1000
    """Items generated before duplicates are dropped."""
    seed: Seed = 0
    template: str | None = None
    """Plain text with {question} or a metadata key, e.g. {expression}; empty: the chat template."""
    held_out: Count = 0
    """Distinct items kept out of training; the eval source of the same task takes exactly these."""
    split: Literal["train", "held_out"] = "train"
    reward: Text = "reasoning_gym"
    weight: PositiveFloat = 1.0


Source = Annotated[JsonlSource | ReasoningGymSource, Field(discriminator="type")]


class DataSection(Section):
    train: tuple[Source, ...] = Field(min_length=1)
    eval: tuple[Source, ...] = ()
    max_prompt_tokens: PositiveInt = 1024
    """Longer prompts are dropped with a warning; if none is left the run stops."""
    reward_timeout_s: Seconds = 60
    """Longest time that a reward may take for one answer; then the run ends with an error."""
    shuffle: bool = True
    """Another order in each epoch, from the run's seed; off: the order of the source."""
    drop_last: bool = False
    """Leave out the last rows of an epoch that don't fill a step; off: the next epoch fills it."""


class KLSection(Section):
    """Penalty for leaving the reference model."""

    place: Literal["off", "loss", "reward"] = "off"
    """In the loss, in the reward of each token, or nowhere (then there is no reference model)."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of the KL divergence from the reference (http://joschu.net/blog/kl-approx.html). In the loss
    the expected gradient of k1 is zero and that of k2 is the divergence's own."""
    coef: NonNegative | None = None
    """Factor of the penalty; needed unless place is off."""


class GAESection(Section):
    """Generalised advantage estimation (arXiv:1506.02438), of ppo."""

    gamma: Fraction = 1.0
    """Discount of a reward per trained token."""
    lam: Fraction = 0.95
    """lambda: 1 = return minus value, 0 = one step ahead."""
    bootstrap_truncated: bool = False
    """An answer cut off by max_new_tokens is worth the critic's value of where it stands; off: it
    ends there for good."""
    whiten: bool = True
    """Advantages of a step to mean 0 and variance 1, over the trained tokens of all ranks."""


class AlgorithmSection(Section):
    name: Literal["grpo", "ppo"] = "grpo"
    """grpo: an answer against the others to its prompt. ppo: each token against a critic's value
    (needs the section critic)."""
    clip_low: Fraction = 0.2
    clip_high: NonNegative = 0.28
    """Clip-higher (DAPO, arXiv:2503.14476): ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: Annotated[Float, Field(gt=1)] | None = None
    """Bound of the loss for negative advantages (arXiv:1912.09729)."""
    normalize_by_std: bool = True
    """Divide by the group's sample standard deviation (off: Dr. GRPO, arXiv:2503.20783)."""
    std_eps: PositiveFloat = 1e-6
    aggregation: Literal["token-mean", "sequence-mean", "fixed-length"] = "token-mean"
    """How token losses become one number, over the whole update on all ranks."""
    fixed_length_tokens: PositiveInt | None = None
    """Divisor per sequence of fixed-length aggregation; empty: rollout.sampling.max_new_tokens."""
    entropy_coef: NonNegative = 0.0
    kl: KLSection = KLSection()
    gae: GAESection = GAESection()
    skip_zero_signal: bool = True
    """Leave out groups whose advantages are all zero (no gradient without KL and entropy terms)."""


class BatchSection(Section):
    prompts_per_step: PositiveInt
    samples_per_prompt: PositiveInt
    updates_per_step: PositiveInt = 1
    """Optimizer steps on one rollout; must divide the number of responses."""


class OptimizerSection(Section):
    lr: PositiveFloat
    min_lr: NonNegative = 0.0
    warmup_steps: Count = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """From lr to min_lr over the updates after warm-up."""
    beta1: Annotated[Float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegative = 0.0
    clip_grad: NonNegative = 1.0
    """Largest global gradient norm; 0 = off."""


class CriticSection(Section):
    """The model that values each state; of ppo. Needs as much memory as the actor."""

    path: Text | None = None
    """HF folder that it starts from, of the actor's tokenizer; empty: model.path. The head of a
    sequence classifier with one label (score.weight) is taken, otherwise it is new."""
    head_std: NonNegative = 0.0
    """Standard deviation of a new head's weights, drawn from the run's seed; 0: zeros."""
    optimizer: OptimizerSection
    """Its own, with its own schedule over all steps."""
    warmup_steps: Count = 0
    """Steps at the start in which only the critic learns."""
    value_clip: PositiveFloat | None = 0.2
    """The loss sees a value no further than this from the one before the update; empty: off."""


class RewardModelSection(Section):
    """A frozen sequence classifier with one label that scores whole answers, beside the rules."""

    path: Text
    """HF folder, of the actor's tokenizer."""
    weight: Float = 1.0
    """score = rule + weight * the classifier's number at the answer's last token."""


class CheckpointSection(Section):
    every: Count = 0
    """Steps between checkpoints; 0: only at the end and when stopped."""
    keep: PositiveInt = 2
    """Complete checkpoints kept; older ones go after the new one is durable."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: newest complete checkpoint of run_dir if there is one."""
    export_hf: bool = True
    """Write an HF folder at the end."""


class EvalSection(Section):
    every: Count = 0
    """Steps between evaluations; 0: only before the first and after the last step."""
    max_new_tokens: PositiveInt | None = None
    """Empty: rollout.sampling.max_new_tokens. Evaluation is greedy."""


class TrackSection(Section):
    console: bool = True
    """Steps as they come, and tables at the end; off: nothing on standard output."""
    tensorboard: bool = False
    swanlab: Literal["cloud", "local", "offline", "off"] = "off"
    wandb: Literal["online", "offline", "off"] = "off"
    project: Text = "rlhf"
    gap_alarm: PositiveFloat = 0.1
    """Warn when the mean |rollout_logprobs - old_logprobs| of a step is above this."""
    samples_every: Count = 5
    """Steps between written samples; 0 = off."""
    calibration: Text | None = None
    """File of `rlhf tune` with the constants of this machine, by which the run's plan predicts its
    seconds; empty: those of an H100, without a GPU of a processor."""


class DistSection(Section):
    ranks: PositiveInt | None = None
    """Ranks that `rlhf train` starts on this machine; empty: one per GPU, or 1 without GPUs."""
    timeout_s: Seconds = 600
    """Longest wait in a compute collective, and for a rank at the edge of a phase; after a rollout
    or an evaluation it is rollout.timeout_s."""
    silence_s: Annotated[Seconds, Field(ge=5)] = 120
    """A rank whose process gives no sign of life for so long (stopped, or stuck with Python's lock
    held) ends the run. A compilation may hold the lock for a while."""
    stop_grace_s: Seconds = 25
    """After a signal: time until ranks that do not come to an edge, and do not save, are ended."""


class Config(Section):
    run_dir: Text
    """Folder for everything that a run writes."""
    seed: Seed = 0
    num_steps: PositiveInt
    model: ModelSection
    train: Annotated[TrainSection, AutoWord] = TrainSection()
    rollout: Annotated[RolloutSection, AutoWord] = RolloutSection()
    reshard: ReshardSection = ReshardSection()
    memory: MemorySection = MemorySection()
    data: DataSection
    algorithm: AlgorithmSection = AlgorithmSection()
    batch: BatchSection
    optimizer: OptimizerSection
    """Of the actor."""
    critic: CriticSection | None = None
    """Needed by ppo, refused otherwise."""
    reward_model: RewardModelSection | None = None
    """Empty: the rules of the data sources alone score."""
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    track: TrackSection = TrackSection()
    dist: DistSection = DistSection()
