"""What all stages of a search share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lossyspec.hardware import HardwareInfo
from lossyspec.settings import Precision, Sampling

from .config import SearchConfig
from .models import ModelPool
from .progress import Reporter
from .search_space import SearchSpace
from .workloads import Workload


@dataclass(frozen=True)
class Work:
    """A search at work. reference: the precision that perplexity ratios are against. began: when the search did."""

    config: SearchConfig
    workload: Workload
    sampling: Sampling
    hardware: HardwareInfo
    pool: ModelPool
    space: SearchSpace
    reference: Precision
    reporter: Reporter
    stop: Callable[[], bool]
    began: float
