"""GPUs and network links: their figures, and how fast a model runs on them.

Rates are a roofline with efficiencies: prefill at a share of the arithmetic peak (`mfu`), decode at
a share of the memory bandwidth (`mbu`); tensor parallelism adds two all-reduces per layer. They
should be right within a factor of about 1.5. Measure to know more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from conductor.scheduling.cost_model import LinkProfile, Profile
from kvpool.errors import ConfigError, did_you_mean
from planner.sizing.model_shape import ModelShape

VALUE_BYTES = {
    "fp32": 4,
    "float32": 4,
    "fp16": 2,
    "float16": 2,
    "bf16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
STEP_OVERHEAD_S = 2e-3  # launching one step: scheduling and kernels
SEQUENCE_OVERHEAD_S = 2e-5  # sampling and bookkeeping of one sequence in a step
GPU_COPY_BYTES_PER_S = 25e9  # host memory to each GPU: half of PCIe 5's line rate, all GPUs at once
SAME_HOST = LinkProfile(1e-4, 8 * GPU_COPY_BYTES_PER_S)
OTHER_HOST = LinkProfile(2e-4, 100e9)  # 800 Gb/s of RDMA per host, as in Mooncake's testbed
TYPICAL_BATCH = 32  # the batch for which the experts read by a step are counted


@dataclass(slots=True, frozen=True)
class Gpu:
    """One accelerator. Its arithmetic is dense, without sparsity."""

    name: str
    tflops: float  # fp16 or bf16
    memory_bytes: float
    bytes_per_s: float
    peer_bytes_per_s: float  # to its peers in one host, one direction
    dollars_per_hour: float  # an assumption; replace it with your price
    source: str


_NVIDIA = "NVIDIA data sheet"
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312, 80e9, 2.039e12, 300e9, 1.8, f"{_NVIDIA}, A100 80GB SXM"),
        Gpu("a800", 312, 80e9, 2.039e12, 200e9, 1.8, f"{_NVIDIA}, A800 80GB SXM"),
        Gpu("h100", 989, 80e9, 3.35e12, 450e9, 3.0, f"{_NVIDIA}, H100 SXM"),
        Gpu("h200", 989, 141e9, 4.8e12, 450e9, 3.7, f"{_NVIDIA}, H200 SXM"),
        Gpu("h20", 148, 96e9, 4.0e12, 450e9, 1.6, f"{_NVIDIA}, H20"),
        Gpu("b200", 2250, 180e9, 7.7e12, 900e9, 5.5, f"{_NVIDIA}, DGX B200, per GPU"),
        Gpu("l40s", 362, 48e9, 0.864e12, 32e9, 1.0, f"{_NVIDIA}, L40S"),
        Gpu("l4", 121, 24e9, 0.3e12, 32e9, 0.5, f"{_NVIDIA}, L4"),
        Gpu("a10g", 70, 24e9, 0.6e12, 32e9, 0.7, "AWS, EC2 G5"),
        Gpu("mi300x", 1307, 192e9, 5.3e12, 448e9, 3.0, "AMD data sheet, MI300X"),
    )
}

_LINK = re.compile(
    r"^(?:(?P<count>\d{1,3})\s*x\s*)?(?P<rate>\d+(?:\.\d+)?)\s*"
    r"(?P<unit>GbE|Gbps|Gb/s|Gbit|Gb|Tb|Tb/s|GB/s|GBps|MB/s|TB/s)$"
)
_UNITS = {"GB/s": 1e9, "GBps": 1e9, "MB/s": 1e6, "TB/s": 1e12, "Tb": 1.25e11, "Tb/s": 1.25e11}


@dataclass(slots=True, frozen=True)
class NetworkLink:
    """A network path with a name such as `8x400Gb`, and its line rate over all rails."""

    name: str
    bytes_per_s: float


def link_named(text: str) -> NetworkLink:
    """A link from `400Gb`, `8x400Gb`, `100GbE`, `25GB/s`.

    Raises:
        ConfigError: the text has another form.
    """
    found = _LINK.match(text.strip())
    rate = float(found["rate"]) if found else 0.0
    count = int(found["count"] or 1) if found else 0
    if not found or rate <= 0 or count < 1:
        raise ConfigError(
            f"unknown link {text!r}", hint="write 100GbE, 400Gb, 8x400Gb (bits) or 25GB/s (bytes)"
        )
    return NetworkLink(text.strip(), count * rate * _UNITS.get(found["unit"], 1.25e8))


def links_named(text: str) -> list[NetworkLink]:
    """Links from a list separated by commas. Raises ConfigError: one is unknown, or there is none."""
    return [link_named(part) for part in text.split(",")]


def gpu_named(name: str) -> Gpu:
    """A GPU by its name. Raises ConfigError, which names the nearest, if it is unknown."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ConfigError(f"unknown GPU {name!r}", hint=did_you_mean(name.lower(), GPUS))
    return gpu


