"""Studies: one module per question about this package; `benchmarks/study.py` defines a study."""

from benchmarks.compare import driver
from benchmarks.studies import (
    exchange,
    growth,
    objects,
    persist,
    plan,
    redundancy,
    replica_sharing,
    resharding_load,
    restart,
    scale,
    writers,
)
from benchmarks.study import Study
from benchmarks.train import study as train

STUDIES: tuple[Study, ...] = (
    driver.STUDY,
    train.STUDY,
    growth.STUDY,
    plan.STUDY,
    exchange.STUDY,
    resharding_load.STUDY,
    restart.STUDY,
    replica_sharing.STUDY,
    writers.STUDY,
    redundancy.STUDY,
    scale.STUDY,
    persist.STUDY,
    objects.STUDY,
)