def value_bytes(dtype: str) -> int:
    """Bytes per value. Raises ConfigError: the dtype is unknown."""
    found = VALUE_BYTES.get(dtype.lower())
    if found is None:
        raise ConfigError(f"unknown dtype {dtype!r}", hint=f"use one of {', '.join(VALUE_BYTES)}")
    return found


@dataclass(slots=True, frozen=True)
class Machine:
    """One instance of a model: `tp` GPUs that work as one.

    Args:
        mfu: share of the arithmetic peak that prefill reaches.
        mbu: share of the memory bandwidth that decode reaches.
        weight_bytes: per parameter.
        kv_value_bytes: per value of KV.
        memory_share: share of the GPU memory for weights and KV together.

    Raises:
        ConfigError: a share or size is invalid, or the weights do not fit.
    """

    model: ModelShape
    gpu: Gpu
    tp: int = 8
    mfu: float = 0.5
    mbu: float = 0.6
    weight_bytes: float = 2.0
    kv_value_bytes: float = 2.0
    memory_share: float = 0.9

    def __post_init__(self) -> None:
        if not 1 <= self.tp <= 64 or not (0 < self.mfu <= 1 and 0 < self.mbu <= 1):
            raise ConfigError("tp must be 1 to 64, mfu and mbu above 0 and at most 1")
        if self.kv_capacity_tokens < 1:
            weights = self.model.total_params * self.weight_bytes
            raise ConfigError(
                f"the weights of {self.model.name} ({weights / 1e9:.0f} GB) do not fit {self.tp} "
                f"x {self.gpu.name}",
                hint="more GPUs per instance, a GPU with more memory, or --weights fp8",
            )

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens whose KV fits beside the weights."""
        free_bytes = self.gpu.memory_bytes * self.tp * self.memory_share
        free_bytes -= self.model.total_params * self.weight_bytes
        return int(free_bytes / self.model.bytes_per_token(self.kv_value_bytes))

    @property
    def dollars_per_hour(self) -> float:
        return self.gpu.dollars_per_hour * self.tp

    def prefill_s(self, new: int, reused: int = 0) -> float:
        """Seconds to compute `new` tokens after `reused` ones."""
        return self.profile().prefill_s(new, reused)

    def profile(
        self,
        same_host: LinkProfile = SAME_HOST,
        other_host: LinkProfile = OTHER_HOST,
    ) -> Profile:
        """The rates as a profile of the scheduler's cost model."""
        model, gpu = self.model, self.gpu
        flops = gpu.tflops * 1e12 * self.tp * self.mfu
        bandwidth = gpu.bytes_per_s * self.tp * self.mbu
        # Two all-reduces per layer. Each moves twice (tp - 1) / tp of the activations (ring).
        reduced = 2 * model.layers * model.hidden * 2.0 * 2 * (self.tp - 1) / self.tp
        token_s = (2.0 * model.active_params + model.windowed_flops) / flops
        token_s += reduced / gpu.peer_bytes_per_s
        kv_bytes = model.bytes_per_token(self.kv_value_bytes)
        return Profile(
            prefill_base_s=STEP_OVERHEAD_S,
            prefill_token_s=token_s,
            prefill_attention_s=max(model.pair_flops / flops, 1e-15),
            tpot_base_s=STEP_OVERHEAD_S + self._weights_read() / bandwidth,
            tpot_context_s=kv_bytes / bandwidth,
            tpot_sequence_s=SEQUENCE_OVERHEAD_S + token_s,
            same_host=same_host,
            other_host=other_host,
        )

    def _weights_read(self) -> float:
        """Bytes of weights that a decode step reads: all but the experts that a typical batch does not use."""
        model = self.model
        rest = model.total_params - model.active_params
        if rest <= 0.05 * model.total_params:
            return model.active_params * self.weight_bytes
        share = model.active_params / model.total_params
        met = 1.0 - (1.0 - share) ** TYPICAL_BATCH
        return (model.active_params + met * rest) * self.weight_bytes


def fitting(
    model: ModelShape,
    gpu: Gpu,
    tp: int | None = None,
    *,
    weight_bytes: float = 2.0,
    kv_value_bytes: float = 2.0,
    mfu: float = 0.5,
    mbu: float = 0.6,
) -> Machine:
    """The model on `tp` GPUs; None: on the fewest, a power of two, that leave 30 % of memory for KV.

    Raises:
        ConfigError: the model does not fit.
    """
    if tp is None:
        weights = model.total_params * weight_bytes
        tp = 1
        while tp < 64 and weights > 0.6 * gpu.memory_bytes * tp:
            tp *= 2
    return Machine(model, gpu, tp, mfu, mbu, weight_bytes, kv_value_bytes)
